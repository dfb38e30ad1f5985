"""A peer that comes late to a crew that averages gradients ends with the members' model, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ragtag.core.types import Outcome
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.groups.channel import Moshpit
from ragtag.protocols.rounds.allreduce import AllReduce
from ragtag.protocols.rounds.rps import RPS
from ragtag.training.align.aligner import Aligner
from ragtag.training.align.plan import Align
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.capture import Snapshot, capture, restore
from ragtag.training.state.follower import (
    KEPT_BYTES,
    ROUNDS_MAX,
    ROUNDS_MIN,
    Follower,
    Mean,
    Means,
    rounds_max,
)
from ragtag.training.state.replay import TRIES, CatchUp, Result, Ways
from tests.training.fake_transport import FakeCrew, FakeTransport, run_peers

N, LATE = 3, 2
"""Peers; the one that comes late."""
PATIENCE_S = 30.0
ROUNDS_AFTER = 4
"""In which the late one gives, too."""

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


class Partial(nn.Module):
    """A model with a parameter that never has a gradient, and one that has one on some peers only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
            self.unused, self.rare = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))

    def forward(self, inputs: torch.Tensor, rare: bool = False) -> torch.Tensor:
        found: torch.Tensor = self.body(inputs)
        return found + self.rare if rare else found


class Wide(nn.Sequential):
    """A model of some chunks, so that some may be lost."""

    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            super().__init__(nn.Linear(5, 400), nn.ReLU(), nn.Linear(400, 40), nn.Tanh(), nn.Linear(40, 3))

    def forward(self, inputs: torch.Tensor, rare: bool = False) -> torch.Tensor:
        found: torch.Tensor = super().forward(inputs)
        return found


def backward(model: nn.Module, peer: int, step: int) -> None:
    draw = torch.Generator().manual_seed(1000 * peer + step)
    inputs, targets = torch.randn(6, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)
    F.cross_entropy(model(inputs, rare=peer == 0 and step % 3 == 0), targets).backward()


def learned(model: nn.Module, optimizer: CrewOptimizer) -> torch.Tensor:
    """All that is averaged or stepped, as one vector: the model, and its optimizer's state."""
    tensors = [t.detach() for t in model.state_dict().values() if t.is_floating_point()]
    for parameter in model.parameters():
        slots = optimizer.state.get(parameter, {})
        tensors += [torch.as_tensor(slots[name]) for name in sorted(slots) if slots[name] is not None]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).clone()


@dataclass
class Given:
    """A state as it comes."""

    snapshot: Snapshot
    mixed: bool = False

    @property
    def round(self) -> int:
        return self.snapshot.round


