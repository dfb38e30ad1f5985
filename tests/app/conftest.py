"""Folders for crews of processes; disks and folders that give trouble."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.app.processes import Place

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder in which crews run; they have ended when a test has."""
    made = Place(tmp_path)
    yield made
    made.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    at = tmp_path / "disk"
    at.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("needs root to mount a small file system")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(at)], capture_output=True)
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anyone may enter and read, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="ragtag-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may do everything; nobody may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def wide(place: Place) -> Place:
    """Crews whose model has several chunks, so that peers own some. Smaller steps keep it finite."""
    script = place.folder / "train.py"
    script.write_text(script.read_text().replace("lr=0.05", "lr=1e-5"))
    return place
