"""A peer's training state on its way: to newcomers, from donors, to a disk and back."""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ragtag.core import seed as random
from ragtag.core.types import Noted, PeerId
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.protocols.transfer.types import Fetched, Need, TransferError
from ragtag.training.optimizer.averaged import AveragedModel
from ragtag.training.samples.epochs import NAME as DATA
from ragtag.training.samples.epochs import Epochs
from ragtag.training.state.capture import Further, Stateful, capture, restore
from ragtag.training.state.checkpoint import Checkpoints, Found
from ragtag.training.state.compression_state import NAME as COMPRESSION
from ragtag.training.state.compression_state import CompressionState
from ragtag.training.state.snapshot import Snapshot, layout_of
from ragtag.training.state.tree import copy_tree

T = TypeVar("T")
DONORS_MAX = 4
"""Donors that one newcomer asks: each takes a snapshot for it."""
_GROWTH = 8  # a state is taken for damaged where it is so many times longer than this peer's own
_SLACK_BYTES = 1 << 20
OPTIMIZER = "ragtag.optimizer"
"""Names of further optimizers begin with this, among the extra parts of snapshots."""
_FOLDERS_MAX = 64  # folders that are known to have checkpoints of this run

_log = logging.getLogger("ragtag")


class Draw(Protocol):
    """Draws some of what there is."""

    def __call__(self, able: Sequence[T], /) -> list[T]:
        """Those that were drawn."""
        ...


class Donors(Protocol):
    """Reaches the peers that give their state."""

    def ask(
        self,
        need: Need,
        deadline_s: float,
        *,
        behind: Collection[PeerId],
        draw: Draw,
        noted: Callable[[str, str, str], None],
    ) -> Future[Fetched | None]:
        """Get a state within so many seconds, while this peer goes on; ``None``: there is nobody to ask.

        behind: peers that are not asked, since they are behind the crew themselves.
        draw: says whom to ask of those that could be.
        noted: told what happened, with the donor's name and a detail.
        The future raises TransferError where no donor could give it.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CrewsState:
    """A crew's state that has come, and what it is made of."""

    snapshot: Snapshot
    fetched: Fetched

    @property
    def round(self) -> int:
        """The round after which it was taken."""
        return self.fetched.round

    @property
    def mixed(self) -> bool:
        """Whether parts of it are of other rounds or replicas, since donors of one were too few."""
        return self.fetched.mixed


