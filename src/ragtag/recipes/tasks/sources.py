"""The files that ``--data`` names: images, a text, or both."""

from __future__ import annotations

import tarfile
from pathlib import Path


def sources(data: Path | None) -> tuple[Path | None, Path | None]:
    """The archive of images and the text in ``data``; ``None``: there is none.

    A tar archive (by its name, ``.tar``, ``.tar.*``, ``.tgz`` or ``.txz``, or by its contents) holds CIFAR-10
    images. Any other file is a text. A folder may have one archive (by name) and one ``*.txt``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a folder has neither, or several of a kind.
    """
    if data is None:
        return None, None
    if not data.exists():
        raise FileNotFoundError(
            f"there is no {data}; --data takes a tar archive of images, a text, or a folder"
        )
    if data.is_file():
        return (data, None) if _named_archive(data) or tarfile.is_tarfile(data) else (None, data)
    archives = sorted(path for path in data.iterdir() if _named_archive(path))
    texts = sorted(data.glob("*.txt"))
    if len(archives) > 1 or len(texts) > 1 or not (archives or texts):
        raise ValueError(
            f"{data} has {len(archives)} tar archives and {len(texts)} .txt files; of a folder, --data takes "
            f"one archive of CIFAR-10 images, one text, or one of each"
        )
    return next(iter(archives), None), next(iter(texts), None)


def _named_archive(path: Path) -> bool:
    return ".tar" in path.suffixes or path.suffix in (".tgz", ".txz")
