"""The parts of a central state by themselves: what travels, who owns what, what a block makes of updates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.deadline import Deadline
from ragtag.core.types import Arm, MessageKey, Send, Timer
from ragtag.optim.compensate import compensated
from ragtag.protocols.central import wire
from ragtag.protocols.central.block import Block, Rule, Update
from ragtag.protocols.central.gate import RuleGate
from ragtag.protocols.central.owners import GONE_AFTER, Owners
from ragtag.protocols.central.rebuild import Rebuilder
from ragtag.protocols.rounds.layout import layout_of
from ragtag.schedules import Asynchronous, BackupWorkers, SoftSync
from ragtag.training.exchange.central import Compensation, Judged
from tests.protocols.centres import Each
from tests.protocols.harness import TINY

VERSIONS = st.integers(0, (wire.BELIEVED << 6) - 1)


@given(VERSIONS, st.integers(0, wire.BLOCKS_MAX - 1))
def test_a_key_holds_a_version_and_a_block(version: int, block: int) -> None:
    key = wire.state_key(3, version, block)
    assert key.round < 1 << 32
    assert key.block < 1 << 16
    assert (wire.state_version(key), wire.block_of(key)) == (version, block)


def test_versions_are_in_one_order_whoever_makes_them() -> None:
    made = [wire.version_of(count, owner) for count in range(1, 5) for owner in (0, 7, 63)]
    assert made == sorted(set(made))
    with pytest.raises(RuntimeError, match="all that there are"):
        wire.version_of(wire.COUNT_MAX + 1, 0)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 63))
def test_a_weight_holds_which_update_how_stale_and_a_clock(number: int, stale: int, clock: int) -> None:
    weight = np.float32(wire.echo(number, stale, clock))
    assert wire.echoed(float(weight)) == (number & 0xFF, min(stale, 0x3FF), clock)


@pytest.mark.parametrize("weight", [-1.0, 0.5, 2.0**24, np.inf, np.nan])
def test_other_weights_are_no_answer(weight: float) -> None:
    assert wire.echoed(weight) == (-1, 0, 0)


@given(st.integers(0, 63), st.integers(0, 63))
def test_of_two_clocks_one_is_ahead_and_ticking_puts_it_ahead(clock: int, other: int) -> None:
    both = {wire.ahead(clock, other), wire.ahead(other, clock)}
    assert both == ({False} if clock == other or 0 in (clock, other) else {True, False})
    assert wire.ticked(clock) != 0
    assert clock == 0 or wire.ahead(wire.ticked(clock), clock)
    assert wire.later(clock, other) == wire.later(other, clock)


@given(st.lists(VERSIONS, min_size=1, max_size=4), st.none() | st.floats(1e-9, 1e9))
def test_versions_travel_with_a_pace_above_them(versions: list[int], step_s: float | None) -> None:
    given_ = np.array(versions, np.uint64)
    found, pace_s = wire.without_pace(wire.with_pace(given_, step_s))
    assert found.tolist() == versions
    assert pace_s is None if step_s is None else pace_s == pytest.approx(step_s, rel=1e-3)


def test_a_step_of_no_time_has_the_shortest_pace_that_can_be_told() -> None:
    given_ = np.array([1], np.uint64)
    assert wire.without_pace(wire.with_pace(given_, 1e-300))[1] == 2.0 ** (1 / 1024 - 32)
    assert wire.without_pace(wire.with_pace(given_, 1e300))[1] == pytest.approx(2.0**32, rel=1e-3)


@given(st.dictionaries(st.integers(0, wire.BLOCKS_MAX - 1), VERSIONS), st.data())
def test_small_messages_come_back(versions: dict[int, int], data: st.DataObject) -> None:
    mine = frozenset(data.draw(st.sets(st.sampled_from(sorted(versions))))) if versions else frozenset()
    told = wire.Holdings(versions, mine)
    assert wire.decode_holdings(wire.encode_holdings(told), wire.BLOCKS_MAX) == told
    assert wire.decode_ask(wire.encode_ask(sorted(versions)), wire.BLOCKS_MAX) == sorted(versions)


@given(st.binary(max_size=400), st.integers(1, wire.BLOCKS_MAX))
def test_no_bytes_raise(blob: bytes, n_blocks: int) -> None:
    assert all(block < n_blocks for block in wire.decode_ask(blob, n_blocks))
    told = wire.decode_holdings(blob, n_blocks)
    assert told is None or all(block < n_blocks for block in {*told.versions, *told.mine})


@given(st.sets(st.integers(0, 63), min_size=2, max_size=64), st.integers(0, 99))
def test_only_the_dead_ones_blocks_move(peers: set[int], seed: int) -> None:
    me, dead = sorted(peers)[0], sorted(peers)[-1]
    owners = Owners(me, seed, wire.BLOCKS_MAX, peers)
    before = [owners[block] for block in range(wire.BLOCKS_MAX)]
    for _ in range(GONE_AFTER):
        owners.silent(dead)
    after = [owners[block] for block in range(wire.BLOCKS_MAX)]
    assert all(a == b or b == dead for a, b in zip(after, before, strict=True))
    assert dead not in after
    owners.heard(dead)
    assert [owners[block] for block in range(wire.BLOCKS_MAX)] == before
    owners.left(dead)
    assert [owners[block] for block in range(wire.BLOCKS_MAX)] == after
    others = Owners(sorted(peers)[1], seed, wire.BLOCKS_MAX, peers - {dead})
    assert dead == others._me or [others[block] for block in range(wire.BLOCKS_MAX)] == after


def update(peer: int, number: int, value: float, base: int, weight: float = 1.0, got: int = 3) -> Update:
    there = np.arange(3) < got
    values = np.full((3, 2), value, np.float32) * there[:, None]
    return Update(peer, number, values.astype(np.float32), there, weight, base, base)


@pytest.mark.parametrize("gone", ["left", "silent"])
def test_a_barrier_waits_for_those_that_live_though_one_that_has_given_is_gone(gone: str) -> None:
    """Of five, peers 0 to 2 have given when 0 goes: its update counts, and 3 and 4 are still to come."""
    held, owners = Block(2, np.zeros((3, 2), np.float32), serving=True), Owners(2, 1, 1, range(5))
    opening: Any = SimpleNamespace(me=2, number=0, channel=SimpleNamespace(probe_s=0.1))
    gate = RuleGate(opening, Judged(BackupWorkers(0)), [held], owners)
    for peer in range(3):
        assert gate.judge(0.0, 0, update(peer, 0, 1.0, 0)).answers == []
    if gone == "left":
        owners.left(0)
        held.forget(0)
    else:
        for _ in range(GONE_AFTER):
            owners.silent(0)
    assert gate.review(0.0, [0]).answers == []
    assert gate.judge(0.0, 0, update(3, 0, 1.0, 0)).answers == []
    assert {answer.peer for _, answer in gate.judge(0.0, 0, update(4, 0, 1.0, 0)).answers} >= {1, 2, 3, 4}


def test_a_barrier_counts_one_again_that_it_no_longer_waited_for() -> None:
    """Peer 2 comes back as the second of three: peer 1 is still to come."""
    held, owners = Block(0, np.zeros((3, 2), np.float32), serving=True), Owners(0, 1, 1, range(3))
    opening: Any = SimpleNamespace(me=0, number=0, channel=SimpleNamespace(probe_s=0.1))
    gate = RuleGate(opening, Judged(BackupWorkers(0)), [held], owners)
    held.missed_steps[2] = GONE_AFTER
    assert gate.judge(0.0, 0, update(0, 0, 1.0, 0)).answers == []
    assert gate.judge(0.0, 0, update(2, 0, 1.0, 0)).answers == []
    assert len(gate.judge(0.0, 0, update(1, 0, 1.0, 0)).answers) == 3


def test_a_barrier_waits_for_one_that_it_has_missed_once_and_not_for_one_missed_twice() -> None:
    held, owners = Block(0, np.zeros((3, 2), np.float32), serving=True), Owners(0, 1, 1, range(3))
    opening: Any = SimpleNamespace(me=0, number=0, channel=SimpleNamespace(probe_s=0.1))
    gate, answered = RuleGate(opening, Judged(BackupWorkers(0)), [held], owners), list[int]()
    for step in range(GONE_AFTER + 1):
        given = [update(peer, step, 1.0, held.version) for peer in (0, 1)]
        answered += [len(gate.judge(float(step), 0, one).answers) for one in given]
        gate.expired(step + 0.5, 0, Timer(0, wire.count_of(held.version), "barrier 0"))
    assert answered == [0, 0] * GONE_AFTER + [0, 2]


@pytest.mark.parametrize("serving", [True, False])
def test_a_barrier_of_a_block_that_has_no_update_or_is_elsewhere_ends_nothing(serving: bool) -> None:
    held, owners = Block(0, np.zeros((3, 2), np.float32), serving=True), Owners(0, 1, 1, range(3))
    opening: Any = SimpleNamespace(me=0, number=0, channel=SimpleNamespace(probe_s=0.1))
    gate = RuleGate(opening, Judged(BackupWorkers(0)), [held], owners)
    timer = Timer(0, wire.count_of(held.version), "barrier 0")
    if not serving:
        gate.judge(0.0, 0, update(0, 0, 1.0, 0))
        held.serving = False
    assert gate.expired(1.0, 0, timer) == ([], [], [])
    assert held.missed_steps == {}


def test_a_search_for_a_block_ends_where_its_owner_lives() -> None:
    """This peer had not heard of it."""
    n_blocks, zeros = 4, np.zeros((1, TINY.elements), np.float32)
    owners = Owners(0, 1, n_blocks, range(3))
    block = next(block for block in range(n_blocks) if owners[block] == 1)
    search = Rebuilder(
        0, 0, TINY, layout_of(n_blocks, n_blocks), owners, lambda _: (0, zeros), Deadline(0.1), lambda: 0.1
    )
    search.seek(block)
    search.ask(0.0)
    for peer, mine in ((1, frozenset({block})), (2, frozenset[int]())):
        told = wire.Holdings({block: 5}, mine)
        key = MessageKey(0, 0, wire.TELL, 0)
        assert search.told(0.01, wire.small(peer, key, wire.encode_holdings(told))) == []
    assert search.found == []
    search.seek(block)
    assert search.ask(0.02), "it may be looked for again"


@pytest.mark.parametrize(("leaves", "asked"), [(True, [2, 3, 1]), (False, [2, 3, 1]), ("another", [2, 1])])
def test_where_the_one_that_is_asked_for_its_copy_leaves_the_next_best_is(
    leaves: bool | str, asked: list[int]
) -> None:
    """So it is where that one is silent, or another one left. One leaves that had told nothing, too."""
    zeros, owners = np.zeros((1, TINY.elements), np.float32), Owners(0, 1, 1, range(5))
    search = Rebuilder(0, 0, TINY, layout_of(1, 1), owners, lambda _: (1, zeros), Deadline(0.1), lambda: 0.1)
    search.seek(0)
    search.ask(0.0)
    assert search.left(0.0, 4) == []
    for peer, version in ((1, 3), (2, 7), (3, 5)):
        blob = wire.encode_holdings(wire.Holdings({0: version}, frozenset()))
        effects = search.told(0.01, wire.small(peer, MessageKey(0, 0, wire.TELL, 0), blob))
    seen = []
    while effects:
        send, arm = effects
        assert isinstance(send, Send) and isinstance(arm, Arm)
        seen.append(send.run.peer)
        if leaves == "another":
            assert search.left(0.02, 3) == []
        effects = search.left(0.02, send.run.peer) if leaves is True else search.expired(arm.at_s, arm.timer)
    assert seen == asked
    (found,) = search.found
    assert (found.source, found.above, found.told, found.asked) == (0, 7, 3, 4)


def block() -> Block:
    made = Block(me=5)
    made.adopt(np.zeros((3, 2), np.float32), 0)
    return made


def test_a_step_is_the_mean_of_what_came_chunk_by_chunk() -> None:
    held, rule = block(), Judged(BackupWorkers(0))
    base = held.version
    assert held.judge(0.0, update(1, 4, 1.0, base, weight=3.0), rule, 2) == []
    answers = held.judge(0.0, update(2, 9, 5.0, base, got=1), rule, 2)
    assert [(a.peer, a.number, a.stale) for a in answers] == [(1, 4, 0), (2, 9, 0)]
    assert held.values is not None
    np.testing.assert_allclose(held.values[:, 0], [2.0, 1.0, 1.0])
    assert [held.contributors(a) for a in answers] == [0b110, 0b110]
    assert held.version > base


def test_who_did_not_wait_for_a_barrier_counts_as_one() -> None:
    held, rule = block(), Judged(BackupWorkers(0))
    assert held.judge(0.0, update(1, 0, 1.0, held.version), rule, 3) == []
    assert held.judge(0.0, update(1, 1, 1.0, held.version), rule, 3) == []
    assert held.judge(0.0, update(2, 0, 4.0, held.version), rule, 3) == []
    assert [a.number for a in held.judge(0.0, update(0, 7, 0.0, held.version), rule, 3)] == [1, 0, 7]
    assert held.values is not None
    np.testing.assert_allclose(held.values, (1 + 1 + 4 + 0) / 3)


def test_more_of_an_update_may_bring_what_the_first_lacked() -> None:
    held, rule = block(), Judged(BackupWorkers(0))
    assert held.judge(0.0, update(1, 0, 1.0, held.version, weight=4.0, got=1), rule, 2) == []
    assert held.judge(0.0, update(1, 1, 1.0, held.version, weight=4.0), rule, 2) == []
    held.close()
    assert held.values is not None
    np.testing.assert_allclose(held.values[:, 0], [2.0, 1.0, 1.0])


def test_what_was_kept_is_added_to_what_is_adopted() -> None:
    held, rule = block(), Judged(SoftSync(1, corrected=False))
    held.judge(0.0, update(1, 0, 2.0, held.version), rule, 2)
    held.adopt(np.full((3, 2), 10.0, np.float32), wire.version_of(40, 3))
    assert wire.count_of(held.version) == 41
    held.close()
    assert held.values is not None
    np.testing.assert_allclose(held.values, 12.0)


@pytest.mark.parametrize(
    "rule", [Each(), Judged(Asynchronous()), Judged(SoftSync(7)), Judged(BackupWorkers(7))]
)
def test_a_crew_that_shrinks_below_its_schedule_goes_on(rule: Rule) -> None:
    held = block()
    answers = held.judge(0.0, update(1, 0, 1.0, held.version), rule, 1)
    assert [a.peer for a in answers] == [1]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-2, 2)), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.04, 1.0]),
)
def test_delay_compensation_is_dc_asgd(steps: list[tuple[int, float]], strength: float) -> None:
    """Algorithm 2 of Zheng et al.: w -= eta (g + lambda g g (w - w_bak(m))), then w_bak(m) = w."""
    rate = 0.1
    held, rule = block(), Judged(Asynchronous())
    correction = Compensation(strength, lambda: rate)
    model = np.zeros((3, 2), np.float32)
    backup = dict.fromkeys(range(4), model)
    bases = dict.fromkeys(range(4), held.version)
    for peer in range(4):
        held.give(peer)
    for number, (peer, value) in enumerate(steps):
        gradient = np.full((3, 2), value, np.float32)
        mine = update(peer, number, 0.0, bases[peer])
        mine.values = -np.float32(rate) * gradient
        held.correct(mine, correction)
        held.judge(0.0, mine, rule, 1)  # of a crew of one: each step is whole
        model = model - np.float32(rate) * compensated(gradient, model, backup[peer], strength)
        backup[peer], bases[peer] = model, held.version
        held.give(peer)
        assert held.values is not None
        np.testing.assert_allclose(held.values, model, rtol=1e-4, atol=1e-5)


def test_what_is_not_known_for_sure_is_not_compensated() -> None:
    correction = Compensation(1.0, lambda: 0.1)
    held = block()
    held.give(1)
    old = held.version
    held.judge(0.0, update(2, 0, 1.0, held.version), Judged(Asynchronous()), 1)

    def corrected(given_: Update, by: Compensation = correction) -> bool:
        before = given_.values.copy()
        held.correct(given_, by)
        return not np.array_equal(before, given_.values)

    assert corrected(update(1, 0, 1.0, old))
    assert corrected(update(1, 0, 1.0, old, got=1))
    assert not corrected(update(1, 0, 1.0, held.version))  # it is not stale
    assert not corrected(update(3, 0, 1.0, old))  # nothing was sent to it
    mixed = update(1, 0, 1.0, old)
    mixed.top = held.version
    assert not corrected(mixed)
    assert not corrected(update(1, 0, 1e30, old))  # it would not be finite
    assert not corrected(update(1, 0, 1.0, old), Compensation(1.0, lambda: 0.0))
    held.forget(1)
    assert not corrected(update(1, 0, 1.0, old))


def test_a_block_that_is_behind_at_a_barrier_goes_on_from_where_the_others_are() -> None:
    held, rule = block(), Judged(BackupWorkers(0))
    held.judge(0.0, update(1, 0, 2.0, held.version), rule, 3)
    ahead = update(2, 0, 1.0, held.version)
    ahead.lead = 3
    assert [a.peer for a in held.catch_up(ahead.clock)] == [1]
    assert wire.count_of(held.version) == 4
    assert held.catch_up(ahead.clock) == []
    assert held.judge(0.0, ahead, rule, 3) == []  # not stale
    assert held.values is not None
    np.testing.assert_allclose(held.values, 2.0)
