"""One peer of a crew, behind what its script sees of it: its seat, its state, what it averages, its log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ragtag.app.crew.data import Data
from ragtag.app.crew.donors import LiveDonors
from ragtag.app.crew.finish import NOTHING, Averaged, begin_alike, finish, tell_progress
from ragtag.app.crew.logbook import Logbook
from ragtag.app.crew.membership import Entrance
from ragtag.app.crew.phases import Phases
from ragtag.app.crew.transport import DriverTransport, SeatLost, SoloTransport
from ragtag.app.disk import Spare
from ragtag.app.environment import Announcer, Place, Reached
from ragtag.app.invitation.token import (
    ADDRESSES_MAX,
    TOKEN_FILE,
    Token,
    TokenError,
    decode,
    encode,
    keep_token,
    kept_token,
)
from ragtag.app.tracefile import TraceWriter
from ragtag.app.words import counted
from ragtag.core.channels import channel_of, require_name
from ragtag.core.errors import Error, HasLeft
from ragtag.core.types import Noted, Outcome, PeerId
from ragtag.network.driver.driver import Driver, DriverFailed
from ragtag.network.transfer.donor import DonorServer
from ragtag.protocols.transfer.snapshots import Shelf
from ragtag.training.optimizer.averaged import AveragedModel
from ragtag.training.optimizer.siblings import Siblings
from ragtag.training.state.abreast import Abreast
from ragtag.training.state.checkpoint import Found
from ragtag.training.state.keeper import StateKeeper
from ragtag.training.state.whole import Finished, Stand, rounds_of
from ragtag.training.tensors.modules import parameters_beside

NAMES_MAX = 4
"""Of more parameters that no optimizer has, a warning names so many."""
_PASSES = 2
"""After so many steps of an optimizer its script has made all of them."""
_log = logging.getLogger("ragtag")


class Expelled(Error, RuntimeError):
    """The crew lets this peer's person in no more: its token has ended, or was revoked."""


