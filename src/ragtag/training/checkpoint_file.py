"""A checkpoint's file: a header that is checked by itself, and a snapshot's bytes. See ``checkpoint``."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from pathlib import Path
from typing import NamedTuple, Self

NAME = re.compile(r"peer-(\d{2,})-step-(\d{6,})\.ragtag")
ENTRIES_MAX = 100_000
"""How many entries a folder may have."""
MAGIC = b"\x89RAGTAG\n"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQQQ32s8x")
_CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES
PEERS_MAX = 1 << 32
COUNTS_MAX = 1 << 63


class Damage(Exception):
    """Why a file is no whole checkpoint."""


class Header(NamedTuple):
    """What a checkpoint's file says of itself; the newest is the largest.

    n_bytes: of the snapshot behind the header; digest: its BLAKE2b-256.
    """

    round: int
    step: int
    peer: int
    n_bytes: int
    digest: bytes

    @classmethod
    def of(cls, content: bytes, *, peer: int, step: int, round: int) -> Self:
        """The header of a snapshot's bytes."""
        return cls(round, step, peer, len(content), digest_of(content))

    def encode(self) -> bytes:
        """``HEADER_BYTES`` bytes."""
        body = _FIELDS.pack(MAGIC, VERSION, self.peer, self.step, self.round, self.n_bytes, self.digest)
        return body + _check(body)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what ``encode`` wrote. Raises Damage, saying why, on anything else."""
        if len(data) < HEADER_BYTES:
            raise Damage(f"truncated: {len(data)} bytes, and its header has {HEADER_BYTES}")
        body, check = data[: _FIELDS.size], data[_FIELDS.size : HEADER_BYTES]
        magic, version, peer, step, round_, n_bytes, digest = _FIELDS.unpack(body)
        if _check(body) != check:
            known = magic == MAGIC and version == VERSION
            raise Damage(
                "the hash of its header differs" if known else "it does not begin as a checkpoint does"
            )
        if magic != MAGIC:
            raise Damage("it does not begin as a checkpoint does")
        if version != VERSION:
            raise Damage(f"format version {version}, and this ragtag reads {VERSION}")
        return cls(round_, step, peer, n_bytes, digest)


def digest_of(content: bytes) -> bytes:
    """BLAKE2b-256."""
    return hashlib.blake2b(content, digest_size=32).digest()


def file_name(peer: int, step: int) -> str:
    """What a checkpoint's file is called."""
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
            content = opened.read(header.n_bytes) if with_content else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damage(f"it cannot be read: {error.strerror or error}") from error
    return header, content


def _require_size(size: int, expected: int, bytes_max: int) -> None:
    if size < expected:
        raise Damage(f"truncated: {size} bytes of content, and its header says {expected}")
    if size > expected:
        raise Damage(f"{size - expected} bytes follow its content")
    if size > bytes_max:
        raise Damage(f"{size} bytes of content; at most {bytes_max} are read")


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES).digest()
