"""A central state without a master: what is counted, how often, and what becomes of it when owners die."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.types import Arm, Arrived, Average, Expired, Left, MessageKey, Noted, Run, Send
from ragtag.protocols.central.channel import HEADROOM, CentreNode, Sharing, centre
from ragtag.protocols.central.wire import ASK, COPY, HOLD, PULL, PUSH, STATE, TELL
from ragtag.protocols.channel.averager import Channel, Opening
from ragtag.protocols.channel.presence import Crew
from ragtag.protocols.rounds.base import NACK
from ragtag.schedules import Asynchronous, BackupWorkers, SoftSync
from ragtag.training.exchange.central import Judged
from tests.protocols.centres import STEP_S, TURNS, Centres, Each, comes, doubled, in_batches
from tests.protocols.harness import TINY, World

# -- What is counted


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_every_update_counts_once_however_lossy_the_line(loss: float) -> None:
    world = Centres(loss=loss)
    doubled(world)
    world.run()
    assert world.made == [TURNS] * 4
    state = world.settle()
    if loss == 0:
        assert (state == TURNS).all()
    else:  # repair gives up in the end; here it need not
        assert state.mean() > 0.95 * TURNS


def test_backup_workers_without_spare_are_synchronous_sgd() -> None:
    world = Centres(rule=Judged(BackupWorkers(0)), slow={3: 4.0}).run()
    for outcomes in world.outcomes:
        assert [outcome.stale for outcome in outcomes[1:]] == [(0,) * 9] * TURNS
        for turn, outcome in enumerate(outcomes):
            np.testing.assert_allclose(outcome.mean, turn / 4, rtol=1e-6)
        assert [set(o.heard.tolist()) for o in outcomes[1:]] == [{0b1111}] * TURNS


def test_spare_peers_are_not_waited_for_and_what_they_bring_late_is_dropped() -> None:
    world = Centres(rule=Judged(BackupWorkers(1)), slow={3: 20.0}, turns=40)
    world.run()
    fast = [o.total_s for o in world.outcomes[0][5:35]]
    assert max(fast) < 2 * STEP_S
    assert world.outcomes[0][30].mean[:, 3].max() == 0
    dropped = world.outcomes[3][1]
    assert not (dropped.heard >> np.uint64(3) & np.uint64(1)).any()
    assert min(dropped.stale or ()) > 0


def test_softsync_steps_after_every_c_updates_and_counts_staleness_by_block() -> None:
    world = Centres(rule=Judged(SoftSync(2, corrected=False)), turns=20).run()
    world.settle()
    assert {int(v) >> 6 for v in world.node(0).server.copies.versions} == {1 + 4 * 20 // 2}
    stale = [s for outcomes in world.outcomes for o in outcomes for s in o.stale or ()]
    assert 0.5 < np.mean(stale) < 4


def test_ringmaster_drops_what_is_too_old() -> None:
    world = Centres(rule=Judged(Asynchronous(discard_from=5)), slow={2: 10.0}, turns=20).run()
    first = world.outcomes[2][1]
    assert min(first.stale or ()) >= 5
    assert not (first.heard >> np.uint64(2) & np.uint64(1)).any()
    assert world.outcomes[0][15].mean[:, 2].max() == 0


def test_weights_count_within_a_step() -> None:
    world = World(2, _method(BackupWorkers(0)), 4)
    zeros = np.zeros((4, 4), np.float32)
    world.once([zeros, zeros])
    outcomes = world.once([zeros + 1, zeros + 4], [3.0, 1.0])
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.mean, (3 * 1 + 1 * 4) / 4)


def _method(schedule: BackupWorkers):  # type: ignore[no-untyped-def]
    from ragtag.training.exchange.central import Centre

    return Centre(schedule)


def test_one_peer_is_its_own_centre() -> None:
    world = Centres(1, Judged(Asynchronous())).run()
    assert [float(o.mean[0, 0]) for o in world.outcomes[0]] == list(range(TURNS + 1))
    assert not world.outcomes[0][-1].expired


# -- Owners that die


@pytest.mark.parametrize("told_s", [0.005, None])
@pytest.mark.parametrize("rule", [Each(), Judged(BackupWorkers(0)), Judged(SoftSync(2))], ids=str)
def test_a_dead_owners_blocks_go_on_from_the_newest_copy(rule: Each | Judged, told_s: float | None) -> None:
    world = Centres(rule=rule, gone={2: 0.055}, told_s=told_s, turns=20).run()
    assert all(len(world.outcomes[peer]) == 21 for peer in world.living)
    before = np.max([world.outcomes[peer][2].mean for peer in world.living], axis=0)
    state = world.settle()
    assert (state[:, world.living] >= before[:, world.living]).all()
    assert world.noted("central state rebuilt")
    if isinstance(rule, Each):
        assert (
            state[:, world.living] > 20 - 6
        ).all()  # what was under way when it died, and until it was known


def test_each_peer_is_told_once_which_owner_is_silent_and_what_that_leaves_as_it_is() -> None:
    world = Centres(gone={2: 0.055}, turns=20).run()
    told = [(peer, note) for peer, note in world.notes if note.what == "owner silent"]
    assert sorted(peer for peer, _ in told) == world.living
    assert {(note.peer, note.detail) for _, note in told} == {(2, "2 blocks keep own values")}


def test_a_barrier_does_not_wait_for_the_dead_for_ever() -> None:
    world = Centres(rule=Judged(BackupWorkers(0)), gone={1: 0.05}, turns=20).run()
    assert world.noted("barrier ended")
    tail = [o.total_s for o in world.outcomes[0][-8:]]
    assert max(tail) < 3 * STEP_S


def test_what_an_owner_took_in_is_lost_with_it_and_peers_take_the_block_anew_at_once() -> None:
    """Told in mid-turn, peers ask the next owner before their deadline."""
    world = Centres(gone={2: 0.0301}, told_s=0.004, turns=3).run()
    for peer in world.living:
        assert len(world.outcomes[peer]) == 4
        assert not any(outcome.expired for outcome in world.outcomes[peer])


def test_a_peer_that_comes_back_behind_takes_up_the_newest() -> None:
    world = Centres(turns=30)
    world.frozen[1] = (0.05, 0.25)
    for other in (0, 2, 3):
        world.push(0.08, other, Left(1))
    comes(world, 1, 0.26)
    world.run()
    state = world.settle()
    assert (state[:, [0, 2, 3]] > 30 - 8).all()
    assert (state[:, 1] > 30 - 8).all()


@settings(max_examples=60)
@given(st.data())
def test_deaths_in_any_state(data: st.DataObject) -> None:
    """However peers die or stand still: nothing is counted twice, no version goes back (``Centres`` looks),
    and those who live go on, agree, and count what they do from then on.
    """
    n = data.draw(st.integers(2, 4))
    rule = data.draw(
        st.sampled_from([Each(), Judged(BackupWorkers(0)), Judged(SoftSync(1, corrected=False))])
    )
    loss = data.draw(st.sampled_from([0.0, 0.1, 0.3]))
    when = st.floats(0.0, 0.12)
    dead = data.draw(st.dictionaries(st.integers(1, n - 1), when, max_size=n - 1))
    told_s = data.draw(st.none() | st.floats(0.0, 0.05))
    world = Centres(
        n, rule, loss=loss, gone=dead, told_s=told_s, seed=data.draw(st.integers(0, 99)), n_chunks=5,
        slow={0: data.draw(st.sampled_from([1.0, 3.0]))},
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
    world.more(3)  # who was away is counted at barriers again
    before = world.settle()
    world.more(1 if not isinstance(rule, Judged) or rule.barrier else 4)
    after = world.settle()
    if isinstance(rule, Judged) and isinstance(rule.schedule, SoftSync):
        assert (after > before).any()  # what is kept for the next step is not in it yet
        return
    share = 1.0 if isinstance(rule, Each) else 1 / len(world.living)
    np.testing.assert_allclose((after - before)[:, world.living], share, atol=1e-4)


# -- Bad input


def test_updates_that_are_not_finite_are_refused_by_name() -> None:
    world = Centres(turns=0).run()
    world.made = [1] * 4
    for peer in range(4):
        values = world.outcomes[peer][-1].mean.copy()
        values[:, peer] += np.inf if peer == 1 else 1
        world.average(peer, values)
    world.run()
    refused = {note.peer for _, note in world.notes if note.what == "update refused"}
    assert refused == {1}
    state = world.settle()
    assert np.isfinite(state).all()
    assert (state[:, [0, 2, 3]] == 1).all()


def test_asking_twice_at_once_or_for_another_shape_is_an_error() -> None:
    node = _alone_of(3)
    zeros = np.zeros((5, TINY.elements), np.float32)
    node.step(0.0, Average(0, zeros, 1.0))
    with pytest.raises(RuntimeError, match="one at a time"):
        node.step(0.0, Average(0, zeros, 1.0))
    with pytest.raises(ValueError, match="give contiguous float32"):
        _alone_of(3).step(0.0, Average(0, zeros[:3], 1.0))
    with pytest.raises(KeyError, match="channel 7"):
        _alone_of(3).step(0.0, Average(7, zeros, 1.0))


def test_what_has_been_found_is_not_looked_for_again() -> None:
    """A live peer takes many messages at once: the last answer about a block, and who asks for it."""
    one, other = Sharing(Each())(_setting(0, 2)), Sharing(Each())(_setting(1, 2))
    zeros = np.zeros((5, TINY.elements), np.float32)
    asked = [e.run for e in one.step(0.0, Average(0, zeros, 1.0)) if isinstance(e, Send)]
    pulls = [e.run for e in other.step(0.0, Average(0, zeros, 1.0)) if isinstance(e, Send)]
    told = [e for run in asked for e in other.step(0.001, Arrived((replace(run, peer=0),)))]
    tells = [e.run for e in told if isinstance(e, Send) and e.run.key.stage == TELL]
    mine = [run for run in pulls if run.key.stage == PULL]
    assert tells
    assert mine
    effects = one.step(0.002, Arrived([replace(run, peer=1) for run in (*tells, *mine)]))
    assert not [e for e in effects if isinstance(e, Send) and e.run.key.stage == ASK]
    assert [e.what for e in effects if isinstance(e, Noted)] == ["central state founded"]


@pytest.mark.parametrize("rtt_s", [0.004, 0.02])
def test_lost_chunks_are_asked_for_at_the_pace_of_the_way_while_there_is_time(rtt_s: float) -> None:
    """By the owner of an update: each round trip as measured now, twice as late each time. It judges what it
    has when the update has had all its time, not after some number of requests.
    """
    setting = _setting(0, 2)
    owner = Sharing(Each())(setting)
    owner.probed(0.4)  # a turn may take HEADROOM times that
    setting.crew.rtt_s[1] = rtt_s
    block = next(b for b in range(owner.layout.n_blocks) if owner.owners[b] == 0)
    asked, now_s = [], 1.0
    holes = Run(
        1, MessageKey(0, 1, PUSH, block), 0, 1, np.zeros((0, 4 * TINY.elements), np.uint8),
        np.zeros(0, np.float32), np.zeros(0, np.uint64), ended=True,
    )  # fmt: skip
    effects = owner.step(now_s, Arrived([holes]))
    while any(isinstance(e, Send) and e.run.key.stage == PUSH | NACK for e in effects):
        asked.append(now_s)
        arm = next(e for e in effects if isinstance(e, Arm) and e.timer.name.startswith("hole"))
        now_s = arm.at_s
        effects = owner.step(now_s, Expired(arm.timer))
    assert asked == pytest.approx([1.0 + rtt_s * (2**i - 1) for i in range(len(asked))])
    assert now_s == pytest.approx(1.0 + 0.4 * HEADROOM)
    assert 2 * (asked[-1] - 1.0) + rtt_s > now_s - 1.0  # no later one was due before


def test_a_peer_asks_for_the_rest_of_an_answer_at_the_pace_of_the_way() -> None:
    """Not at that of a round trip when the channel was opened, and twice as late each time."""
    setting = _setting(0, 2)
    peer = Sharing(Each())(setting)
    peer.probed(0.4)
    setting.crew.rtt_s[1] = 0.004
    peer.step(1.0, Average(0, np.zeros((5, TINY.elements), np.float32), 1.0))
    block = next(b for b in range(peer.layout.n_blocks) if peer.owners[b] == 1)
    answer = Run(
        1, MessageKey(0, 1 << 6, STATE, block), 0, 1, np.zeros((0, 4 * TINY.elements), np.uint8),
        np.zeros(0, np.float32), np.zeros(0, np.uint64), ended=True,
    )  # fmt: skip
    now_s, asked = 1.0, []
    effects = peer.step(now_s, Arrived([answer]))
    for _ in range(4):
        assert [e.run.key.stage for e in effects if isinstance(e, Send)] == [STATE | NACK]
        asked.append(now_s)
        arm = next(e for e in effects if isinstance(e, Arm))
        now_s = arm.at_s
        effects = peer.step(now_s, Expired(arm.timer))
    assert asked == pytest.approx([1.0, 1.004, 1.012, 1.028])


def _setting(me: int, n: int) -> Opening:
    return Opening(0, Channel(centre("each", Each()), TINY, 5, 0.1, 0.01), Crew(me, n, 1))


def _alone_of(n: int) -> CentreNode:
    return Sharing(Each())(_setting(0, n))


def _stray(
    peer: int, stage: int, round_: int, block: int, first: int, total: int, k: int, weight: float, heard: int,
    fill: int, ended: bool,
) -> Run:  # fmt: skip
    small = stage & NACK or stage == HOLD or PULL <= stage < COPY
    return Run(
        peer, MessageKey(0, round_, stage, block), first, total,
        np.full((k, 1088 if small else 4 * TINY.elements), fill, np.uint8), np.full(k, weight, np.float32),
        np.full(k, heard, np.uint64), ended=ended,
    )  # fmt: skip


STRAYS = st.builds(
    _stray,
    peer=st.integers(0, 5),
    stage=st.integers(PUSH, HOLD + 1) | st.integers(0, 255),
    round_=st.integers(0, 4) | st.integers(0, 2**32 - 1),
    block=st.integers(0, 6) | st.integers(0, 2**16 - 1),
    first=st.integers(0, 3),
    total=st.integers(0, 4) | st.just(1),
    k=st.integers(0, 3),
    weight=st.sampled_from([0.0, 1.0, 65536.0, 131072.0, 1e30]),
    heard=st.sampled_from([0, 1, 64, 65, 2**63]),
    fill=st.sampled_from([0, 1, 0x7F, 0xFF]),
    ended=st.booleans(),
)


@settings(max_examples=200)
@given(st.lists(st.lists(STRAYS, max_size=12), min_size=1, max_size=4))
def test_no_sequence_of_runs_raises(turns: list[list[Run]]) -> None:
    """Any runs that a peer could send, sensible or not: nothing is raised, versions stay in their order."""
    node, zeros = _alone_of(4), np.zeros((5, TINY.elements), np.float32)
    for at, runs in enumerate(turns):
        if node.active is None:
            node.step(float(at), Average(0, zeros, 1.0))
        before = node.server.copies.versions.copy()
        for run in runs:
            node.step(float(at), Arrived((run,)))
        assert (node.server.copies.versions >= before).all()