class StateKeeper:
    """What belongs to a peer's training, and its copies.

    tell: writes a note to the trace.
    """

    def __init__(self, me: PeerId, seed: int, tell: Callable[[Noted], None]) -> None:
        self.me, self._seed, self.tell = me, seed, tell
        self.models: list[AveragedModel] = []
        self.extra: dict[str, Stateful] = {}
        self.data: Epochs | None = None
        """Where the crew is in its data, which is in all snapshots."""
        self.round = -1
        """Of the crew's state that came last (-1: none)."""
        self._pending: Snapshot | None = None
        self._waiting: set[str] = set()  # the names of its parts that nobody has loaded yet
        self._shelf: Shelf | None = None
        self._schema = 0
        self._fetches = 0
        self._before = 0  # rounds of the training before this run
        self._told_in: Checkpoints | None = None  # where this run resumed, or looked for what to resume
        self._folders: dict[Path, None] = {}  # where checkpoints of this run may be, the newest known last

    def serve(self, shelf: Shelf) -> None:
        """Newcomers take what lies on this shelf."""
        self._shelf = shelf

    def moved(self, me: PeerId, shelf: Shelf | None) -> None:
        """This peer has another place."""
        self.me, self._shelf = me, shelf

    @property
    def first(self) -> AveragedModel | None:
        """The first one: its rounds count in snapshots."""
        return self.models[0] if self.models else None

    def take_in(self, averaged: AveragedModel) -> None:
        """This optimizer, with its model, is kept, too. What was found of it before is loaded now.

        Raises ValueError: that is of another model or optimizer; nothing has changed then.
        """
        self.models.append(averaged)
        self._load_found(self._parts_of(averaged, own=False))

    def _parts_of(self, averaged: AveragedModel, own: bool) -> dict[str, Stateful]:
        """What of an optimizer belongs to the extra parts of a snapshot, beside what users keep.

        own: with what no other peer is to have.
        """
        at = self.models.index(averaged)
        parts: dict[str, Stateful] = {}
        if at > 0:
            parts[_part_of(averaged)] = Further(averaged, self.models[:at])
        if averaged.sparse is not None:
            name = COMPRESSION if at == 0 else f"{COMPRESSION}/{averaged.name}"
            parts[name] = CompressionState(averaged, own)
        return parts

    def _load_found(self, holders: Mapping[str, Stateful]) -> bool:
        """Load what was found of them, each once: they go on from there. Whether there was anything."""
        found = [name for name in holders if name in self._waiting]
        for name in found:
            assert self._pending is not None
            holders[name].load_state_dict(copy_tree(self._pending.extra[name], name))
            self._waiting.remove(name)
        return bool(found)

    def keep(self, **objects: Stateful) -> None:
        """More that belongs to the training: each has state_dict and load_state_dict.

        Where this peer came late, or resumed, what was found of it is loaded now, once; and since making a
        scheduler changes learning rates, those of all optimizers that have taken no step yet are set again.

        Raises:
            TypeError: an object has no state_dict and load_state_dict.
            ValueError: a name is kept already.
        """
        loaded = False
        for name, holder in objects.items():
            if name in self.extra and self.extra[name] is not holder:
                raise ValueError(f"{name!r} is kept already; give each object a name of its own")
            if not hasattr(holder, "state_dict") or not hasattr(holder, "load_state_dict"):
                raise TypeError(
                    f"{name!r} is a {type(holder).__name__}, without state_dict and load_state_dict"
                )
            loaded |= self._load_found({name: holder})
            self.extra[name] = holder
            self._grow({name: holder})
        if loaded and self._pending is not None:
            self._set_options(self._pending)

    def _set_options(self, found: Snapshot) -> None:
        """Learning rates and other options of all optimizers' groups, as they were found.

        Of one that has taken steps since they are its scheduler's by now.
        """
        for at, averaged in enumerate(self.models):
            step, optimizer = found.step, found.optimizer
            if at > 0:
                name = _part_of(averaged)
                if name not in found.extra or name in self._waiting:
                    continue
                step, optimizer = found.extra[name]["step"], found.extra[name]["optimizer"]
            if averaged.progress[0] == step:
                _set_groups(averaged.inner, optimizer["param_groups"])

    # -- Giving

    def gives(self, gives: bool) -> None:
        """Whether newcomers are given this peer's state: not while it is behind the crew itself."""
        if self._shelf is not None:
            self._shelf.gives(gives)

    def offer(self, round_: int) -> None:
        """After each round: leave a snapshot on the shelf where a newcomer waits for one."""
        shelf, first = self._shelf, self.first
        if shelf is None or first is None or not shelf.wanted(round_):
            return
        extra = self._extra(own=False)
        snapshot = capture(first, extra, round=round_, before=self._before)
        blob = snapshot.to_bytes()
        shelf.put(round_, snapshot.step, _schema_of(snapshot), layout_hash(blob), blob, self._replica())

    def _replica(self) -> int:
        """A digest of all that is to be the same at all peers: of a replica that is apart from most others no
        peer is to get its state. 0: nothing is kept alike.
        """
        digests = [model.replica for model in self.models if model.replica is not None]
        return zlib.crc32(struct.pack(f"<{len(digests)}I", *digests)) if digests else 0

    def offer_now(self) -> None:
        """Before the first round: leave a snapshot where a newcomer waits for one. Each time counts as a
        round, until ``offered``.
        """
        if self._shelf is not None:
            self.offer(self._shelf.round + 1)

    def offered(self) -> None:
        """Rounds follow, and are counted from the first."""
        if self._shelf is not None:
            self._shelf.restart()

    def offer_last(self) -> None:
        """No round will follow: leave a snapshot where a newcomer waits for one, of whichever round."""
        if self._shelf is not None and self._shelf.round >= 0:
            self._shelf.ended = True
            self.offer(self._shelf.round)

    # -- Taking

    @property
    def only_model(self) -> bool:
        """Whether all that belongs to the training is averaged models: the next average brings it."""
        first = self.first
        if first is None or first.follower is not None or first.compression is not None:
            return False
        if len(self.models) > 1:
            return False
        more = first.outer_state or self.extra or first.left_out
        return not more and not any(first.inner.state.values())

    def asking(
        self, donors: Donors, behind: Callable[[], Collection[PeerId]]
    ) -> Callable[[float], Future[CrewsState | None]]:
        """What gets the crew's state within so many seconds, and changes nothing here.

        Its futures come to ``None`` where nobody could give it; a note and a warning say why.

        behind: the peers that are behind the crew themselves.

        Raises:
            RuntimeError: there is no optimizer yet.
        """
        if self.first is None:
            raise RuntimeError("nothing to fetch a state for yet: make the crew's optimizer first")
        own = capture(self.first, {})
        need = Need(_schema_of(own), blob_bytes_max=_bytes_max(len(own.to_bytes())))
        nobody = "no member gives its state"
        if self.first.follower is None:
            nobody += "; averages bring the model"

        def ask(deadline_s: float) -> Future[CrewsState | None]:
            state: Future[CrewsState | None] = Future()

            def came(fetched: Future[Fetched | None]) -> None:
                try:
                    state.set_result(self._read(fetched, nobody))
                except BaseException as error:
                    state.set_exception(error)

            asked = donors.ask(need, deadline_s, behind=behind(), draw=self._draw, noted=self._noted)
            asked.add_done_callback(came)
            return state

        return ask

    def _read(self, asked: Future[Fetched | None], nobody: str) -> CrewsState | None:
        """What has come, in whichever thread it came; nothing here is changed but the notes."""
        try:
            fetched = asked.result()
            if fetched is not None:
                return CrewsState(Snapshot.from_bytes(bytes(fetched.blob)), fetched)
            self.tell(Noted("no state", self.me, nobody))
        except (TransferError, ValueError) as error:
            self._failed(error)
        return None

    @property
    def loaded(self) -> Snapshot | None:
        """The last state that was put in place here, from a disk or from others."""
        return self._pending

    def put(self, state: CrewsState) -> bool:
        """Put the crew's state in place; ``False``: it does not fit: a note says why."""
        assert self.first is not None
        try:
            self._load(self.first, state.snapshot)
            self.round = state.snapshot.round
        except ValueError as error:
            self._failed(error)
            return False
        self.tell(Noted("state", self.me, _made_of(state.fetched)))
        return True

    def went_on(self, steps: int) -> None:
        """The crew has taken so many steps since the state that was put in place. What is kept that counts
        them together with others' (``KFAC``) has a method of this name, and is told.
        """
        for holder in self.extra.values():
            told = getattr(holder, "went_on", None)
            if callable(told):
                told(steps)

    def _failed(self, error: Exception) -> None:
        _log.warning("the crew's state did not come: %s", error)
        self.tell(Noted("no state", self.me, str(error)))

    def _draw(self, able: Sequence[T]) -> list[T]:
        """Whom of the peers that could give the state this one asks."""
        self._fetches += 1
        key = random.stream_key(self._seed, "donors", self.me, self._fetches)
        return [able[i] for i in random.permutation(key, len(able))[:DONORS_MAX]]

    def _noted(self, what: str, donor: str, detail: str) -> None:
        if what in ("lost", "dropped"):
            self.tell(Noted(f"donor {what}", self.me, f"{donor}: {detail}"))

    def _load(self, averaged: AveragedModel, snapshot: Snapshot, resumed: bool = False) -> None:
        """Load what is kept under a name already with the rest; the remaining parts wait for ``keep``."""
        parts = self._extra(own=False)
        known = {name: part for name, part in parts.items() if name in snapshot.extra and name != DATA}
        mine = {name: snapshot.extra[name] for name in known}
        restore(dataclasses.replace(snapshot, extra=mine), averaged, known)
        if self.data is not None:
            self.data.load_state_dict(snapshot.extra.get(DATA, {}), resumed)
        self._pending, self._waiting = snapshot, snapshot.extra.keys() - known.keys() - {DATA}
        self._before = max(self._before, snapshot.before)

    def _extra(self, own: bool) -> dict[str, Stateful]:
        """What belongs to a snapshot beside the first optimizer and its model.

        own: for this peer's checkpoints, with what no other is to have.
        """
        parts = dict(self.extra)
        for averaged in self.models:
            parts |= self._parts_of(averaged, own)
        if self.data is not None:
            parts[DATA] = self.data
        return parts

    # -- A disk

    def save(self, folder: Path, keep: int) -> Path:
        """Write a checkpoint.

        Raises:
            RuntimeError: there is no optimizer yet.
            OSError: it could not be written; earlier ones are as they were.
        """
        if self.first is None:
            raise RuntimeError("nothing to save yet: make the crew's optimizer first (crew.optimizer)")
        checkpoints = Checkpoints(folder, peer=self.me, keep=keep)
        snapshot = capture(self.first, self._extra(own=True))
        self._count_on(checkpoints, snapshot.round)
        return checkpoints.save(dataclasses.replace(snapshot, before=self._before))

    def _count_on(self, checkpoints: Checkpoints, round_: int) -> None:
        """Count rounds on to those of the training that the folder tells of (see ``checkpoint``)."""
        folder = checkpoints.folder.absolute()
        self._before = checkpoints.count_on(self._before, round_, new=folder not in self._folders)
        self._folders.pop(folder, None)
        self._folders[folder] = None
        if len(self._folders) > _FOLDERS_MAX:
            del self._folders[next(iter(self._folders))]

    def resume(self, folder: Path) -> Found | None:
        """Load the newest whole checkpoint of any peer; ``None``: there is none.

        Raises:
            RuntimeError: there is no optimizer yet.
            ragtag.training.state.checkpoint.NoWholeCheckpoint: all are damaged.
            ValueError: it is of another model or optimizer; the message names it and the first difference.
        """
        if self.first is None:
            raise RuntimeError("nothing to resume yet: make the crew's optimizer first (crew.optimizer)")
        checkpoints = Checkpoints(folder, peer=self.me)
        found = checkpoints.latest()
        self._count_on(checkpoints, 0)
        self.look_back(folder)
        if found is None:
            return None
        for damaged in found.damaged:
            self.tell(Noted("damaged checkpoint", self.me, str(damaged)))
        assert found.path is not None
        try:
            self._load(self.first, found.snapshot, resumed=True)
        except ValueError as error:
            raise ValueError(f"checkpoint {found.path} does not fit: {error}") from error
        self.tell(Noted("resumed", self.me, f"from {found.path.name}, step {found.step}"))
        self._resume_own(checkpoints, found)
        return found

    def look_back(self, folder: Path) -> None:
        """What only grows (``PrivateTraining``) is now all that any checkpoint of the folder tells, whichever
        state this peer goes on from: another peer's checkpoint, or the crew's, tells nothing of it.
        """
        self._told_in = Checkpoints(folder, peer=self.me)
        self._grow(self.extra)

    def _grow(self, holders: Mapping[str, Stateful]) -> None:
        growing = {name: holder for name, holder in holders.items() if getattr(holder, "only_grows", False)}
        if not growing or self._told_in is None:
            return
        for snapshot in self._told_in.every():
            for name in growing.keys() & snapshot.extra.keys():
                growing[name].load_state_dict(snapshot.extra[name])

    def _resume_own(self, checkpoints: Checkpoints, found: Found) -> None:
        """What this peer had not delivered is in its own checkpoint of that step, if anywhere."""
        sparse = {
            name: part
            for name, part in self._extra(own=True).items()
            if isinstance(part, CompressionState) and name in found.snapshot.extra
        }
        if not sparse:
            return
        own = found.snapshot if found.peer == self.me else checkpoints.own(found)
        for name, part in sparse.items():
            if own is not None and "own" in own.extra.get(name, {}):
                part.load_state_dict({"own": own.extra[name]["own"]})
            else:
                why = f"it has no checkpoint of step {found.step}: begins with none"
                self.tell(Noted("no residual", self.me, why))


