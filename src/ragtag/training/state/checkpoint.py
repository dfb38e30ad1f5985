"""Snapshots on a disk: written whole or not at all, checked when read, the newest whole one taken.

A checkpoint is one file, ``peer-03-step-000120.ragtag``: a header of 96 bytes and a snapshot's bytes
(``training.state.snapshot``). In the header, little-endian: magic (8 bytes), format version u32, peer u32,
step u64, round u64, length of the snapshot u64, its BLAKE2b-256 (32), rounds of the training before this run
u64, BLAKE2b-128 of all that (16). So a header is judged alone (which checkpoint is the newest?), and a bit
that changed anywhere is found. The hashes find damage; they are no signature.

Any number of peers may write into one folder, and nothing in a checkpoint depends on how many there are. Each
keeps the newest few of its own; those of peers that are no longer there stay.

Checkpoints are in one order over all restarts: by rounds of the whole training, then by steps. Rounds are
what a crew's peers have in common (the steps of a fast one are ahead of those of a slow one), and each run
counts them from 0; ``before`` is what they are counted on to. It is a logical clock, as Lamport's (CACM
1978): a run begins one after the newest that it finds in the folder (``Checkpoints.count_on``), whatever it
goes on from; so what is written later is newer, though an older checkpoint was taken, newer ones are damaged,
or the machine's clock is wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragtag.core.errors import Error
from ragtag.training.state.atomic import remove_dead, sync_folder, write_whole
from ragtag.training.state.checkpoint_file import (
    COUNTS_MAX,
    NAME,
    PEERS_MAX,
    Damage,
    Header,
    file_name,
    files_in,
    read_header,
    read_whole,
)
from ragtag.training.state.snapshot import Progress, Snapshot

BYTES_MAX = 1 << 38
"""The longest snapshot that is written or read, unless told otherwise: 256 GiB."""
_SCANS_MAX = 8

_log = logging.getLogger("ragtag.checkpoint")


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file that is called a checkpoint and is no whole one, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The newest whole checkpoint; damaged: newer ones, and any whose header tells nothing.

    path: of its file; ``None``: the state came from ``peer``, which has the file.
    progress: how far it had come; the greater, the further (of checkpoints of any peers, in any folders).
    """

    path: Path | None
    peer: int
    step: int
    round: int
    progress: Progress
    snapshot: Snapshot
    damaged: tuple[Damaged, ...]


class NoWholeCheckpoint(Error, RuntimeError):
    """There are checkpoints, and all are damaged; the message names each and says why."""

    def __init__(self, folder: Path, damaged: tuple[Damaged, ...]) -> None:
        self.damaged = damaged
        each = "; ".join(f"{one.path.name}: {one.why}" for one in damaged)
        super().__init__(
            f"none of the checkpoints in {folder} is whole ({each}). To begin from nothing, move them away"
        )