class StateMissing(Error, RuntimeError):
    """This peer has an older state than its crew, whose state did not come; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Rejoined:
    """What a peer that joins anew has in place of what it had."""

    place: Place
    driver: Driver
    entrance: Entrance
    donor: DonorServer | None
    shelf: Shelf | None
    writer: TraceWriter | None
    met: int


Again = Callable[[Driver], Rejoined]
"""Joins anew, where the members that a driver knows are. Raises JoinError."""


class Peer:
    """What the crew's optimizers, hooks and splits, the way in and the way out have of one peer.

    transport: how the others are reached.
    log: this peer's records.
    keeper: its training state, kept, given and taken.
    data: its splits and epochs.
    names: of what is averaged, by channel.
    models: what its optimizers average, in the order in which they were made.
    siblings: what these have in common.
    left: whether it has left.
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
        self.place, self.transport, self.driver = place, transport, driver
        self._donor, self._again = donor, again
        self._announcer = announcer or Announcer(place.rank, None)
        self.names: dict[int, str] = {}
        self.models: list[AveragedModel] = []
        self.siblings = Siblings()
        self.data = Data(
            transport,
            place.seed,
            place.size,
            round=self._round,
            busy_s=lambda: sum(model.scheduling.busy_s for model in self.models),
            report=lambda report: self.log.record_epoch(report),
            target=lambda: self.siblings.target,
        )
        self.log = Logbook(place, driver, writer, origin_s, self.names, lambda: self.data.samples)
        self._phases = phases or Phases()
        self._phases.to(self.log.record_phase)
        self.keeper = StateKeeper(place.rank, place.seed, self.log.note)
        self.keeper.data = self.data.epochs
        self.donors = (
            None
            if driver is None or place.key is None
            else LiveDonors(place.key, lambda: {} if self.driver is None else self.driver.answering())
        )
        """Who gives this peer the crew's state, and by what it shows whose process it is."""
        self.abreast = (
            Abreast(
                self.keeper,
                transport,
                self.donors,
                record=self.log.record_round,
                phase=partial(self._phases.of, "state"),
            )
            if isinstance(transport, DriverTransport)
            else None
        )
        """Keeps it in step (``None``: it is alone)."""
        if shelf is not None:
            self.keeper.serve(shelf)
        self.left = False
        self._has_averaged = False
        self._entered: list[int] = []  # channels that this peer takes part on
        self._averaged: list[Averaged] = []
        self._began_s = time.monotonic()
        self._invited_by: frozenset[PeerId] = frozenset()
        self._spare = Spare("the invitation to this crew in the run's folder", _log.warning)
        self._resumed = 0
        self._finished: Finished | None = None
        self._stepped: Counter[int] = Counter()  # steps of each optimizer, by its number, up to _PASSES
        self._told_beside: list[torch.Tensor] = []

    @property
    def rank(self) -> PeerId:
        """This peer's number now."""
        return self.place.rank

    def _round(self) -> int:
        kept = self.keeper.first
        if kept is None:
            return self.keeper.round
        last = self.keeper.round if kept.outcome is None else kept.outcome.round
        return last if self._finished is None else max(last, self._finished.rounds.get(kept.name, -1))

    def require_in(self, asked: str) -> None:
        """Raise HasLeft where this peer has left. asked: what was asked for then."""
        if self.left:
            raise HasLeft(asked)

    # -- The invitation

    def token(self) -> Token:
        """An invitation through this peer, and others that live. Raises RuntimeError: nobody can join it."""
        driver, place = self.driver, self.place
        own = driver.own_member_address if driver is not None else None
        if driver is None or own is None or place.key is None:
            raise RuntimeError(
                "nobody can join this peer: start it by `ragtag run`, `ragtag join` or torchrun"
            )
        if isinstance(self.transport, DriverTransport) and self.transport.person:
            raise RuntimeError(
                f"crew {place.crew!r} takes persons only: whoever has its holder's token, of `ragtag invite "
                "--persons`, makes one for each by `ragtag invite --for NAME HOLDER`"
            )
        addresses = (own, *driver.members())[:ADDRESSES_MAX]
        return Token(addresses, place.crew, place.key)

    def _keep_invitation(self) -> None:
        """As members come and go, keep the token in the run's folder one that lets newcomers in."""
        live, place, driver = self.transport.live, self.place, self.driver
        if live == self._invited_by or place.run_folder is None or driver is None:
            return
        if driver.own_member_address is None or self._spare.write(
            partial(self._write_invitation, place.run_folder)
        ):
            self._invited_by = live

    def _write_invitation(self, folder: Path) -> None:
        """Raises OSError."""
        if not (folder / TOKEN_FILE).exists():
            return
        if isinstance(self.transport, DriverTransport) and self.transport.person:
            driver = self.driver
            assert driver is not None and driver.own_member_address is not None
            addresses = (driver.own_member_address, *driver.members())[:ADDRESSES_MAX]
            try:  # the person's own token, or the holder's
                token = replace(decode(kept_token(folder)), addresses=addresses, begins=False)
            except TokenError as error:
                _log.warning("the token in %s stays as it is: %s", folder, error)
                return
        else:
            token = self.token()
        keep_token(folder, encode(token))

    # -- What is averaged

    def take_name(self, name: str | None, kind: str) -> str:
        """A name for what is averaged: the one given, or the next free one of its kind.

        Raises ValueError: it is no name, or is taken.
        """
        if name is None:
            numbered = (kind if number == 1 else f"{kind} {number}" for number in count(1))
            name = next(free for free in numbered if channel_of(free) not in self.names)
        elif channel_of(require_name(name)) in self.names:
            raise ValueError(f"{name!r} is averaged already: give each optimizer a name of its own")
        self.names[channel_of(name)] = name
        return name

    @contextmanager
    def naming(self, name: str | None, kind: str = "model") -> Iterator[str]:
        """The same for what is made now; where that fails, the name is free for one with other options."""
        taken = self.take_name(name, kind)
        try:
            yield taken
        except BaseException:
            del self.names[channel_of(taken)]
            raise

    def averages(self, what: Averaged) -> None:
        """Something is averaged, which ``finish`` is to end alike on all peers."""
        self._averaged.append(what)

    def begin(self, averaged: AveragedModel, initial: str | None) -> None:
        """What is averaged is agreed on. A peer that comes late takes the crew's state over (``Abreast``).

        initial: the digest of the weights that it was made with (``None``: those it has now). Where peers
        began with different ones all take the lowest peer's, as DistributedDataParallel does.
        """
        if self.abreast is None:
            self.keeper.take_in(averaged)
        else:
            self.abreast.begin(averaged)
        self._entered.append(averaged.channel)
        self.averages(averaged)
        if isinstance(self.transport, DriverTransport) and not self.transport.late:
            mine = averaged.stand() if initial is None else Stand(initial)
            elsewhere = [p for other in self.models if other is not averaged for p in other.parameters]
            begin_alike(self.transport, averaged, mine, self.transport.deadline_s, elsewhere)

    def stepped(self, number: int, loss: Any) -> None:
        """One of the crew's optimizers has taken a local step; its closure returned ``loss``.

        Which parameters are in none is told at its second step: a script that makes each optimizer where it
        first needs it has been through its loop once by then.
        """
        if self._stepped[number] < _PASSES and len(self.transport.live) > 1:
            self._stepped[number] += 1
            if self._stepped[number] == _PASSES:
                self._tell_beside(self.models[number])
        self.log.stepped(number, loss)

    def stepped_by_hook(self, channel: int) -> None:
        """A hook has averaged the gradients of a backward pass on this channel: a step is next."""
        self.log.stepped(channel)

    def _tell_beside(self, averaged: AveragedModel) -> None:
        """The lowest peer warns of parameters that need a gradient and are in no optimizer, once of each."""
        if self.rank != min(self.transport.live):
            return
        averages = [parameter for other in self.models for parameter in other.parameters]
        beside = parameters_beside([*averages, *self._told_beside], averaged.modules)
        found = {name: parameter for name, parameter in beside if parameter.requires_grad}
        if found:
            self._told_beside += found.values()
            several = len(found) > 1
            _log.warning(
                "%s of the model %s a gradient and %s in no optimizer of the crew (%s): what trains %s is "
                "not averaged, and peers grow apart. Give %s to crew.optimizer, or freeze %s by "
                "requires_grad_(False)",
                counted(len(found), "parameter"),
                *(("need", "are") if several else ("needs", "is")),
                _some(found),
                *(("them",) * 3 if several else ("it",) * 3),
            )

    def enter(self, channel: int) -> bool:
        """Take part on a configured channel; whether the crew averaged on it before this peer came."""
        transport = self.transport
        self._entered.append(channel)
        if not isinstance(transport, DriverTransport) or not transport.late:
            return False
        transport.take_part(channel, -1)
        return True

    def averaged(self, averaged: AveragedModel, outcome: Outcome) -> None:
        """A round of an optimizer is over."""
        self.record_round(outcome)
        if self.abreast is not None:
            if self.abreast.came_s is not None and outcome.averaged.any():
                self._phases.over("average", time.monotonic() - self.abreast.came_s)
                self.abreast.came_s = None
            self.abreast.averaged(outcome)
        self.log.record_pace(averaged)
        self.log.record_sparse(averaged, outcome)
        self.log.record_align(averaged)
        self.log.record_target(averaged)
        self.log.record_guard(outcome)
        if averaged.asked.guard is not None:
            self.log.record_guarded(averaged.asked.guard, outcome)

    def record_round(self, outcome: Outcome) -> None:
        """Write a round to the trace. A peer whose place was given away meanwhile joins anew."""
        self.log.record_round(outcome)
        self.log.record_persons()
        self.took_part()
        self._keep_invitation()
        if self.driver is not None and self.driver.lost_seat:
            self._join_anew(self.driver, self.driver.lost_seat)

    def took_part(self) -> None:
        """This peer has averaged or published something: its launcher is told, once."""
        if not self._has_averaged:
            self._has_averaged = True
            self._announcer.tell(Reached.AVERAGED)

    def on_its_way(self, channel: int) -> bool:
        """Whether this peer has still to get into step with its crew before its named tensors count.

        Its optimizers and hooks bring it into step; from then on, or where it has none, it takes part on
        this channel, too.
        """
        transport = self.transport
        if not isinstance(transport, DriverTransport) or not transport.late or channel in self._entered:
            return False
        if (self.models or self._averaged) and not transport.takes_part:
            return True
        self.enter(channel)
        return False

    # -- The crew's state

    def resume(self, folder: Path) -> Found | None:
        """See ``Crew.resume``."""
        if not isinstance(self.transport, DriverTransport):
            return self.keeper.resume(folder)
        if self.transport.late:
            self.keeper.look_back(folder)
            return None
        found = self.keeper.resume(folder)
        with self._phases.of("state"):
            found = self._resume_newest(self.transport, found, folder)
        if found is not None:  # of a training that is over nothing may be left to average
            self._announcer.tell(Reached.AVERAGED)
        return found

    def _resume_newest(self, transport: DriverTransport, found: Found | None, folder: Path) -> Found | None:
        """Peers whose folders differ go on from the newest checkpoint that one of them has."""
        meeting = f"resume/{self._resumed}"
        self._resumed += 1
        mine = NOTHING if found is None else found.progress
        progress = tell_progress(transport, meeting, mine)
        furthest = max(progress.values())
        if all(each == furthest for each in progress.values()):
            return found
        if mine == furthest:
            transport.meet(f"{meeting}/taken", b"", transport.deadline_s, self.keeper.offer_now)
            self.keeper.offered()
            return found
        holders = sorted(peer for peer, each in progress.items() if each == furthest)
        _log.warning(
            "this peer's %s; it takes the state that peer %d resumes, of step %d",
            *("folder has no checkpoint" if found is None else f"checkpoint is of step {found.step}",),
            *(holders[0], furthest.step),
        )
        came = None
        if self.donors is not None:
            seats = self.donors.seats()
            holding = replace(self.donors, seats=lambda: {p: seats[p] for p in holders if p in seats})
            came = self.keeper.asking(holding, tuple)(transport.deadline_s).result()
        came = came if came is not None and self.keeper.put(came) else None
        transport.meet(f"{meeting}/taken", b"", transport.deadline_s)
        taken = self.keeper.loaded
        if came is None or taken is None:
            raise StateMissing(
                f"peer {holders[0]} resumes step {furthest.step}, newer than what {folder} has here, and "
                "its state did not come: start this peer again, by `ragtag join`, or copy that checkpoint"
            )
        self.keeper.round = -1  # of a run that has made no average yet
        return Found(None, holders[0], taken.step, max(0, furthest.rounds), furthest, taken, ())

    # -- Another place

    def _join_anew(self, old: Driver, why: str) -> None:
        """Take another place, with the crew's state as any newcomer."""
        transport = self.transport
        if old.barred:
            raise Expelled(f"this peer averages no more: {why}")
        if self._again is None or not isinstance(transport, DriverTransport):
            raise SeatLost(f"this peer averages no more: {why}; start it again")
        self.log.note(Noted("joins anew", self.rank, why))
        if self._donor is not None:
            self._donor.close()
        entered = self._again(old)
        old.close(0.0)
        self.place, self.driver, self._donor = entered.place, entered.driver, entered.donor
        self.log.moved(entered.place, entered.driver, entered.writer)
        self.keeper.moved(entered.place.rank, entered.shelf)
        self.log.record_join(entered.met)
        self._announcer.tell(Reached.JOINED, entered.place.rank)
        transport.moved(entered.driver, entered.entrance)
        self.data.moved()
        if self.abreast is not None:
            self._take_part_anew(transport, self.abreast)

    def _take_part_anew(self, transport: DriverTransport, abreast: Abreast) -> None:
        arrives, kept = abreast.arrives_anew(), self.keeper.first
        if not transport.late:
            return
        follows = kept is not None and kept.follower is not None
        round_ = None if follows else abreast.fetch(transport.deadline_s)
        for channel in self._entered:
            known = kept is not None and channel == kept.channel
            if known and follows:
                continue
            transport.take_part(channel, -1 if round_ is None or not known else round_)
        if kept is not None and follows:
            arrives(kept)

    # -- The end

    def finish(self, deadline_s: float | None) -> Finished:
        """See ``Crew.finish``."""
        if self._finished is None:
            if deadline_s is None:
                deadline_s = self.transport.deadline_s
            trained_s = time.monotonic() - self._began_s
            self.data.give_back()  # others that still train would come to their epoch's end without it
            # one that comes now would else have no state: none is left after a round any more
            found = self._finished = finish(
                self.transport, self._averaged, deadline_s, trained_s, self.keeper.offer_last
            )
            if len(found.peers) > 1 and (found.trained or self.transport.late):
                self.took_part()  # if it had no round before: too few steps, no samples, or it came last
            self._tell_finished(found)
        return self._finished

    def _tell_finished(self, found: Finished) -> None:
        self.log.record_finished(found)
        if not found.alike:
            _log.warning("%s: chunks were lost each time; see the trace", found)
        elif self.rank in found.behind and found.moved:
            _log.warning(
                "this peer's model was %s behind; it is the others' now (changed by %.2g of its norm)",
                *(rounds_of(found.behind[self.rank]), found.moved),
            )
        elif self.transport.n > 1 and not self.transport.late and found.took_nothing:
            _log.warning(
                "this peer ends alone, with the model that it began with: it has taken no step, and the "
                "others had ended before it had theirs. Take a model that they saved"
            )
        else:
            _log.info("%s", found)

    def leave(self, deadline_s: float, failed: bool, over: bool) -> None:
        """Send what is still queued, tell the others, and end, once.

        failed: an error ends this peer.
        over: its training has come to its end: else (an error, Ctrl-C) it has no final model to tell of.

        Where a part of this fails, as without a driver, the rest is done before the error is raised.
        """
        if self.left:
            return
        self.left = True
        stands: list[Stand] = []
        for model in self.models:
            model.left = True
        with ExitStack() as rest:  # the last one first
            rest.push(lambda kind, error, where: self._record_leave(failed or kind is not None, stands))
            if self.driver is not None:
                rest.callback(self.driver.close, deadline_s)
                if not failed:
                    rest.callback(self._tell_persons)
            if self._donor is not None:
                rest.callback(self._donor.close, deadline_s)
            if over:
                stands += [what.stand() for what in self._averaged if what.whole is not None]
            with suppress(DriverFailed) if failed else nullcontext():  # that has been said
                self.data.close()

    def _tell_persons(self) -> None:
        with suppress(DriverFailed):  # that has been said
            self.log.record_persons(0.0)

    def _record_leave(self, failed: bool, stands: Sequence[Stand]) -> None:
        for model in self.models:
            self.log.record_align(model)  # the last one ends with the training
            self.log.record_target(model, 0.0)
        self.log.record_leave(failed, stands)


def _some(names: Iterable[str]) -> str:
    """Names, or the first of them and how many more there are."""
    shown = [repr(name) for name in names]
    if len(shown) > NAMES_MAX:
        shown[NAMES_MAX:] = [f"{len(shown) - NAMES_MAX:,} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