def _part_of(averaged: AveragedModel) -> str:
    """A further optimizer's name among the extra parts of a snapshot."""
    return f"{OPTIMIZER}/{averaged.name}"


def _set_groups(inner: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Learning rates and other options of the groups, as they were."""
    for group, saved in zip(inner.param_groups, groups, strict=True):
        for name in ("lr", "initial_lr", "momentum", "betas"):
            if name in saved and name in group and not hasattr(group[name], "fill_"):
                group[name] = copy_tree(saved[name], name)


def _bytes_max(own: int) -> int:
    """How long a state may be that is not taken for damaged: several times as long as this peer's own.

    There may be optimizers that this peer has not made yet, of larger models: so anything that a quarter of
    the memory holds is let pass.
    """
    return max(_GROWTH * own + _SLACK_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def _schema_of(snapshot: Snapshot) -> int:
    return int(snapshot.schema_hash[:16], 16)


def layout_hash(blob: bytes | bytearray) -> int:
    """Of a snapshot's structure, 64 bits: chunks of several with the same make one."""
    return int.from_bytes(layout_of(bytes(blob)).digest[:8], "little")


def _made_of(fetched: Fetched) -> str:
    total = sum(fetched.given.values())
    shares = ", ".join(f"{name} {given / max(1, total):.0%}" for name, given in fetched.given.items())
    rounds = "" if len(fetched.rounds) == 1 else f" of rounds {sorted(fetched.rounds)}"
    return f"{total:,} bytes of round {fetched.round} in {fetched.took_s:.2f} s from {shares}{rounds}"
