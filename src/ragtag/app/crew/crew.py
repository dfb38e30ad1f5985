"""A crew: what a training script sees of Ragtag."""

from __future__ import annotations

import atexit
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from ragtag.app.crew.catching_up import catch_up, come_abreast, fall_behind, in_step
from ragtag.app.crew.finish import NOTHING, Averaged, begin_alike, finish, tell_progress
from ragtag.app.crew.logbook import Logbook
from ragtag.app.crew.membership import Entrance
from ragtag.app.crew.phases import Phases
from ragtag.app.crew.state import Keeper
from ragtag.app.crew.transport import DriverTransport, SeatLost, SoloTransport
from ragtag.app.disk import Spare
from ragtag.app.environment import Announcer, Place, Reached
from ragtag.app.invitation.token import ADDRESSES_MAX, TOKEN_FILE, Token, encode, keep_token
from ragtag.app.tracefile import TraceWriter
from ragtag.codecs.base import Codec
from ragtag.core import trace
from ragtag.core.channels import channel_of, require_name
from ragtag.core.errors import Error, HasLeft
from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.network.driver.driver import Driver
from ragtag.network.transfer.donor import DonorServer
from ragtag.network.transfer.snapshots import Shelf
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.node import CATCH_UP
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Centre
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.training.align.plan import Align
from ragtag.training.coherence import Coherence
from ragtag.training.exchange.compress import TopK
from ragtag.training.named import NamedTensors, Shape
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.optimizer.scheduling import Conduct
from ragtag.training.samples.deal import Indices
from ragtag.training.samples.epochs import Epochs
from ragtag.training.samples.loader import require_loader
from ragtag.training.samples.sizes import BatchSizes
from ragtag.training.samples.split import Split
from ragtag.training.samples.together import together
from ragtag.training.state.capture import Stateful
from ragtag.training.state.checkpoint import Found
from ragtag.training.state.standing import NO_STATE
from ragtag.training.state.whole import Finished, Stand, digest_of, rounds_of
from ragtag.training.tensors.modules import parameters_of

_log = logging.getLogger("ragtag")
LEAVE_S = 5.0
"""How long leaving may take."""