@dataclass
class Training:
    """Two members and one that comes late; what each model was after each round.

    lag: by how many rounds a state is older than the newest when it comes.
    """

    make: Callable[[nn.Module], torch.optim.Optimizer]
    options: dict[str, Any]
    lag: int = 3
    crew: FakeCrew = field(default_factory=lambda: FakeCrew(N))
    model: Callable[[int], nn.Module] = Partial
    nets: list[nn.Module] = field(default_factory=list)
    models: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    optimizers: dict[int, CrewOptimizer] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    came: Result | None = None
    over: threading.Event = field(default_factory=threading.Event)
    asked: tuple[int, Future[Given | None]] | None = None
    _round: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        # made here: torch's random numbers are all threads'
        self.nets = [self.model(7 if peer == LATE else 0) for peer in range(N)]
        run_peers(self.crew, self.peer)

    def peer(self, transport: FakeTransport) -> None:
        me = transport.me
        model = self.nets[me]
        optimizer = CrewOptimizer(
            self.make(model), transport, average="gradients", model=model, **self.options
        )
        self.optimizers[me] = optimizer
        if me == LATE:
            optimizer._averaged.arrive = lambda: self.arrive(optimizer)
        own = 0
        for step in range(100_000):
            backward(model, me, step)
            optimizer.step()
            optimizer.zero_grad()
            if optimizer._averaged.progress[1]:
                continue
            assert optimizer.outcome is not None
            round_ = optimizer.outcome.round
            with self._round:
                self.models[me, round_] = learned(model, optimizer)
                if me == 0:
                    self.snapshots[round_] = capture(optimizer._averaged)
                    self.give()
            own += 1
            if own > ROUNDS_AFTER and me == LATE:
                self.over.set()
            if self.over.is_set():
                return

    def arrive(self, optimizer: CrewOptimizer) -> Outcome | None:
        follower = optimizer._averaged.follower
        assert follower is not None
        _, since = optimizer._averaged.progress
        ways = Ways(
            newer=lambda at_most_s: self.crew.await_newer(LATE, optimizer._averaged.channel),
            ask=self.ask,
            put=lambda state: self.put(state, optimizer),
            follow=follower.follow,
            redo=follower.redo,
        )
        self.came = CatchUp(ways, rounds_max(follower.n_bytes), PATIENCE_S).run()
        optimizer._averaged.resume_at(optimizer._averaged.progress[0] + since * self.came.redone, 0)
        return self.came.outcome

    def ask(self, deadline_s: float) -> Future[Given | None]:
        """A member's state of the next round, once ``lag`` more are over: what was copied crosses a wire."""
        with self._round:
            self.asked = max(self.snapshots, default=-1) + 1, Future()
            return self.asked[1]

    def give(self) -> None:
        """A round of a member is over (with the lock held)."""
        since = [] if self.asked is None else [one for one in self.snapshots if one >= self.asked[0]]
        if self.asked is not None and since and max(since) >= min(since) + self.lag:  # members may skip one
            (_, future), self.asked, round_ = self.asked, None, min(since)
            future.set_result(Given(Snapshot.from_bytes(self.snapshots[round_].to_bytes())))

    def put(self, state: Given, optimizer: CrewOptimizer) -> bool:
        restore(state.snapshot, optimizer._averaged)
        return True


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("method", [RPS(), AllReduce(), AllReduce(ring=True)], ids=lambda m: str(m.name))
def test_its_model_is_the_members_to_the_bit(
    make: Callable[[nn.Module], torch.optim.Optimizer], method: Averager
) -> None:
    training = Training(make, {"method": method})
    training.run()
    came = training.came
    assert came is not None and came.in_step and came.outcome is not None
    assert (came.missing, came.incomplete, came.tries) == (0, 0, 1)
    assert came.redone >= training.lag, "the state was some rounds old"
    last = max(round_ for peer, round_ in training.models if peer == LATE)
    for round_ in range(came.outcome.round, last + 1):
        late, member = training.models[LATE, round_], training.models[0, round_]
        assert torch.equal(late, member), f"round {round_}"
    steps = {peer: optimizer._averaged.progress[0] for peer, optimizer in training.optimizers.items()}
    assert training.optimizers[LATE].outcome is not None
    assert steps[LATE] == training.optimizers[LATE].outcome.round + 1


