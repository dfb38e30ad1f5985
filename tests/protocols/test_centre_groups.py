"""Groups at a central state: who goes with whom, what a group's step is, deadlines, clocks, deaths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.types import Arm, Arrived, Average, Expired, Left, Run
from ragtag.protocols.central import wire
from ragtag.protocols.central.block import Block, Update
from ragtag.protocols.central.gate import Step
from ragtag.protocols.central.grouping import GroupGate
from ragtag.protocols.central.owners import Owners
from ragtag.protocols.central.speeds import PACE_WINDOW, Speeds
from ragtag.protocols.channel.averager import Channel, Opening
from ragtag.protocols.channel.presence import Crew
from ragtag.schedules import ProgressiveGrouping
from ragtag.schedules.grouping import scale
from ragtag.training.exchange.central import Centre, Grouped
from tests.protocols.centres import STEP_S, TURNS, Centres, comes, doubled, in_batches
from tests.protocols.harness import TINY
from tests.protocols.test_centre import STRAYS

N, SLOW = 4, 3


def speeds(n: int = N, rule: ProgressiveGrouping | None = None) -> Speeds:
    made = Speeds(Grouped(rule or ProgressiveGrouping()), Owners(0, 1, 2, range(n)))
    for peer in range(n):
        made.answered(0.0, peer)
    return made


def update(peer: int, number: int, value: float, base: int, clock: int = 0, weight: float = 1.0) -> Update:
    values = np.full((3, 2), value, np.float32)
    return Update(peer, number, values, np.ones(3, np.bool_), weight, base, base, clock)


class Owner:
    """One owner of two blocks that are at 0."""

    def __init__(self, n: int = N, rule: ProgressiveGrouping | None = None) -> None:
        self.blocks = [Block(me=0), Block(me=0)]
        for block in self.blocks:
            block.adopt(np.zeros((3, 2), np.float32), 0)
        opening = Opening(0, Channel(Centre(), TINY, 6, 0.1, 0.01), Crew(0, n, 1))
        grouped = Grouped(rule or ProgressiveGrouping())
        self.barriers = GroupGate(opening, grouped, self.blocks, Owners(0, 1, 2, range(n)))
        self.speeds = self.barriers.speeds
        for peer in range(n):
            self.speeds.answered(0.0, peer)

    def push(
        self, peer: int, number: int, *, step_s: float = 1.0, at_s: float = 1.0, block: int = 0,
        clock: int = 0, value: float = 1.0, base: int | None = None,
    ) -> Step:  # fmt: skip
        self.speeds.pushed(at_s, peer, number, step_s)
        base = self.blocks[block].version if base is None else base
        step = self.barriers.judge(at_s, block, update(peer, number, value, base, clock))
        for _, answer in step.answers:
            self.speeds.answered(at_s, answer.peer)
        return step


def who(step: Step) -> list[int]:
    return sorted(answer.peer for _, answer in step.answers)


# -- Speeds and groups


def test_groups_follow_what_updates_say_and_grow_and_shrink() -> None:
    one = speeds()
    for peer in range(N):
        one.pushed(1.0, peer, 0, 1.0)
    one.review()
    assert one.groups == ((0, 1, 2, 3),)
    one.pushed(2.0, SLOW, 1, 20.0)
    assert one.review()
    assert one.groups == ((0, 1, 2), (3,))
    assert one.mates(0) == {0, 1, 2}
    assert one.waited_for([0]) == {0, 1, 2}
    assert "2 groups: 0 1 2 (1e+03 ms) + 3 (2e+04 ms)" in one.told()
    one.pushed(3.0, SLOW, 2, 1.0)
    assert one.review()
    assert one.groups == ((0, 1, 2, 3),)
    assert not one.review()


def test_who_missed_a_deadline_is_slow_until_its_own_figures_can_show_it() -> None:
    one = speeds()
    for peer in range(N):
        one.pushed(1.0, peer, 0, 1.0)
        one.answered(1.0, peer)
    one.missed(3.0, [SLOW])
    one.review()
    assert one.groups == ((0, 1, 2), (3,))
    one.pushed(21.0, SLOW, 1, 1.0)  # the median of its steps does not show it yet
    assert one.step_s()[SLOW] == 20.0
    for turn in range(2, 2 + PACE_WINDOW // 2):
        one.pushed(21.0 + turn, SLOW, turn, 1.0)
        assert one.step_s()[SLOW] == 20.0
    one.pushed(30.0, SLOW, 9, 1.0)
    assert one.step_s()[SLOW] == 1.0


def test_absurd_speeds_go_alone() -> None:
    one = speeds()
    for peer in range(N):
        one.pushed(1.0, peer, 0, 1e-9 if peer == SLOW else 1.0)
    one.review()
    assert one.groups == ((0, 1, 2),)
    assert one.mates(SLOW) == {SLOW}
    assert one.doubted == {SLOW: 1e-9}
    one.pushed(2.0, SLOW, 1, 1.0)
    one.review()
    assert one.groups == ((0, 1, 2, 3),)
    assert one.doubted == {}


def paced(
    step_s: dict[int, float], said_s: dict[int, float] | None = None, turns: int = PACE_WINDOW
) -> Speeds:
    """Whose updates have come every so often; they say that their steps take ``said_s``."""
    one = speeds(len(step_s))
    for peer, takes_s in step_s.items():
        for turn in range(turns):
            at_s = (turn + 1) * takes_s
            one.pushed(at_s, peer, turn, (said_s or step_s)[peer])
            one.gave(peer, 16.0)
            one.answered(at_s, peer)
    return one


def test_a_group_is_as_large_a_part_as_its_samples_per_second() -> None:
    one = speeds()
    assert one.share(0.0, [0, 1, 2]) == 0.75  # nothing is known yet
    one = paced({0: 1.0, 1: 1.0, 2: 1.0, SLOW: 20.0})
    assert one.share(9.0, [0, 1, 2]) == pytest.approx(3 / 3.05)
    assert one.share(9.0, [SLOW]) == pytest.approx(0.05 / 3.05)
    one.gave(0, 64.0)
    assert one.share(9.0, [0]) == pytest.approx(4 / 6.05)
    assert one.share(9.0, range(N)) == 1.0
    assert 0 < one.share(9.0, [7]) < 0.5  # one that has just left: what it gave still counts


def test_of_who_does_not_come_any_more_less_and_less_is_expected() -> None:
    one = paced(dict.fromkeys(range(N), 1.0))
    parts = []
    for at_s in (9.0, 10.0, 29.0, 1009.0):
        for peer in range(3):
            one.answered(at_s, peer)
        parts.append(one.share(at_s, [0, 1, 2]))
    assert parts[:2] == [0.75, 0.75]
    assert parts[2] == pytest.approx(3 / (3 + 5 / 24))  # four steps of 1 s, and 20 s of one under way
    assert parts[3] > 0.998


def test_of_who_has_not_come_yet_less_and_less_is_expected_too() -> None:
    one = speeds()
    for turn in range(20):
        for peer in range(3):
            one.pushed(1.0 + turn, peer, turn, 1.0)
            one.answered(1.0 + turn, peer)
    assert one.share(20.0, [0, 1, 2]) == pytest.approx(3 / 3.05)


def test_a_change_of_all_speeds_makes_nobody_a_larger_part() -> None:
    """Where all pause for a look at the model, whoever comes first from it has not grown."""
    one = paced(dict.fromkeys(range(N), 1.0))
    one.pushed(109.0, 0, PACE_WINDOW, 1.0)
    assert one.share(109.0, [0]) == pytest.approx(1 / N)


@pytest.mark.parametrize("said_s", [1e-6, 1e-3, 1e3, 1e9])
def test_nobody_is_a_large_or_a_small_part_by_its_word_alone(said_s: float) -> None:
    """A peer that reports absurd speed (the issue), or one that is merely wrong."""
    times = dict.fromkeys(range(N), 1.0)
    one = paced(times, times | {SLOW: said_s})
    assert one.share(9.0, [0, 1, 2]) == pytest.approx(0.75)


@given(st.dictionaries(st.integers(0, 9), st.floats(1e-9, 1e9), min_size=1))
def test_no_speeds_are_refused(step_s: dict[int, float]) -> None:
    grouped = Grouped(ProgressiveGrouping())
    groups = grouped.groups(step_s, ())
    named = [peer for group in groups for peer in group]
    assert len(named) == len(set(named))
    assert set(named) <= set(step_s)
    assert grouped.groups(step_s, groups) == grouped.groups(step_s, grouped.groups(step_s, groups))


# -- Steps


def test_a_groups_step_is_its_mean_times_its_share_of_the_crew() -> None:
    owner = Owner()
    for peer in range(N):
        assert who(owner.push(peer, 0, step_s=20.0 if peer == SLOW else 1.0)) == (
            [] if peer < SLOW else [0, 1, 2, SLOW]
        )
    assert owner.speeds.groups == ((0, 1, 2, 3),)  # looked at when a step begins
    values = owner.blocks[0].values
    assert values is not None
    np.testing.assert_allclose(values, 1.0)
    base = owner.blocks[0].version
    assert who(owner.push(0, 1, value=4.0, at_s=2.0)) == []
    assert who(owner.push(1, 1, value=1.0, at_s=2.0)) == []
    assert who(owner.push(2, 1, value=1.0, at_s=2.0)) == [0, 1, 2]
    values = owner.blocks[0].values
    assert values is not None
    np.testing.assert_allclose(values, 1.0 + 0.75 * 2.0)
    for turn in range(2, 6):
        for peer in range(3):
            owner.push(peer, turn, value=0.0, at_s=1.0 + turn)
    (_, answer), *_ = owner.push(SLOW, 1, step_s=20.0, base=base, value=10.0, at_s=7.0).answers
    assert answer.stale == 5
    values = owner.blocks[0].values
    assert values is not None
    np.testing.assert_allclose(values, 2.5 + 10.0 * scale((1 / 3.5) / (3 + 1 / 3.5), 5))


def test_a_straggler_takes_nothing_off_the_others_steps() -> None:
    """By heads, each step of the three would be three quarters of one: less accuracy in a given time."""
    owner = Owner()
    for turn in range(40):
        for peer in range(3):
            owner.push(peer, turn, at_s=1.0 + turn, value=0.0)
        if turn % 20 == 19:
            owner.push(SLOW, turn, at_s=1.0 + turn, step_s=20.0, value=0.0)
    before = owner.blocks[0].values
    for peer in range(3):
        owner.push(peer, 40, at_s=41.0)
    values = owner.blocks[0].values
    assert before is not None
    assert values is not None
    np.testing.assert_allclose(values - before, 3 / 3.05, rtol=0.01)


def test_a_deadline_splits_the_group_and_who_comes_late_counts_at_once() -> None:
    owner = Owner()
    for turn in range(2):
        for peer in range(N):
            owner.push(peer, turn, at_s=1.0 + turn)
    (timer,) = owner.push(0, 2, at_s=3.0).timers
    assert timer.at_s == pytest.approx(4.5)
    owner.push(1, 2, at_s=3.0)
    owner.push(2, 2, at_s=3.0)
    base = owner.blocks[0].version
    step = owner.barriers.expired(4.5, 0, timer.timer)
    assert who(step) == [0, 1, 2]
    assert {note.what for note in step.notes} <= {"groups"}
    assert owner.speeds.groups == ((0, 1, 2), (3,))
    late = owner.push(SLOW, 2, at_s=10.0, base=base)
    assert who(late) == [SLOW]
    assert late.answers[0][1].stale == 1
    assert owner.barriers.expired(5.0, 0, timer.timer) == Step([], [], [])


def test_where_groups_cannot_grow_the_dead_are_waited_for_twice() -> None:
    owner = Owner(rule=ProgressiveGrouping(groups_max=1))
    for peer in range(N):
        owner.push(peer, 0)
    waited = []
    for turn in range(1, 4):
        (timer,) = owner.push(0, turn).timers
        owner.push(1, turn)
        if who(owner.push(2, turn)):
            break
        notes = owner.barriers.expired(timer.at_s, 0, timer.timer).notes
        waited.append([note.detail for note in notes if note.what == "barrier ended"])
    assert waited == [["a step of block 0 without peers 3"], []]  # two waits, and no third
    owner.push(SLOW, 1)
    assert owner.push(0, 9).timers  # it is counted again


def test_a_block_that_is_behind_closes_when_its_group_is_seen_to_be_further() -> None:
    """An update of peer 1 was lost on its way to this block; in another block the step was made."""
    owner = Owner(2)
    assert who(owner.push(0, 0, clock=4)) == []
    assert who(owner.push(1, 1, clock=5)) == [0]
    last = owner.push(0, 1, clock=5)
    assert who(last) == [0, 1]
    assert {answer.clock for _, answer in last.answers} == {6}


def test_who_does_not_wait_gives_more_of_the_same_and_who_is_gone_is_not_answered() -> None:
    owner = Owner(3)
    owner.push(0, 0, value=1.0)
    owner.push(0, 1, value=2.0)
    owner.push(1, 0, value=3.0)
    owner.barriers.forget(1)
    step = owner.push(2, 0, value=0.0)
    assert sorted((a.peer, a.number) for _, a in step.answers) == [(0, 1), (2, 0)]
    values = owner.blocks[0].values
    assert values is not None
    np.testing.assert_allclose(values, (1 + 2 + 3 + 0) / 3)


# -- Whole crews


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_every_update_counts_once(loss: float) -> None:
    world = Centres(rule=Centre(ProgressiveGrouping()), loss=loss, turns=20)
    doubled(world)
    world.run()
    state = world.settle()
    if loss:
        assert state[:, :N].mean() > 0.9 * 20 / N
    else:
        np.testing.assert_allclose(state[:, :N], 20 / N, rtol=1e-5)


def test_the_fast_do_not_wait_for_the_slow() -> None:
    world = Centres(rule=Centre(ProgressiveGrouping()), slow={SLOW: 20.0}, turns=60).run()
    fast = [outcome.total_s for outcome in world.outcomes[0][8:]]
    assert max(fast) < STEP_S
    assert world.outcomes[0][40].groups == ((0, 1, 2), (3,))
    stale = [s for outcome in world.outcomes[SLOW][1:3] for s in outcome.stale or ()]
    assert min(stale) > 8
    state = world.settle()
    assert (state[:, SLOW] > 0.5 * 60 / 20).all()  # 1/tau of each: less than a fourth
    assert (state[:, :3] > 0.9 * 60 / N).all()


def test_who_leaves_is_waited_for_by_nobody_and_who_comes_back_goes_with_its_like() -> None:
    world = Centres(rule=Centre(ProgressiveGrouping()), turns=60)
    world.frozen[1] = (0.05, 0.25)
    for other in (0, 2, 3):
        world.push(0.08, other, Left(1))
    comes(world, 1, 0.26)
    world.run()
    groups = [outcome.groups for outcome in world.outcomes[0]]
    away = groups.index(((0, 2, 3),))
    assert ((0, 1, 2, 3),) in groups[:away]
    assert ((0, 1, 2, 3),) in groups[away:]
    late = [outcome.total_s for outcome in world.outcomes[0][-10:]]
    assert max(late) < 2 * STEP_S
    state = world.settle()
    assert (state[:, [0, 2, 3]] > 0.8 * 60 / N).all()


def test_of_three_peers_there_are_no_more_than_three_groups() -> None:
    """Eight are allowed; each of three goes at a speed of its own."""
    world = Centres(3, Centre(ProgressiveGrouping(groups_max=8)), slow={1: 4.0, 2: 16.0}, turns=40).run()
    assert world.outcomes[0][-1].groups == ((0,), (1,), (2,))
    assert all(len(outcome.groups) <= 3 for outcomes in world.outcomes for outcome in outcomes)
    assert "3 groups" in " ".join(note.detail for _, note in world.notes if note.what == "groups")


def test_an_absurd_speed_is_said_and_its_peer_goes_alone() -> None:
    """Peer 2's clock is broken: it tells steps of 2^-32 s, the shortest that can be told."""
    world = Centres(3, Centre(ProgressiveGrouping()), n_chunks=6, turns=30)

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        pushed = source == 2 and run.key.stage == wire.PUSH and len(run.heard)
        heard = wire.with_pace(wire.without_pace(run.heard)[0], 1e-12) if pushed else run.heard
        return [(0.0, replace(run, heard=heard))]

    world.carry = carry
    world.run()
    told = [note for _, note in world.notes if note.what == "speed not believed"]
    assert {note.peer for note in told} == {2}
    assert len(told) == 1  # not in each step, nor by each owner
    assert "goes alone" in told[0].detail
    assert all(len(outcomes) == 31 for outcomes in world.outcomes)
    state = world.settle()
    assert (state[:, :3] > 0.8 * 30 / 3).all()  # it counts for what it gives, no more and no less
    assert (state[:, :3] < 1.2 * 30 / 3).all()


