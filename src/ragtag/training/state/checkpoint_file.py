"""A checkpoint's file: a header that is checked by itself, and a snapshot's bytes. See ``checkpoint``.

Nothing is believed of a file before it is checked, its length neither: the header and the layout that the
content begins with must agree with the file's size before the content is read.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from ragtag.training.state.snapshot import HEADER_BYTES_MAX, Progress, layout_of

NAME = re.compile(r"peer-(\d{2,})-step-(\d{6,})\.ragtag")
ENTRIES_MAX = 100_000
"""How many entries a folder may have."""
MAGIC = b"\x89RAGTAG\n"
VERSION = 2
READ = (1, 2)
"""Versions that are read. Version 1 had zeros where ``before`` is."""
_FIELDS = struct.Struct("<8sIIQQQ32sQ")
_CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES
PEERS_MAX = 1 << 32
COUNTS_MAX = 1 << 63


class Damage(Exception):
    """Why a file is no whole checkpoint."""


class Header(NamedTuple):
    """What a checkpoint's file says of itself.

    before: rounds of the training before the run that wrote it.
    round: of that run.
    n_bytes: of the snapshot behind the header.
    digest: its BLAKE2b-256.
    """

    before: int
    round: int
    step: int
    peer: int
    n_bytes: int
    digest: bytes

    @property
    def progress(self) -> Progress:
        """How far the training had come; of two checkpoints the one with more is the newer one."""
        return Progress(self.before + self.round, self.step)

    @classmethod
    def of(cls, content: bytes, *, peer: int, step: int, round: int, before: int = 0) -> Self:
        """The header of a snapshot's bytes."""
        return cls(before, round, step, peer, len(content), digest_of(content))

    def encode(self) -> bytes:
        """``HEADER_BYTES`` bytes."""
        counts = self.peer, self.step, self.round, self.n_bytes
        body = _FIELDS.pack(MAGIC, VERSION, *counts, self.digest, self.before)
        return body + _check(body)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what ``encode`` wrote. Raises Damage, saying why, on anything else."""
        if len(data) < HEADER_BYTES:
            raise Damage(f"truncated: {len(data)} bytes, and its header has {HEADER_BYTES}")
        body, check = data[: _FIELDS.size], data[_FIELDS.size : HEADER_BYTES]
        magic, version, peer, step, round_, n_bytes, digest, before = _FIELDS.unpack(body)
        if _check(body) != check:
            known = magic == MAGIC and version in READ
            raise Damage(
                "the hash of its header differs" if known else "it does not begin as a checkpoint does"
            )
        if magic != MAGIC:
            raise Damage("it does not begin as a checkpoint does")
        if version not in READ:
            raise Damage(f"format version {version}, and this ragtag reads {READ[0]} to {READ[-1]}")
        if max(step, round_, before) >= COUNTS_MAX:
            raise Damage("its counts are beyond 2^63 - 1")
        return cls(before if version > 1 else 0, round_, step, peer, n_bytes, digest)


def digest_of(content: bytes) -> bytes:
    """BLAKE2b-256 of a snapshot, 32 bytes."""
    return hashlib.blake2b(content, digest_size=32).digest()


def file_name(peer: int, step: int) -> str:
    """A checkpoint's file name; ``NAME`` reads it."""
    return f"peer-{peer:02d}-step-{step:06d}.ragtag"


def files_in(folder: Path) -> list[Path]:
    """The files of a folder that are called as checkpoints are. Raises OSError, also when it has too many."""
    with os.scandir(folder) as entries:
        found = []
        for at, entry in enumerate(entries):
            if at >= ENTRIES_MAX:
                raise OSError(
                    f"{folder} has more than {ENTRIES_MAX} entries; give checkpoints a folder of their own"
                )
            if NAME.fullmatch(entry.name):
                found.append(Path(entry.path))
    return found


def read_header(path: Path, bytes_max: int) -> Header:
    """A file's header, compared with its size. Raises Damage; FileNotFoundError when it is gone."""
    return _read(path, bytes_max, with_content=False)[0]


def read_whole(path: Path, bytes_max: int) -> tuple[Header, bytes]:
    """A file's header and content, hashes compared. Raises Damage; FileNotFoundError when it is gone."""
    header, content = _read(path, bytes_max, with_content=True)
    if digest_of(content) != header.digest:
        raise Damage("the hash of its content differs")
    return header, content


def _read(path: Path, bytes_max: int, with_content: bool) -> tuple[Header, bytes]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as opened:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise Damage("it is no regular file")
            header = Header.decode(opened.read(HEADER_BYTES))
            _require_size(about.st_size - HEADER_BYTES, header.n_bytes, bytes_max)
            content = _content(opened, header.n_bytes) if with_content else b""
    except FileNotFoundError:
        if path.is_symlink():
            raise Damage("it is a link to a file that is not there") from None
        raise
    except OSError as error:
        raise Damage(f"it cannot be read: {error.strerror or error}") from error
    return header, content


def _content(file: BinaryIO, n_bytes: int) -> bytes:
    """The rest of a file, once its beginning says that it is a snapshot of so many bytes.

    A file of the right length that was never filled costs no more than its first block.
    """
    begin = file.read(min(8, n_bytes))
    begin += file.read(min(int.from_bytes(begin, "little"), HEADER_BYTES_MAX, n_bytes - len(begin)))
    try:
        expected = layout_of(begin).n_bytes
    except ValueError as error:
        raise Damage(f"no snapshot: {error}") from error
    if expected != n_bytes:
        raise Damage(f"no snapshot: its tensors end at {expected}, and it has {n_bytes} bytes")
    file.seek(HEADER_BYTES)
    try:
        return file.read(n_bytes)
    except MemoryError:
        raise Damage(f"{n_bytes} bytes of content, for which there is no memory") from None


def _require_size(size: int, expected: int, bytes_max: int) -> None:
    if size < expected:
        raise Damage(f"truncated: {size} bytes of content, and its header says {expected}")
    if size > expected:
        raise Damage(f"{size - expected} bytes follow its content")
    if size > bytes_max:
        raise Damage(f"{size} bytes of content; at most {bytes_max} are read")


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