class StateMissing(Error, RuntimeError):
    """This peer has an older state than its crew, whose state did not come; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Entered:
    """What a peer that joins anew has in place of what it had."""

    place: Place
    driver: Driver
    entrance: Entrance
    donor: DonorServer | None
    shelf: Shelf | None
    writer: TraceWriter | None
    met: int


Again = Callable[[Driver], Entered]
"""Joins anew, where the members that a driver knows are. Raises JoinError."""


class Crew(Logbook):
    """The peers that train one model together, as one of them sees it.

    Made by ``ragtag.join``. Use it as a context manager, or call ``leave`` at the end; a script that ends
    without is taken to leave.
    """

    def __init__(
        self,
        place: Place,
        transport: DriverTransport | SoloTransport,
        driver: Driver | None,
        writer: TraceWriter | None,
        origin_s: float,
        donor: DonorServer | None = None,
        shelf: Shelf | None = None,
        again: Again | None = None,
        phases: Phases | None = None,
        announcer: Announcer | None = None,
    ) -> None:
        super().__init__(place, driver, writer, origin_s)
        self._announcer = announcer or Announcer(place.rank, None)
        self._has_averaged = False
        self._phases = phases or Phases()
        self._phases.to(self._record_phase)
        self._comes_since_s: float | None = None
        self._donor, self._again = donor, again
        self._keeper = Keeper(place.rank, place.seed, self.note)
        if shelf is not None:
            self._keeper.serve(shelf)
        self._last_round: int | None = None
        self._invited_by: frozenset[PeerId] = frozenset()
        self._spare = Spare("the invitation to this crew in the run's folder", _log.warning)
        self._last_s = time.monotonic()
        self._transport = transport
        self._left = False
        self._epochs = Epochs(transport, self._splits_by_number, self._round)
        self._keeper.data = self._epochs
        self._splits_made = 0
        self._entered: list[int] = []
        self._resumed = 0
        self._averaged: list[Averaged] = []
        self._finished: Finished | None = None
        self._began_s = time.monotonic()
        self._conducts: list[Conduct] = []
        self._splits: weakref.WeakKeyDictionary[DataLoader[Any], Split] = weakref.WeakKeyDictionary()
        self._split_by: weakref.WeakKeyDictionary[DataLoader[Any], tuple[Any, ...]] = (
            weakref.WeakKeyDictionary()
        )
        this = weakref.ref(self)

        def leave_at_exit() -> None:
            crew = this()
            if crew is None or crew._left:
                return
            error = getattr(sys, "last_value", None)  # what has ended the script
            if error is None:
                crew.leave(finish=False)  # too late to save another model
            else:
                crew.__exit__(type(error), error, None)

        atexit.register(leave_at_exit)

    def __repr__(self) -> str:
        where = "left" if self._left else f"live: {sorted(self.live)}"
        return f"Crew({self._place.crew!r}, peer {self.rank} of {self.size}, {where})"

    def _splits_by_number(self) -> dict[int, Split]:
        return {split.ordinal: split for split in self._splits.values()}

    def _round(self) -> int:
        """The crew's last round that this peer knows of (-1: none)."""
        kept = self._keeper.optimizer
        return self._keeper.round if kept is None or kept.outcome is None else kept.outcome.round

    # -- Who is there

    @property
    def size(self) -> int:
        """How many peers the crew began with."""
        return self._place.size

    @property
    def live(self) -> frozenset[PeerId]:
        """The peers believed to take part now; always with this one."""
        return self._transport.live

    @property
    def seed(self) -> int:
        """The crew's seed, the same on every peer."""
        return self._place.seed

    @property
    def transport(self) -> DriverTransport | SoloTransport:
        """How the others are reached: for averagers and hooks."""
        return self._transport

    @property
    def left(self) -> bool:
        """Whether this peer has left."""
        return self._left

    def invitation(self, minutes: int | None = None) -> str:
        """A token for ``ragtag join``: through this peer, and up to seven others that live now.

        minutes: for how long it lets newcomers in (``None``: as long as one of these peers is there); the
        members hold to that, by their own clocks.

        Raises RuntimeError where nobody can join: the peer is alone, or was started without membership.
        """
        ends_unix_s = 0 if minutes is None else int(time.time()) + 60 * minutes
        return encode(self._token().invitation(ends_unix_s))

    def _token(self) -> Token:
        driver, place = self._driver, self._place
        own = driver.own_member_address if driver is not None else None
        if driver is None or own is None or place.key is None:
            raise RuntimeError(
                "nobody can join this peer: start it by `ragtag run`, `ragtag join` or torchrun"
            )
        addresses = (own, *driver.members())[:ADDRESSES_MAX]
        return Token(addresses, place.crew, place.key)

    def _keep_invitation(self) -> None:
        """As members come and go, keep the token in the run's folder one that lets newcomers in."""
        live, place, driver = self.live, self._place, self._driver
        if live == self._invited_by or place.run_folder is None or driver is None:
            return
        if driver.own_member_address is None or self._spare.write(
            partial(self._write_invitation, place.run_folder)
        ):
            self._invited_by = live

    def _write_invitation(self, folder: Path) -> None:
        """Raises OSError."""
        if (folder / TOKEN_FILE).exists():
            keep_token(folder, encode(self._token()))

    # -- Training

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        averager: Averager | str | None = None,
        *,
        model: torch.nn.Module | None = None,
        name: str | None = None,
        average: Literal["models", "gradients"] = "models",
        every: int | None = None,
        schedule: Schedule | Centre | ProgressiveGrouping | Averager | str | None = None,
        weight: float | Callable[[], float] | Literal["samples"] = 1.0,
        buffers: bool = True,
        codec: Codec | Literal["fp32", "bf16", "int8"] | None = None,
        compress: TopK | None = None,
        outer: Nesterov | Streaming | None = None,
        align: Align | bool = True,
        coherence: Coherence | None = None,
        deadline_s: float | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> CrewOptimizer:
        """Wrap an optimizer: it takes its local steps, and averages with the crew.

        averager: ``ragtag.RPS()`` (the default), ``AllReduce``, ``Moshpit``, ``RandomGroups``, ``Centre``; or
            a name: "rps", "rps+repair", "allreduce", "ring", "moshpit", "random-groups" ("moshpit=4").
        model: whose parameters these are; given, the crew compares models now, else when it averages.
        name: of what it averages, the same on all peers; several optimizers are else told apart by the order
            in which they are made ("model", "model 2", ...).
        average: "models" after local steps, or "gradients" before them.
        every: average after so many local steps. schedule: or when one of ``ragtag.schedules`` says so; or a
            name: "partial", "matched", "ssp=4", "dropcompute=8", "backup", "softsync", "asynchronous",
            "grouping".
        weight: how much this peer counts: a number, a function, or "samples" since the last average.
        buffers: average the model's floating-point buffers, too.
        codec: how values travel: "fp32" (the default), "bf16" (half the bytes) or "int8" (a quarter).
        compress: ``ragtag.TopK(...)``: send the largest entries, the rest later.
        outer: ``ragtag.Outer(...)``: outer momentum on averages of models (DiLoCo).
        align: ``ragtag.Align(...)``, or False: how replicas that average gradients are kept alike.
        coherence: ``ragtag.Coherence()``: measure how far gradients agree with earlier ones.
        deadline_s: bounds each round; by default the bound comes from measurement.
        on_outcome: called with each round's outcome.

        More on each: ``ragtag.training.optimizer.optimizer.CrewOptimizer``. Raises SchemaMismatch where
        another peer has another model; TypeError or ValueError, saying what to write, for what cannot be.
        """

        self._require_in("crew.optimizer(...)")

        def told(outcome: Outcome) -> None:
            self.record_round(outcome)
            if self._comes_since_s is not None and outcome.averaged.any():
                self._phases.over("average", time.monotonic() - self._comes_since_s)
                self._comes_since_s = None
            if self._keeper.optimizer is not None and outcome.channel == self._keeper.optimizer.channel:
                self._look_back(outcome)
            self._record_pace(made)
            self._record_sparse(made, outcome)
            self._record_align(made, outcome)
            if on_outcome is not None:
                on_outcome(outcome)

        fine = isinstance(optimizer, torch.optim.Optimizer)  # else it is refused below
        parameters = parameters_of(optimizer.param_groups) if fine else []
        compared = isinstance(self._transport, DriverTransport) and not any(map(is_lazy, parameters))
        initial = digest_of(parameters) if compared else ""
        taken = self.take_name(name, "model")
        try:
            made = CrewOptimizer(
                optimizer,
                self._transport,
                method=averager,
                average=average,
                schedule=schedule,
                every=every,
                model=model,
                name=taken,
                buffers=buffers,
                weight=weight,
                samples=self._samples_so_far,
                outer=outer,
                codec=codec,
                compress=compress,
                align=align,
                deadline_s=deadline_s,
                coherence=coherence,
                on_outcome=told,
                on_ready=lambda ready: self._enter(ready, initial),
                on_note=self.note,
                on_step=partial(self._stepped, len(self._conducts)),
                seed=self.seed,
            )
        except BaseException:
            del self._names[channel_of(taken)]  # for whoever tries again with other options
            raise
        self._conducts.append(made.conduct)
        return made

    def tensors(
        self,
        name: str,
        *,
        averaged: Mapping[str, Shape] | None = None,
        computed: Mapping[str, Shape] | None = None,
        averager: Averager | str | None = None,
        codec: Codec | Literal["fp32", "bf16", "int8"] | None = None,
    ) -> NamedTensors:
        """Tensors of a part of training's own, which it averages, or computes at one owner for all.

        name: of all of them together, the same on all peers. averaged, computed: names to shapes (or example
        tensors). averager: ``ragtag.RPS()`` (the default) or another that averages at once. codec: how they
        travel. Snapshots and checkpoints have the newest values. More: ``ragtag.training.named``.

        Raises SchemaMismatch where another peer has other names or shapes; ValueError, saying what to write,
        for what cannot be.
        """
        self._require_in("crew.tensors(...)")
        taken = self.take_name(name, "tensors")
        transport = self._transport
        try:
            made = NamedTensors(
                transport,
                taken,
                averaged,
                computed,
                method=averager,
                codec=codec,
                seed=self.seed,
                founded=self.size,
                away=lambda: isinstance(transport, DriverTransport) and transport.late,
                on_outcome=self._write_round,
            )
        except BaseException:
            del self._names[channel_of(taken)]  # for whoever tries again with other ones
            raise
        self._names[made.channel] = taken
        self._keeper.keep(**{f"ragtag.tensors/{taken}": made})
        return made

    def take_name(self, name: str | None, kind: str = "model") -> str:
        """A name for what is averaged: the one given, or the next free one of its kind.

        Raises ValueError: it is no name, or is taken.
        """
        if name is None:
            numbered = (kind if number == 1 else f"{kind} {number}" for number in count(1))
            name = next(free for free in numbered if channel_of(free) not in self._names)
        elif channel_of(require_name(name)) in self._names:
            raise ValueError(f"{name!r} is averaged already: give each optimizer a name of its own")
        self._names[channel_of(name)] = name
        return name

    def _samples_so_far(self) -> int:
        """Samples that this peer was given by its splits, or, without splits, that it has logged."""
        drawn = sum(split.samples for split in self._splits.values())
        return drawn or self._samples

    def averages(self, what: Averaged) -> None:
        """Something is averaged, which ``finish`` is to end alike on all peers."""
        self._averaged.append(what)

    def _enter(self, optimizer: CrewOptimizer, initial: str) -> None:
        """What is averaged is agreed on. A peer that comes late takes the crew's state over first.

        Where gradients are averaged it does so in its first average, and not here: whatever its script still
        has to do before it begins, all rounds from then on are to find it in step.

        initial: the digest of the weights that it was made with. Where peers began with different ones all
        take the lowest peer's, as DistributedDataParallel does.
        """
        first = self._keeper.optimizer is None
        self._keeper.take_in(optimizer)
        self._entered.append(optimizer.channel)
        self.averages(optimizer)
        transport = self._transport
        if isinstance(transport, DriverTransport) and not transport.late:
            begin_alike(transport, optimizer, Stand(initial), transport.deadline_s)
        if isinstance(transport, DriverTransport) and transport.late:
            if first and optimizer.follower is not None:
                optimizer.arrive = partial(self._catch_up, True, NO_STATE)
                return
            round_ = None
            if optimizer.follower is not None:  # its state comes with the first one's, of some rounds ago
                optimizer.follower.arrived(False)
            else:
                round_ = self._fetch(transport.deadline_s)
            transport.take_part(optimizer.channel, -1 if round_ is None or not first else round_)
            self._comes_since_s = time.monotonic() if first else None

    def _catch_up(self, new: bool, state_round: int) -> Outcome | None:
        """Get into step with a crew that averages gradients (see ``training.replay``).

        new: this peer does not take part yet. state_round: the last one after which it was in step. Returns
        the last round that was followed.
        """
        transport, driver, key = self._transport, self._driver, self._place.key
        assert isinstance(transport, DriverTransport) and driver is not None and key is not None
        with self._phases.of("state"):
            came = catch_up(
                self._keeper,
                transport,
                driver.answering,
                key,
                self._write_round,
                new=new,
                state_round=state_round,
            )
        self._comes_since_s = time.monotonic() if new else None
        self.note(Noted("in step" if came.in_step else "not in step", self.rank, str(came)))
        self._last_round = None
        return came.outcome

    def enter(self, channel: int) -> bool:
        """Take part on a channel that is configured; whether the crew has averaged on it before this peer."""
        transport = self._transport
        self._entered.append(channel)
        if not isinstance(transport, DriverTransport) or not transport.late:
            return False
        transport.take_part(channel, -1)
        return True

    def _fetch(self, at_most_s: float) -> int | None:
        """The crew's state; without it, or after ``at_most_s``, a peer goes on with what averages bring."""
        transport, kept = self._transport, self._keeper.optimizer
        if self._driver is None or self._place.key is None or kept is None:
            return None
        assert isinstance(transport, DriverTransport)
        with self._phases.of("state"):
            seats = in_step(self._driver.answering(), transport, kept.channel)
            return self._keeper.fetch(self._place.key, seats, at_most_s)

    def _look_back(self, outcome: Outcome) -> None:
        """After a round: give the state to whom waits for it; take it anew after having been away for long.

        While the state is fetched the crew goes on, so that the next gap is this peer's own doing. That may
        take no longer than it was away. Where gradients are averaged it is fetched in the next average; where
        there is nothing beside averaged models, the average that has just come has brought it.
        """
        now_s = time.monotonic()
        last, self._last_round = self._last_round, outcome.round
        away_s, self._last_s = now_s - self._last_s, now_s
        aside = self._keeper.optimizer is not None and self._keeper.optimizer.stands_aside
        kept = self._keeper.optimizer
        if last is not None and outcome.round - last > 1 + CATCH_UP and not aside:
            assert isinstance(self._transport, DriverTransport)  # rounds of a crew of one are never skipped
            if kept is not None and kept.follower is not None and self._place.key is not None:
                fall_behind(self._keeper, self._transport, outcome.channel, last)
                kept.arrive = partial(self._catch_up, False, last)
                return
            if not self._keeper.only_model:
                fall_behind(self._keeper, self._transport, outcome.channel, last)
                self._fetch(away_s)
                come_abreast(self._keeper, self._transport, outcome.channel)
            self._last_round = None
        self._keeper.offer(outcome.round)

    def keep(self, **objects: Stateful) -> None:
        """More that belongs to the training than model and optimizer: schedulers, a GradScaler, a sampler.

        They go into checkpoints and to peers that come late; a peer that did, or that resumed, loads what was
        found of them here. Each has state_dict and load_state_dict.
        """
        self._keeper.keep(**objects)

    def save(self, folder: str | Path, keep: int = 3) -> Path:
        """Write a checkpoint of this peer: model, optimizer, what was given to ``keep``; returns its path.

        keep: how many of its own stay. It is on the disk, whole, when this returns. Any number of peers may
        save into one folder. Raises OSError where it could not be written; earlier ones are as they were.
        """
        return self._keeper.save(Path(folder), keep)

    def resume(self, folder: str | Path) -> Found | None:
        """Load the newest whole checkpoint of any peer from a folder, to be called before the first step.

        ``None``: there is none, or this peer came late and has the crew's state already, which is newer.
        All peers call it. Where their folders differ those that find less take the state of one that found
        the newest. Damaged checkpoints are named in the log, the trace and the result, and passed over.

        Raises:
            ValueError: it is of another model or optimizer, naming the first difference; nothing has changed.
            ragtag.training.state.checkpoint.NoWholeCheckpoint: all are damaged.
            StateMissing: another peer's checkpoint is newer, and its state did not come.
        """
        transport = self._transport
        if not isinstance(transport, DriverTransport):
            return self._keeper.resume(Path(folder))
        if transport.late:
            return None
        found = self._keeper.resume(Path(folder))
        with self._phases.of("state"):
            found = self._resume_newest(transport, found, str(folder))
        if found is not None:  # of a training that is over nothing may be left to average
            self._announcer.tell(Reached.AVERAGED)
        return found

    def _resume_newest(self, transport: DriverTransport, found: Found | None, folder: str) -> Found | None:
        """Peers whose folders differ go on from the newest checkpoint that one of them has."""
        meeting = f"resume/{self._resumed}"
        self._resumed += 1
        mine = NOTHING if found is None else found.progress
        progress = tell_progress(transport, meeting, mine)
        furthest = max(progress.values())
        if all(each == furthest for each in progress.values()):
            return found
        if mine == furthest:
            transport.meet(f"{meeting}/taken", b"", transport.deadline_s, self._keeper.offer_now)
            return found
        holders = sorted(peer for peer, each in progress.items() if each == furthest)
        _log.warning(
            "this peer's %s; it takes the state that peer %d resumes, of step %d",
            *("folder has no checkpoint" if found is None else f"checkpoint is of step {found.step}",),
            *(holders[0], furthest.step),
        )
        driver, key = self._driver, self._place.key
        seats = {} if driver is None else driver.answering()
        donors = {peer: seats[peer] for peer in holders if peer in seats}
        came = None if key is None else self._keeper.fetch(key, donors, transport.deadline_s)
        transport.meet(f"{meeting}/taken", b"", transport.deadline_s)
        taken = self._keeper.loaded
        if came is None or taken is None:
            raise StateMissing(
                f"peer {holders[0]} resumes step {furthest.step}, newer than what {folder} has here, and "
                "its state did not come: start this peer again, by `ragtag join`, or copy that checkpoint"
            )
        self._keeper.round = -1  # of a run that has made no average yet
        where = Path(folder) / f"peer {holders[0]}"
        return Found(where, holders[0], taken.step, max(0, furthest.rounds), furthest, taken, ())

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs of the crew, 0 to n - 1, until it has done them.

        A peer that comes late begins with the epoch that the crew is in, one that was away goes on with it,
        and a crew that resumes begins with its checkpoint's. It ends for all peers when one has done the last
        epoch. Going through ``crew.split(loader)`` once in each is what an epoch consists of; with no split,
        or with shards, the peer that is ahead counts for all. Make the optimizers before: a newcomer that
        averages gradients gets into step here. In a crew of more than 64, every 64 peers count
        their own. Raises ValueError: n is no number of epochs; HasLeft: this peer has left.
        """
        if self._left:
            raise HasLeft("counting epochs")
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"epochs: {n!r}; give how many the crew does in all, 0 or more")
        late = isinstance(self._transport, DriverTransport) and self._transport.late
        kept = self._keeper.optimizer
        if late and kept is not None and kept.arrive is not None:
            kept.average()  # the others answer a peer that takes part
        return self._epochs.count(n, late)

    @property
    def step(self) -> int:
        """How many averages the crew has made in the whole training; a run that resumes counts on.

        The same on all peers, however many steps each has taken: bring schedulers that step with batches to
        it (``while scheduler.last_epoch < crew.step: scheduler.step()``). The averages are those of the first
        optimizer; with a central state they are this peer's own.
        """
        return self._epochs.step

    def split(
        self,
        loader: DataLoader[Any],
        *,
        shards: Sequence[Sequence[int] | Indices] | None = None,
        seed: int | None = None,
        sizes: BatchSizes | None = None,
    ) -> Split:
        """Batches of a loader, drawn from one pool with the others; survivors use what dead peers do not.

        Peers make their splits in the same order. What an epoch came to is logged and traced. In a crew that
        began with more than 64 peers, every 64 of them have a pool of their own, with their part of the data.
        A crew's lowest peer warns once what the batches come to together (``training.together``).
        sizes: ``ragtag.BatchSizes()``: each peer's batches follow its speed, as its optimizer measures it.
        The same loader gives the same split again, so that ``for batch in crew.split(loader)`` inside a loop
        over epochs goes through a new epoch each time. ValueError: it is then given other options.
        """
        self._require_in("crew.split(...)")
        require_loader(loader)
        split = self._splits.get(loader)
        if split is None:
            self._split_by[loader] = shards, seed, sizes
            seed = self.seed if seed is None else seed
            ordinal, self._splits_made = self._splits_made, self._splits_made + 1
            split = Split(
                loader,
                self.rank,
                self._transport,
                seed=seed,
                shards=shards,
                ordinal=ordinal,
                on_epoch=self._record_epoch,
                sizes=sizes,
                founded=self.size,
                epochs=self._epochs,
                busy_s=lambda: sum(conduct.busy_s for conduct in self._conducts),
            )
            self._splits[loader] = split
            self._epochs.restore(ordinal, split)
            late = isinstance(self._transport, DriverTransport) and self._transport.late
            if ordinal == 0 and len(self.live) > 1 and self.rank == min(self.live) and not late:
                _log.warning("%s", together(split, len(self.live)))  # by one peer, and where it is seen
            return split
        first = self._split_by[loader]
        for name, now, before in zip(("shards", "seed", "sizes"), (shards, seed, sizes), first, strict=True):
            if now is not None and now is not before and (name == "shards" or now != before):
                raise ValueError(
                    f"this loader is split already, by other {name}; give them once, or the same"
                )
        return split

    # -- Rounds

    def record_round(self, outcome: Outcome) -> None:
        """Write a round to the trace. A peer whose place was given away meanwhile joins anew."""
        self._write_round(outcome)
        if not self._has_averaged:
            self._has_averaged = True
            self._announcer.tell(Reached.AVERAGED)
        self._keep_invitation()
        if self._driver is not None and self._driver.lost_seat:
            self._join_anew(self._driver, self._driver.lost_seat)

    def _join_anew(self, old: Driver, why: str) -> None:
        """Take another place, with the crew's state as any newcomer."""
        transport = self._transport
        if self._again is None or not isinstance(transport, DriverTransport):
            raise SeatLost(f"this peer averages no more: {why}; start it again")
        self.note(Noted("joins anew", self.rank, why))
        if self._donor is not None:
            self._donor.close()
        entered = self._again(old)
        old.close(0.0)
        if self._writer is not None and self._writer is not entered.writer:
            self._writer.close()
        self._place, self._driver, self._donor = entered.place, entered.driver, entered.donor
        self._writer = entered.writer
        self._keeper.moved(entered.place.rank, entered.shelf)
        self.record_join(entered.met)
        self._announcer.tell(Reached.JOINED, entered.place.rank)
        transport.moved(entered.driver, entered.entrance)
        for split in self._splits.values():
            split.moved(entered.place.rank)
        self._epochs.moved()
        last, self._last_round = self._last_round, None
        if transport.late:
            self._take_part_anew(transport, NO_STATE if last is None else last)

    def _take_part_anew(self, transport: DriverTransport, last: int) -> None:
        kept = self._keeper.optimizer
        follows = kept is not None and kept.follower is not None
        round_ = None if follows else self._fetch(transport.deadline_s)
        for channel in self._entered:
            known = kept is not None and channel == kept.channel
            if known and follows:
                continue
            transport.take_part(channel, -1 if round_ is None or not known else round_)
        if kept is not None and follows:
            kept.arrive = partial(self._catch_up, True, last)

    # -- The end

    def finish(self, deadline_s: float | None = None) -> Finished:
        """The training is over: one last agreed average, and the same model on all peers, bit for bit.

        Call it before the model is saved or judged; ``leave`` does it where the script has not. Peers that
        pause are waited for, for ``deadline_s`` at most (by default as long as ``join`` waits); one that
        still trains, for a tenth of the time that was trained. Take no step afterwards.

        Raises ragtag.NotFinite where a value to be averaged is none.
        """
        if self._finished is None:
            transport = self._transport
            if deadline_s is None:
                deadline_s = transport.deadline_s if isinstance(transport, DriverTransport) else 0.0
            trained_s = time.monotonic() - self._began_s
            found = self._finished = finish(transport, self._averaged, deadline_s, trained_s)
            self._tell_finished(found)
        return self._finished

    def _tell_finished(self, found: Finished) -> None:
        self.note(Noted("finished", self.rank, str(found)))
        if not found.alike:
            _log.warning("%s: chunks were lost each time; see the trace", found)
        elif self.rank in found.behind and found.moved:
            _log.warning(
                "this peer's model was %s behind; it is the others' now (changed by %.2g of its norm)",
                *(rounds_of(found.behind[self.rank]), found.moved),
            )
        else:
            _log.info("%s", found)

    def leave(self, deadline_s: float = LEAVE_S, *, finish: bool = True) -> None:
        """Finish (see ``finish``), send what is still queued, tell the others, and end.

        deadline_s: for what is queued. finish: False: end with the model as it is, and wait for nobody.
        Calling it twice does no harm.

        From then on this crew's optimizers and splits raise ``ragtag.HasLeft``; models, ``optimizer.inner``
        and ``save`` work as before.
        """
        try:
            if finish and not self._left:
                self.finish()
        finally:
            self._leave(deadline_s, failed=False)

    def _require_in(self, asked: str) -> None:
        if self._left:
            raise HasLeft(asked)

    def _leave(self, deadline_s: float, failed: bool) -> None:
        if self._left:
            return
        self._left = True
        stands = [] if failed else [what.stand() for what in self._averaged if what.whole is not None]
        lost = sent = received = 0
        if not failed:
            for split in self._splits.values():
                split.close()
        for conduct in self._conducts:
            conduct.left = True
        if self._donor is not None:
            self._donor.close(deadline_s)
        if self._driver is not None:
            self._driver.close(deadline_s)
            traffic = self._driver.traffic()
            lost, sent, received = traffic.datagrams_lost, traffic.bytes_sent, traffic.bytes_received
        self._write_leave(lost, sent, received, failed, stands)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        failed = _is_failure(error)
        if failed and self._place.ready_fd is None:  # else the launcher records it, with its traceback
            self.record(trace.Error(t=self.now_s(), peer=self.rank, what=f"{type(error).__name__}: {error}"))
        if error is None:
            self.leave()
        else:
            self._leave(LEAVE_S, failed)


def _is_failure(error: BaseException | None) -> bool:
    """Whether it ends a peer badly: being asked to stop does not, and no more does ``sys.exit(0)``."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, KeyboardInterrupt)