@pytest.mark.parametrize("told_s", [None, 0.005])
def test_a_group_that_empties_is_no_more(told_s: float | None) -> None:
    """The slow one, a group of its own, dies in mid-step; told of it or not, the others go on as one."""
    world = Centres(
        rule=Centre(ProgressiveGrouping()), slow={SLOW: 8.0}, gone={SLOW: 0.3}, told_s=told_s, turns=80
    ).run()
    assert ((0, 1, 2), (SLOW,)) in [outcome.groups for outcome in world.outcomes[0]]
    assert all(len(world.outcomes[peer]) == 81 for peer in world.living)
    if told_s is not None:
        assert world.outcomes[0][-1].groups == ((0, 1, 2),)
        assert [note.detail for _, note in world.notes if note.what == "groups"][-1].startswith("1 group:")
    late = [outcome.total_s for outcome in world.outcomes[0][-10:]]
    assert max(late) < 2 * STEP_S
    states = [outcome.mean[:, world.living] for outcome in world.outcomes[0][-21:]]
    np.testing.assert_allclose(states[-1] - states[0], 20 / 3, rtol=0.05)  # nothing is kept for who is gone


@pytest.mark.parametrize("told_s", [0.002, 0.02])
def test_an_owner_that_dies_with_half_a_groups_updates_costs_one_step(told_s: float) -> None:
    """Some have given to it, and wait; the next owner goes on from the newest copy, and says so."""
    calm = Centres(rule=Centre(ProgressiveGrouping()), n_chunks=8, turns=20).run()
    dead = calm.node(0).owners[0] or 1
    begins = [at for at, peer, event, _ in calm.log if peer == dead and isinstance(event, Average)]
    at_s = begins[8] + 1e-4  # the others' updates are on their way to it, or here; its own just is
    world = Centres(
        rule=Centre(ProgressiveGrouping()), n_chunks=8, turns=20, gone={dead: at_s}, told_s=told_s
    ).run()
    assert all(len(world.outcomes[peer]) == 21 for peer in world.living)
    assert world.noted("central state rebuilt")
    state = world.settle()[:, world.living]  # (Centres sees that nothing counts twice)
    assert (state > 8 / N + 0.75 * 11 / 3).all()  # one step or two of 20 are lost


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_deaths_in_any_state(data: st.DataObject) -> None:
    """As for other rules: nothing is counted twice, no version goes back (``Centres`` looks), peers go on."""
    n = data.draw(st.integers(2, 4))
    loss = data.draw(st.sampled_from([0.0, 0.1, 0.3]))
    when = st.floats(0.0, 0.12)
    dead = data.draw(st.dictionaries(st.integers(1, n - 1), when, max_size=n - 1))
    told_s = data.draw(st.none() | st.floats(0.0, 0.05))
    world = Centres(
        n, Centre(ProgressiveGrouping()), loss=loss, gone=dead, told_s=told_s, n_chunks=5,
        seed=data.draw(st.integers(0, 99)), slow={0: data.draw(st.sampled_from([1.0, 3.0, 30.0]))},
    )  # fmt: skip
    if data.draw(st.booleans()):
        from_s = data.draw(when)
        world.frozen[0] = (from_s, from_s + data.draw(st.floats(0.01, 0.3)))
    if data.draw(st.booleans()):
        doubled(world)
    elif data.draw(st.booleans()):
        in_batches(world)
    world.run()
    assert all(len(world.outcomes[peer]) == TURNS + 1 for peer in world.living)
    world.loss.faults = type(world.loss.faults)()
    world.settle()
    world.more(3)
    before = world.settle()
    world.more(2)
    after = world.settle()
    assert (after - before)[:, world.living].min() > 0.5 * 2 / n / 4


@settings(max_examples=100)
@given(st.lists(st.lists(STRAYS, max_size=12), min_size=1, max_size=4))
def test_no_sequence_of_runs_raises(turns: list[list[Run]]) -> None:
    """Whatever a peer sends, of paces and clocks too."""
    method = Centre(ProgressiveGrouping())
    node = method.open(Opening(0, Channel(method, TINY, 5, 0.1, 0.01), Crew(0, 4, 1)))
    zeros = np.zeros((5, TINY.elements), np.float32)
    for at, runs in enumerate(turns):
        timers = []
        if node.active is None:
            timers = node.step(float(at), Average(0, zeros, 1.0))
        for run in runs:
            timers += node.step(float(at), Arrived((run,)))
        for effect in timers:
            if isinstance(effect, Arm):
                node.step(max(float(at), effect.at_s), Expired(effect.timer))