class Checkpoints:
    """A folder of checkpoints, of one peer or of many.

    peer: the one that writes here.
    keep: how many of its own stay (the newest).
    bytes_max: the longest snapshot that is written or read.

    The folder need not exist yet. Raises NotADirectoryError when it is something else.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, peer: int = 0, keep: int = 3, bytes_max: int = BYTES_MAX
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint stays")
        if not 0 <= peer < PEERS_MAX:
            raise ValueError(f"peer is {peer}; it is from 0 to {PEERS_MAX - 1}")
        self.folder, self.peer, self.keep, self.bytes_max = Path(folder), peer, keep, bytes_max
        self._require_folder()

    def save(self, snapshot: Snapshot, *, step: int | None = None, round: int | None = None) -> Path:
        """Write a checkpoint; it is on the disk when this returns. Then remove the peer's older ones.

        step, round: as the snapshot's, unless given. One of the same peer and step is replaced. It is the
        newest where its ``before`` is what ``count_on`` says.
        Raises OSError (full disk, no permission; ``errno`` and ``filename`` say which and where) before any
        older checkpoint is touched, and leaves no part of a file; ValueError for one over ``bytes_max``.
        """
        step, round = (snapshot.step if step is None else step), (snapshot.round if round is None else round)
        if not all(0 <= count < COUNTS_MAX for count in (step, round, snapshot.before)):
            raise ValueError(f"step {step}, round {round}: counts are from 0 to 2^63 - 1")
        content = snapshot.to_bytes()
        if len(content) > self.bytes_max:
            raise ValueError(f"a snapshot of {len(content)} bytes; checkpoints have at most {self.bytes_max}")
        header = Header.of(content, peer=self.peer, step=step, round=round, before=snapshot.before)
        path = self.folder / file_name(self.peer, step)
        self._require_folder()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_dead(self.folder, NAME)
            write_whole(path, (header.encode(), content))
        except OSError as error:
            what = f"checkpoint not written ({error.strerror or error}); earlier ones are as they were"
            raise OSError(error.errno or 0, what, str(path)) from error
        self._remove_old(path)
        return path

    def count_on(self, before: int, round: int, *, new: bool) -> int:
        """How many rounds came before this run, by what is in the folder: ``before``, or more.

        round: the run's, now.
        new: nothing here is of this run, so a checkpoint of this round is to be newer than all that is here.
            Else as other peers of the run count, so that theirs and this peer's compare.
        Raises OSError when the folder cannot be read.
        """
        for header, _ in self._headers([], []):
            here = header.progress.rounds + 1 - round if new else header.before
            before = max(before, here)
        return before

    def own(self, found: Found) -> Snapshot | None:
        """This peer's own checkpoint of the step and round of another peer's.

        None: there is none, or it is damaged (the log says so).
        """
        path = self.folder / file_name(self.peer, found.step)
        try:
            header, content = read_whole(path, self.bytes_max)
            return Snapshot.from_bytes(content) if header.round == found.round else None
        except FileNotFoundError:
            return None
        except (Damage, ValueError) as why:
            _log.warning("damaged checkpoint %s", Damaged(path, str(why)))
            return None

    def every(self) -> Iterator[Snapshot]:
        """All whole checkpoints of all peers, one at a time, in no order. Damaged ones are passed over.

        Raises OSError when the folder cannot be read.
        """
        for path in files_in(self.folder) if self.folder.exists() else ():
            try:
                yield Snapshot.from_bytes(read_whole(path, self.bytes_max)[1])
            except (Damage, ValueError, FileNotFoundError):
                continue

    def latest(self) -> Found | None:
        """The newest whole checkpoint of any peer (see the module); None: there are none.

        Damaged ones are named in the result and in the log, and passed over.
        Raises NoWholeCheckpoint when there are only damaged ones; OSError when the folder cannot be read.
        """
        self._require_folder()
        if not self.folder.exists():
            return None
        for _ in range(_SCANS_MAX):
            try:
                return self._newest()
            except FileNotFoundError:
                continue  # it was removed meanwhile, so there is a newer one
        raise OSError(f"{self.folder}: checkpoints are removed faster than they can be read")

    def _newest(self) -> Found | None:
        damaged: list[Damaged] = []
        gone: list[Path] = []
        headers = self._headers(damaged, gone)
        if gone:
            raise FileNotFoundError(str(gone[0]))
        for one in damaged:
            _log.warning("damaged checkpoint %s", one)
        for _, path in sorted(headers, key=lambda each: (each[0].progress, each[0].peer), reverse=True):
            try:
                header, content = read_whole(path, self.bytes_max)
                snapshot = Snapshot.from_bytes(content)
            except (Damage, ValueError) as why:
                damaged.append(Damaged(path, str(why)))
                _log.warning("damaged checkpoint %s", damaged[-1])
                continue
            counts = header.peer, header.step, header.round, header.progress
            return Found(path, *counts, snapshot, tuple(damaged))
        if damaged:
            raise NoWholeCheckpoint(self.folder, tuple(damaged))
        return None

    def _headers(self, damaged: list[Damaged], gone: list[Path]) -> list[tuple[Header, Path]]:
        """All headers that can be read.

        The others are added to ``damaged``, or, where they were removed meanwhile, to ``gone``.
        """
        headers = []
        for path in files_in(self.folder) if self.folder.exists() else ():
            try:
                headers.append((read_header(path, self.bytes_max), path))
            except Damage as why:
                damaged.append(Damaged(path, str(why)))
            except FileNotFoundError:
                gone.append(path)
        return headers

    def _remove_old(self, fresh: Path) -> None:
        """Remove this peer's oldest but ``keep``; one without a readable header counts as the oldest."""
        try:
            others = [path for path in files_in(self.folder) if path != fresh and self._is_own(path)]
            others.sort(key=self._age, reverse=True)
            for path in others[self.keep - 1 :]:
                path.unlink(missing_ok=True)
            if others[self.keep - 1 :]:
                sync_folder(self.folder)
        except OSError as error:  # the new one is in place, and the next save tries again
            _log.warning("old checkpoints of peer %d cannot be removed: %s", self.peer, error)

    def _is_own(self, path: Path) -> bool:
        name = NAME.fullmatch(path.name)
        return name is not None and int(name[1]) == self.peer

    def _age(self, path: Path) -> Progress:
        try:
            return read_header(path, self.bytes_max).progress
        except (Damage, FileNotFoundError):
            return Progress(-1, -1)

    def _require_folder(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is no folder; give checkpoints another place")