OPTIONS: dict[str, dict[str, Any]] = {
    "local steps": {"every": 3},
    "bf16": {"codec": "bf16"},
    "sparse": {"compress": TopK(ratio=0.3)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_also_with_local_steps_shorter_values_and_sparse_rows(options: dict[str, Any]) -> None:
    training = Training(OPTIMIZERS["momentum"], options)
    training.run()
    came = training.came
    assert came is not None and came.in_step and came.outcome is not None
    late, member = (training.models[peer, came.outcome.round] for peer in (LATE, 0))
    if "compress" in options:  # then buffers stay each peer's own
        at = list(Partial(0).state_dict())
        first = sum(Partial(0).state_dict()[name].numel() for name in at[: at.index("body.1.running_mean")])
        late, member = (torch.cat([v[:first], v[first + 16 :]]) for v in (late, member))
    assert torch.equal(late, member)


def test_where_chunks_are_lost_it_is_as_far_from_the_mean_as_a_member() -> None:
    """On average: without the steps after the state it would be several times as far."""
    far = dict.fromkeys(range(N), 0.0)
    for seed in range(4):
        training = Training(
            OPTIMIZERS["momentum"],
            {"method": RPS()},
            lag=8,
            crew=FakeCrew(N, loss=0.1, seed=seed),
            model=Wide,
        )
        training.run()
        came = training.came
        assert came is not None and came.in_step and came.outcome is not None
        assert came.incomplete > 0 and f"{came.incomplete} of them without what was lost" in str(came)
        models = [training.models[peer, came.outcome.round] for peer in range(N)]
        for peer, model in enumerate(models):
            far[peer] += float((model - torch.stack(models).mean(0)).norm())
    assert far[LATE] <= 1.3 * (far[0] + far[1]) / 2, far


def test_nothing_of_ones_own_was_given_while_following() -> None:
    """Members' first steps are those that two of them take alone."""
    training = Training(OPTIMIZERS["momentum"], {"method": AllReduce()})
    alone: dict[int, torch.Tensor] = {}
    nets = [Partial(0), Partial(0)]

    def member(transport: FakeTransport) -> None:
        model = nets[transport.me]
        inner = OPTIMIZERS["momentum"](model)
        optimizer = CrewOptimizer(inner, transport, average="gradients", model=model, method=AllReduce())
        for step in range(3):
            backward(model, transport.me, step)
            optimizer.step()
            optimizer.zero_grad()
            if transport.me == 0:
                alone[step] = learned(model, optimizer)

    training.run()
    run_peers(FakeCrew(2), member)
    torch.testing.assert_close(training.models[0, 2], alone[2], atol=1e-6, rtol=1e-5)


def test_a_mean_before_whose_step_members_compared_without_this_peer_is_missed() -> None:
    """They may have taken something from each other that is in no state of the round before."""

    def train(transport: FakeTransport) -> list[bool]:
        model = Partial(0)
        inner = OPTIMIZERS["sgd"](model)
        optimizer = CrewOptimizer(
            inner, transport, average="gradients", model=model, method=AllReduce(), align=Align(2)
        )
        follower = optimizer._averaged.follower
        assert follower is not None
        known = []
        for at in range(5):
            if transport.me == 0:
                backward(model, 0, at)
                optimizer.step()
                continue
            absent = patch.object(Aligner, "follow") if at == 1 else nullcontext()
            with absent:
                _, mean = follower.follow(False)
            known.append(mean is not None)
        return known

    assert run_peers(FakeCrew(2), train)[1] == [True, True, False, True, True]


# -- The loop alone


class Script:
    """Rounds, states and time of a script: the model is the list of the rounds whose steps it has taken.

    skips: rounds that pass without this peer. lost: rounds whose means do not come. ages: how many rounds old
    each state is when it comes (``None``: nobody gives one). takes: rounds until it comes. die: those that
    are ahead are gone after the last round.
    """

    def __init__(
        self,
        ages: list[int | None],
        *,
        takes: int = 3,
        skips: frozenset[int] = frozenset(),
        lost: frozenset[int] = frozenset(),
        last: int = 10_000,
        fits: bool = True,
        round_s: float = 1.0,
        redo_s: float = 0.0,
        die: bool = False,
    ) -> None:
        self.die = die
        self.ages, self.takes, self.skips, self.lost = list(ages), takes, skips, lost
        self.last, self.fits, self.round_s, self.redo_s = last, fits, round_s, redo_s
        self.round, self.time_s = 99, 0.0
        self.model: list[int] = []
        self.followed: list[int] = []
        self.passed: list[int] = []
        self.kept_max = 0
        self.busy_s: list[float] = [0.0]
        self._due: list[tuple[int, Future[Given | None]]] = []

    def ways(self) -> Ways[Given]:
        return Ways(
            newer=self.newer,
            ask=lambda deadline_s: self.ask(),
            put=self.put,
            follow=self.follow,
            redo=self.redo,
            ahead=lambda: not self.die or self.round < self.last,
            passed=lambda outcome: self.passed.append(outcome.round),
            now_s=lambda: self.time_s,
        )

    def newer(self, at_most_s: float) -> bool:
        if self.round >= self.last:
            self.time_s += 0.0 if self.die else at_most_s
            return False
        self.time_s += self.round_s
        self.busy_s.append(0.0)
        return True

    def follow(self, apply: bool) -> tuple[Outcome, Mean | None]:
        self.round += 1
        while self.round in self.skips:
            self.round += 1
        self.followed.append(self.round)
        if apply:
            self.model.append(self.round)
        for at, future in [entry for entry in self._due if entry[0] <= self.round]:
            age = self.ages.pop(0)
            future.set_result(None if age is None else Given(snapshot_of(self.round - age)))
            self._due.remove((at, future))
        mean = Mean(self.round, np.zeros((1, 1), np.float32), np.ones(1, np.bool_))
        return outcome_of(self.round), None if self.round in self.lost else mean

    def redo(self, mean: Mean) -> None:
        self.model.append(mean.round)
        self.time_s += self.redo_s
        self.busy_s[-1] += self.redo_s

    def put(self, state: Given) -> bool:
        if self.fits:
            self.model = list(range(state.round + 1))
        return self.fits

    def ask(self) -> Future[Given | None]:
        future: Future[Given | None] = Future()
        self._due.append((self.round + self.takes, future))
        return future

    def run(self, rounds: int = 50, deadline_s: float = 1000.0) -> Result:
        return CatchUp(self.ways(), rounds, deadline_s).run()


def snapshot_of(round_: int) -> Snapshot:
    return Snapshot(step=round_, round=round_, since=0, model={}, optimizer={})


def outcome_of(round_: int) -> Outcome:
    one = np.ones(1, np.bool_)
    return Outcome(
        channel=0,
        round=round_,
        mean=np.zeros((1, 1), np.float32),
        weight=np.ones(1, np.float32),
        heard=np.ones(1, np.uint64),
        averaged=one,
        missed=(),
        waited_for=(),
        started_s=0.0,
        scatter_s=0.0,
        gather_s=0.0,
        total_s=0.0,
        expired=False,
    )


def test_each_step_is_taken_once_and_in_order() -> None:
    script = Script([3], takes=5)
    came = script.run()
    assert came.in_step and came.state_round == 102
    assert script.model == list(range(106)) and came.redone == 3
    assert script.passed == script.followed[:-1], "all but the last, which is an average as any other"


def test_a_state_that_is_newer_than_what_was_followed() -> None:
    script = Script([-2])
    came = script.run()
    assert came.in_step and came.state_round == 105 and came.outcome is not None
    assert script.model == list(range(106))
    assert came.outcome.round == 105, "it follows without taking steps until it is there"


@pytest.mark.parametrize("tries", range(1, TRIES + 1))
def test_a_state_from_before_what_was_kept_is_asked_for_again_a_few_times(tries: int) -> None:
    """The first round that was followed is 100."""
    script = Script([40] * (tries - 1) + [2])
    came = script.run()
    assert came.tries == tries and came.in_step, str(came)
    assert came.outcome is not None
    assert script.model == list(range(came.outcome.round + 1))


def test_the_last_state_that_is_asked_for_is_taken_though_rounds_are_missing() -> None:
    script = Script([40] * TRIES)
    came = script.run()
    assert came.tries == TRIES and not came.in_step
    assert came.outcome is not None
    first = script.followed[0]
    assert script.model == [*range(came.state_round + 1), *range(first, came.outcome.round + 1)]
    assert came.missing == first - came.state_round - 1 > 0
    assert f"{came.missing} rounds are missing: {TRIES} states were too old" in str(came)


def test_no_more_means_are_kept_than_allowed_and_the_state_must_be_as_new() -> None:
    for rounds, in_step in ((19, False), (20, True)):
        script = Script([20] * TRIES, takes=30)
        came = script.run(rounds=rounds)
        assert came.in_step is in_step, rounds


def test_a_round_that_was_missed_makes_those_before_it_useless() -> None:
    for what in ({"skips": frozenset({103})}, {"lost": frozenset({103})}):
        script = Script([4, 1], takes=5, **what)  # of round 101, then of a later one
        came = script.run()
        assert came.tries == 2 and came.in_step, what
        assert came.outcome is not None
        assert script.model == list(range(came.outcome.round + 1))


def test_a_round_that_is_missed_while_steps_are_taken_again() -> None:
    """It asks for another state; where it may not, it says what is missing."""
    slow = {"takes": 12, "redo_s": 1.0, "round_s": 0.5}
    script = Script([10, 1], skips=frozenset({116}), **slow)
    came = script.run()
    assert came.tries == 2 and came.in_step and came.outcome is not None
    assert script.model == list(range(came.outcome.round + 1))
    worst = Script([40] * (TRIES - 1) + [10], skips=frozenset({116 + 13 * (TRIES - 1)}), **slow)
    came = worst.run()
    assert came.tries == TRIES and not came.in_step
    assert came.missing == len(set(range(came.outcome.round + 1)) - set(worst.model)) > 0


def test_between_two_rounds_it_is_busy_no_longer_than_a_member() -> None:
    """With 40 rounds to be taken again, whose steps take a quarter of a round each."""
    script = Script([40], takes=60, round_s=1.0, redo_s=0.25)
    came = script.run(rounds=200)
    assert came.in_step
    assert max(script.busy_s) <= 1.0
    slow = Script([40], takes=60, round_s=0.1, redo_s=0.25)
    came = slow.run(rounds=200)
    assert came.in_step, "two at a time, at least, so that it comes to an end"
    assert max(slow.busy_s) == 0.5


def test_where_nobody_is_ahead_it_goes_on_at_once() -> None:
    """With what it has by then: its own, the rounds that it followed, or a state and what came after it."""
    nothing = Script([], last=99, die=True)
    came = nothing.run()
    assert came.in_step and came.newest and came.outcome is None and nothing.time_s == 0.0
    followed = Script([3], takes=10, last=105, die=True)
    came = followed.run()
    assert came.in_step and came.state_round < 0
    assert followed.model == followed.followed == list(range(100, 106)) and followed.time_s == 6.0
    stated = Script([3], takes=4, last=105, redo_s=1.0, round_s=0.1, die=True)
    came = stated.run()
    assert came.in_step and (came.missing, came.redone) == (0, 105 - came.state_round)
    assert stated.model == list(range(106)), "the steps that were left it takes before it goes on"


def test_donors_that_have_nothing_to_give_are_not_the_last_that_are_asked() -> None:
    """They may have fallen behind themselves, while others are in step."""
    script = Script([None, 1])
    came = script.run()
    assert came.in_step and came.tries == 2 and came.outcome is not None
    assert script.model == list(range(came.outcome.round + 1))


def test_where_no_round_has_a_mean_it_comes_to_an_end_and_gives_again() -> None:
    """As with a guard, for which too few shares come until this peer gives: it followed for ever."""
    for age, missing in ((0, 0), (2, 2)):
        script = Script([age] * TRIES, lost=frozenset(range(100, 10_001)))
        came = script.run()
        assert len(script.followed) <= TRIES * (script.takes + 2)
        assert came.outcome is not None and script.model == list(range(came.state_round + 1))
        assert came.missing == missing and came.in_step is (missing == 0)


def test_nobody_gives_the_state() -> None:
    script = Script([None] * TRIES)
    came = script.run()
    assert not came.in_step and str(came) == "nobody gave the crew's state"
    assert script.model == script.followed, "what was followed is not lost"
    assert came.outcome is not None and came.outcome.round == script.followed[-1]


def test_a_state_that_does_not_fit() -> None:
    script = Script([1], fits=False)
    came = script.run()
    assert str(came) == "the crew's state does not fit"
    assert script.model == script.followed


def test_nothing_is_heard_of_rounds() -> None:
    came = Script([1], last=99).run()
    assert came.outcome is None and str(came) == "nothing more was heard of the crew's rounds"
    script = Script([3], takes=4, last=104, redo_s=1.0, round_s=0.1)
    came = script.run()
    assert not came.in_step and came.missing == 1, "the crew ended while steps were taken again"


def test_time_is_up() -> None:
    script = Script([1], takes=100)
    came = script.run(deadline_s=20.0)
    assert str(came) == "time was up"
    assert len(script.followed) == 20


def test_an_error_of_the_fetch_is_raised() -> None:
    broken: Future[Given | None] = Future()
    broken.set_exception(OSError("no route"))
    script = Script([])
    ways = Ways(
        newer=script.newer,
        ask=lambda deadline_s: broken,
        put=script.put,
        follow=script.follow,
        redo=script.redo,
    )
    with pytest.raises(OSError, match="no route"):
        CatchUp(ways, 8, PATIENCE_S).run()


@given(
    st.lists(st.one_of(st.none(), st.integers(-3, 30)), min_size=TRIES, max_size=TRIES),
    st.integers(1, 12),
    st.frozensets(st.integers(100, 140), max_size=6),
    st.frozensets(st.integers(100, 140), max_size=6),
    st.integers(2, 12),
    st.sampled_from([0.0, 0.3, 2.0]),
)
def test_whatever_happens_it_ends_and_says_what_the_model_is(
    ages: list[int | None],
    takes: int,
    skips: frozenset[int],
    lost: frozenset[int],
    rounds: int,
    redo_s: float,
) -> None:
    script = Script(ages, takes=takes, skips=skips, lost=lost, redo_s=redo_s)
    came = script.run(rounds=rounds)
    assert came.tries <= TRIES
    assert came.outcome is not None
    assert len(script.model) == len(set(script.model)), "no step is taken twice"
    assert script.model == sorted(script.model)
    if came.state_round >= 0:
        expected = set(range(came.outcome.round + 1))
        assert came.missing == len(expected - set(script.model))
        assert came.in_step == (expected == set(script.model))


# -- What is kept


def mean_of(round_: int) -> Mean:
    return Mean(round_, np.zeros((1, 1), np.float32), np.ones(1, np.bool_))


def rounds_of(means: list[Mean] | None) -> list[int] | None:
    return None if means is None else [mean.round for mean in means]


def test_means_of_consecutive_rounds_are_kept_up_to_a_limit() -> None:
    means = Means(3)
    assert rounds_of(means.after(5)) == []
    for round_ in range(10, 15):
        means.add(mean_of(round_))
    assert [mean.round for mean in means] == [12, 13, 14]
    assert rounds_of(means.after(11)) == [12, 13, 14]
    assert rounds_of(means.after(13)) == [14]
    assert rounds_of(means.after(14)) == rounds_of(means.after(20)) == []
    assert means.after(10) is None, "round 11 made room"
    means.add(mean_of(16))
    assert len(means) == 1 and means.after(14) is None and rounds_of(means.after(15)) == [16]
    means.missed(17)
    assert len(means) == 0 and means.after(16) is None and rounds_of(means.after(17)) == []


def test_memory_is_bounded() -> None:
    assert rounds_max(4) == ROUNDS_MAX
    assert rounds_max(1 << 24) == KEPT_BYTES >> 24
    assert rounds_max(1 << 40) == ROUNDS_MIN
    assert all(n * rounds_max(n) <= max(KEPT_BYTES, n * ROUNDS_MIN) for n in (1, 1000, 1 << 22, 1 << 30))


# -- Who follows


def optimizers() -> Iterator[tuple[CrewOptimizer, bool]]:
    for options, follows in (
        ({"average": "gradients"}, True),
        ({"average": "gradients", "compress": TopK(ratio=0.1)}, True),
        ({"average": "models"}, False),
        ({"average": "models", "method": Moshpit()}, False),
    ):
        model = Partial(0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        yield CrewOptimizer(inner, FakeCrew(1).transport(0), model=model, **options), follows


def test_who_averages_gradients_with_all_others_can_follow() -> None:
    for optimizer, follows in optimizers():
        assert isinstance(optimizer._averaged.follower, Follower) is follows
    unseen = Partial(0)
    early = CrewOptimizer(torch.optim.SGD(unseen.parameters()), FakeCrew(1).transport(0), average="gradients")
    assert early._averaged.follower is None, "averaging has not begun"


def test_arriving_takes_the_place_of_one_average() -> None:
    model = Partial(0)
    weights: list[float] = []

    def weight() -> float:
        weights.append(1.0)
        return 1.0

    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        FakeCrew(1).transport(0),
        average="gradients",
        model=model,
        weight=weight,
    )
    before = learned(model, optimizer)
    optimizer._averaged.arrive = lambda: outcome_of(41)
    optimizer.average()
    assert optimizer.outcome is not None and optimizer.outcome.round == 41
    assert torch.equal(before, learned(model, optimizer)) and len(weights) == 1
    optimizer._averaged.arrive = lambda: None
    backward(model, 0, 0)
    optimizer.step()
    assert optimizer.outcome.round == 0 and len(weights) == 2, "it did not, and the average followed"
    assert not torch.equal(before, learned(model, optimizer))
