"""Reads CIFAR-10 from an archive of images: ``train/CLASS/NAME.jpg`` and ``test/CLASS/NAME.jpg``.

Nothing is unpacked to disk: members are decoded in memory, whatever their names are.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

SIDE = 32
IMAGE_BYTES_MAX = 1 << 20
IMAGES_MAX = 200_000
CLASSES_MAX = 256


def decode(archive: Path, into: Path) -> None:
    """Decode the images and write ``{train,test}_{x,y}.npy`` (uint8) to the folder ``into``.

    Labels number the classes of the training part in alphabetical order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such archive; the message says why.
    """
    if not archive.is_file():
        raise FileNotFoundError(f"{archive}: no such file; --data takes a tar archive of CIFAR-10 images")
    images: dict[str, list[tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]] = {
        "train": [],
        "test": [],
    }
    count = 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                place = _place(member)
                if place is None:
                    continue
                count += 1
                if count > IMAGES_MAX:
                    raise ValueError(f"{archive}: more than {IMAGES_MAX:,} images; this is not CIFAR-10")
                file = tar.extractfile(member)
                if file is None:
                    raise ValueError(f"{archive}: {member.name!r} cannot be read")
                images[place[0]].append((place[1], _image(member.name, file.read())))
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{archive}: not a whole tar archive ({error})") from error
    _write(archive, into, images)


@contextlib.contextmanager
def unpacked(archive: Path | None, out: Path) -> Iterator[Path | None]:
    """A folder in ``out`` with the archive's arrays until the context ends; ``None``: there is no archive."""
    out.mkdir(parents=True, exist_ok=True)
    if archive is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=out, prefix=".cifar-") as folder:
        decode(archive, Path(folder))
        yield Path(folder)


def _place(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """("train" or "test", class) of an image; ``None`` for folders and other files."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{member.name!r} points out of the archive; refused")
    if not member.isfile() or path.suffix.lower() not in (".jpg", ".jpeg", ".png"):
        return None
    if len(path.parts) < 3 or path.parts[-3] not in ("train", "test"):
        return None
    if member.size > IMAGE_BYTES_MAX:
        raise ValueError(f"{member.name!r} has {member.size:,} bytes; too much for a {SIDE} x {SIDE} image")
    return path.parts[-3], path.parts[-2]


def _image(name: str, data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.size != (SIDE, SIDE):  # before any pixel is decoded
                raise ValueError(f"{name!r} is {image.size[0]} x {image.size[1]}; expected {SIDE} x {SIDE}")
            return np.asarray(image.convert("RGB"), np.uint8)
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{name!r} is not an image: {error}") from error


def _write(
    archive: Path,
    into: Path,
    images: dict[str, list[tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]],
) -> None:
    classes = sorted({label for label, _ in images["train"]})
    if not 2 <= len(classes) <= CLASSES_MAX or not images["test"]:
        raise ValueError(
            f"{archive}: found {len(images['train'])} training images in {len(classes)} classes and "
            f"{len(images['test'])} test images; expected train/CLASS/NAME.jpg and test/CLASS/NAME.jpg"
        )
    number = {label: i for i, label in enumerate(classes)}
    for part, found in images.items():
        unknown = sorted({label for label, _ in found} - number.keys())
        if unknown:
            raise ValueError(f"{archive}: class {unknown[0]!r} in {part}/ is not in train/")
    into.mkdir(parents=True, exist_ok=True)
    for part, found in images.items():
        np.save(into / f"{part}_x.npy", np.stack([x for _, x in found]), allow_pickle=False)
        np.save(into / f"{part}_y.npy", np.array([number[c] for c, _ in found], np.uint8), allow_pickle=False)
