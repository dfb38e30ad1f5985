from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ragtag.core.faults import Crash, Faults, Freeze, Loss, OneWay
from ragtag.core.seed import generator, mix
from ragtag.core.types import (
    Arm,
    Arrived,
    Average,
    Done,
    Effect,
    Expired,
    Left,
    MessageKey,
    Noted,
    Outcome,
    Run,
    Send,
    Timer,
)
from ragtag.protocols.channel.far_rounds import CATCH_UP
from ragtag.protocols.groups.channel import GroupNode, Moshpit, RandomGroups
from ragtag.protocols.groups.grid import Grid
from ragtag.protocols.groups.group import Group
from ragtag.protocols.groups.host import (
    ANNOUNCE,
    BEHIND,
    MET,
    ROSTER,
    WAIT,
    Announcement,
    Roster,
    encode_announce,
    encode_roster,
    encode_wait,
)
from ragtag.protocols.groups.keys import MoshpitKeys, Place, RandomKeys, View
from ragtag.protocols.groups.machine import EARLY_MAX
from ragtag.protocols.rounds.asking import ANSWER, HERE, NEVER, question
from ragtag.protocols.rounds.base import SCATTER, blob_message
from tests.protocols.group_crews import RTT_S, GroupCrew, Make, channel


def moshpit(group: int = 8, grid: Grid | None = None, *, n_chunks: int = 4, repair: bool = False) -> Make:
    return lambda me, view: GroupNode(
        me, view, 0, MoshpitKeys(me, 0, group, grid), channel(n_chunks), repair=repair
    )


def random_groups(group: int = 8) -> Make:
    return lambda me, view: GroupNode(me, view, 0, RandomKeys(me, 0, group), channel())


def whole(outcome: Outcome) -> bool:
    return bool((outcome.heard == (1 << len(outcome.members)) - 1).all())


@pytest.mark.parametrize(("n", "group"), [(16, 4), (64, 8), (125, 5), (60, 8), (5, 8), (100, 10)])
def test_a_full_grid_averages_exactly_after_d_rounds(n: int, group: int) -> None:
    crew = GroupCrew(n, moshpit(group), rounds=3).run()
    grid = crew.nodes[0].inner.keys.grid  # type: ignore[attr-defined]
    if grid.cells == n:
        means = np.stack(crew.values)
        assert np.allclose(means, crew.start.mean(axis=0), atol=1e-5)
    assert all(len(outcomes) == 3 for outcomes in crew.outcomes.values())
    assert crew.variance() < (1e-12 if grid.cells == n else 1e-3)


def test_a_crew_of_one_and_of_two() -> None:
    (outcomes,) = GroupCrew(1, moshpit(), rounds=2).run().outcomes.values()
    assert [o.averaged.any() for o in outcomes] == [False, False]
    crew = GroupCrew(2, moshpit(), rounds=1).run()
    assert crew.variance() < 1e-12


def test_random_groups_mix_and_differ_from_round_to_round() -> None:
    crew = GroupCrew(64, random_groups(), rounds=4).run()
    members = {o.members for o in crew.outcomes[0]}
    assert len(members) == 4 and all(len(m) == 8 for m in members)
    assert crew.variance() < 3e-3


def test_weights_count() -> None:
    crew = GroupCrew(4, moshpit(4), rounds=1, weight=float).run()
    assert np.allclose(np.stack(crew.values), np.average(crew.start, axis=0, weights=range(4)), atol=1e-5)


@pytest.mark.parametrize("p", [0.02, 0.2])
@pytest.mark.parametrize("repair", [False, True])
def test_with_datagrams_lost_every_round_ends_in_time_and_means_are_what_they_say(
    p: float, repair: bool
) -> None:
    faults = Faults(loss=Loss(p), latency_s=RTT_S / 2, jitter_s=0.001, duplicate=0.05, reorder=0.05)
    met = []
    for seed in range(4):
        make = moshpit(8, n_chunks=9, repair=repair)
        crew = GroupCrew(32, make, rounds=6, n_chunks=9, faults=faults, seed=seed).run()
        assert all(len(outcomes) == 6 for outcomes in crew.outcomes.values())
        assert crew.variance() < (0.05 if p < 0.1 else 0.2)
        met += [len(o.members) > 1 for outcomes in crew.outcomes.values() for o in outcomes]
    if p < 0.1:  # of single crews with six rounds, between .91 and 1
        assert np.mean(met) > 0.94


def test_repair_asks_for_what_is_lost() -> None:
    faults = Faults(loss=Loss(0.05), latency_s=RTT_S / 2)
    lacking = []
    for repair in (False, True):
        make, some = moshpit(8, n_chunks=40, repair=repair), []
        for seed in range(8):
            crew = GroupCrew(16, make, rounds=4, n_chunks=40, faults=faults, seed=seed).run()
            some += [o for outcomes in crew.outcomes.values() for o in outcomes if len(o.members) > 1]
        lacking.append(np.mean([o.heard != (1 << len(o.members)) - 1 for o in some]))
    assert lacking[1] < 0.6 * lacking[0]  # the rest is of members that were missed altogether


def test_a_death_in_mid_round_costs_its_chunks_and_is_said() -> None:
    # announce 0.01, roster 0.02, scatter 0.03: then the owner of one chunk in four is dead
    faults = Faults(latency_s=RTT_S / 2, crashes=(Crash(3, 0.025),))
    crew = GroupCrew(4, moshpit(4), rounds=1, faults=faults).run()
    assert len(crew.outcomes[3]) == 0
    for peer in (0, 1, 2):
        (outcome,) = crew.outcomes[peer]
        assert outcome.expired and outcome.missed == (3,)
        assert outcome.averaged.sum() == 3 and len(set(outcome.heard.tolist())) == 2
        assert np.array_equal(outcome.mean[~outcome.averaged], crew.start[peer][~outcome.averaged])
        assert np.allclose(
            outcome.mean[outcome.averaged], crew.start.mean(axis=0)[outcome.averaged], atol=1e-6
        )


@pytest.mark.parametrize("at_s", [0.0, 0.005, 0.012, 0.018, 0.022, 0.028, 0.032])
def test_a_death_at_any_moment_leaves_nobody_waiting_and_once_it_is_known_all_agree(at_s: float) -> None:
    dead = (2, 7, 11)
    faults = Faults(latency_s=RTT_S / 2, crashes=tuple(Crash(p, at_s) for p in dead))
    crew = GroupCrew(16, moshpit(4), rounds=20, faults=faults)
    alive = [p for p in range(16) if p not in dead]
    for peer in alive:
        for other in dead:  # membership finds out
            crew.world.at(0.3, peer, Left(other))
    crew.run()
    assert all(len(crew.outcomes[p]) == 20 for p in alive)
    assert np.var(np.stack([crew.values[p] for p in alive]), axis=0).mean() < 1e-3
    late = [o for p in alive for o in crew.outcomes[p] if 8 <= o.round < 16]
    assert np.mean([o.averaged.all() for o in late]) > 0.6  # some fall behind, and find back round by round
    assert not {member for o in late for member in o.members} & set(dead)


def test_the_next_host_is_asked_where_one_is_dead() -> None:
    view = View(range(8))
    key = MoshpitKeys(0, 0, 8).place(0, view).key
    host = view.hosts(mix(key), 1)[0]
    faults = Faults(latency_s=RTT_S / 2, crashes=(Crash(host, 0.0),))
    crew = GroupCrew(8, moshpit(8), rounds=1, faults=faults).run()
    for peer in set(range(8)) - {host}:
        (outcome,) = crew.outcomes[peer]
        assert len(outcome.members) == 7 and whole(outcome)


def test_where_nobody_answers_the_round_fails_in_time_and_the_key_stays_with_the_cell() -> None:
    cut = tuple(OneWay(0, other) for other in range(1, 16))
    crew = GroupCrew(16, moshpit(4), rounds=3, faults=Faults(latency_s=RTT_S / 2, one_way=cut)).run()
    assert len(crew.outcomes[0]) == 3
    assert np.array_equal(crew.values[0], crew.start[0])
    assert {note.what for peer, note in crew.notes if peer == 0} & {"no host", "no roster"}
    others = [bool(o.averaged.all()) for p in range(1, 16) for o in crew.outcomes[p]]
    assert np.mean(others) > 0.7


@pytest.mark.parametrize("from_s", [0.01, 0.03, 0.05, 0.07])
def test_a_frozen_peer_comes_back_into_the_round_that_the_others_are_in(from_s: float) -> None:
    """Where its group has met a moment before it comes, or others go ahead, in one or two rounds more."""
    faults = Faults(latency_s=RTT_S / 2, freezes=(Freeze(3, from_s, 1.0),))
    crew = GroupCrew(16, moshpit(4), rounds=30, faults=faults).run()
    last = crew.outcomes[3][-1]
    back = next(i for i, o in enumerate(crew.outcomes[3]) if o.started_s + o.total_s > 1.0 + from_s) + 1
    assert len(crew.outcomes[3]) == 30 and any(o.averaged.all() for o in crew.outcomes[3][back : back + 3])
    assert sum(bool(o.averaged.all()) for o in crew.outcomes[3][back : back + 19]) >= 15
    assert last.round >= 30 and "skipped" in {note.what for peer, note in crew.notes if peer == 3}


@pytest.mark.parametrize("for_s", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("make", [moshpit(4), random_groups(4)])
def test_a_freeze_of_any_peer_at_any_moment_breaks_nothing(make: Make, for_s: float) -> None:
    """Its timers are overdue when it reads what has come, a host's as well."""
    for seed in range(8):
        draw = generator(seed, "freezes")
        freezes = tuple(Freeze(p, float(draw.uniform(0, 0.5)), for_s) for p in range(0, 12, 2))
        faults = Faults(latency_s=RTT_S / 2, freezes=freezes)
        crew = GroupCrew(12, make, rounds=15, faults=faults, seed=seed).run()
        assert all(len(crew.outcomes[p]) == 15 for p in range(12))


def test_after_a_probe_nothing_is_waited_for_as_long_as_what_was_known_before_it() -> None:
    """A live crew opens a channel before it is probed: its deadlines are those of the join until then."""

    def probed_later(me: int, view: View) -> GroupNode:
        node = GroupNode(me, view, 0, MoshpitKeys(me, 0, 4), replace(channel(), probe_s=60.0))
        node.probed(channel().probe_s)
        return node

    some_die = Faults(latency_s=RTT_S / 2, crashes=(Crash(9, 0.0),))
    crews = [GroupCrew(10, by, faults=some_die).run() for by in (moshpit(4), probed_later)]
    took = [
        {peer: [outcome.total_s for outcome in each] for peer, each in crew.outcomes.items()}
        for crew in crews
    ]
    assert took[0] == took[1] and any(took[0].values())


def test_peers_that_begin_at_different_times_meet_all_the_same() -> None:
    crew = GroupCrew(16, moshpit(4), rounds=12, start_s=lambda peer: 0.002 * peer).run()
    outcomes = [o for p in range(16) for o in crew.outcomes[p] if o.round < 10]
    assert all(len(o.members) == 4 and whole(o) for o in outcomes)


def test_a_peer_that_leaves_is_not_waited_for() -> None:
    crew = GroupCrew(4, moshpit(4), rounds=1, faults=Faults(latency_s=RTT_S / 2, crashes=(Crash(3, 0.021),)))
    for peer in range(3):
        crew.world.at(0.031, peer, Left(3))
    crew.run()
    for peer in range(3):
        (outcome,) = crew.outcomes[peer]
        assert outcome.total_s < 0.05 and len(crew.nodes[peer].inner.view) == 3


def test_skipping_gives_up_the_round_and_the_next_is_met() -> None:
    node = moshpit(4)(0, View(range(4)))
    node.step(0.0, Average(0, np.zeros((4, 272), np.float32), 1.0))
    assert node.active == 0
    node.step(0.0, Arrived((blob_message(1, MessageKey(0, 5, SCATTER, 0), b"\0"),)))
    assert node.highest == 5
    node.skip()
    assert node.active is None and node.done == 0
    node.skip()
    assert node.done == 5


def test_a_peer_that_hears_of_a_later_round_looks_for_a_group_of_that_and_says_so() -> None:
    node, host, _ = searching(next(m for m in range(4) if m != host_of(4)))
    effects = node.step(0.01, Arrived((blob_message(host, MessageKey(0, 5, BEHIND, 0), b"\0"),)))
    assert [e for e in effects if isinstance(e, Noted)] == [Noted("skipped", node.me, "to round 5")]
    assert node.active == 5 and {e.run.key.round for e in effects if isinstance(e, Send)} == {5}


def test_who_is_asked_whether_it_is_there_answers_whatever_it_does() -> None:
    crew = GroupCrew(4, moshpit(4), rounds=1).run()
    for number, stage in ((0, NEVER), (1, HERE), (5, HERE)):
        asked = question(1, MessageKey(0, number, SCATTER, 7 << 6))
        (answer,) = crew.nodes[0].inner.step(1.0, Arrived((asked,)))
        assert isinstance(answer, Send)
        assert answer.run.peer == 1 and answer.run.key == MessageKey(0, number, stage, 7 << 6)
        assert answer.deadline_s == pytest.approx(1.0 + ANSWER * RTT_S)
        assert crew.nodes[0].inner.step(1.0, Arrived((answer.run,))) == []


def searching(me: int, n: int = 4) -> tuple[GroupNode, int, Place]:
    """A peer that has announced itself at a host, which has said that it waits 50 ms; who, and where."""
    view = View(range(n))
    node = random_groups(n)(me, view)
    assert isinstance(node, GroupNode)
    (send, _) = node.step(0.0, Average(0, np.zeros((4, 272), np.float32), 1.0))
    assert isinstance(send, Send)
    return node, send.run.peer, node.keys.place(0, view)


def from_host(node: GroupNode, stage: int, blob: bytes, host: int, now_s: float) -> list[Effect]:
    return node.step(now_s, Arrived((blob_message(host, MessageKey(0, 0, stage, 0), blob),)))


def test_a_member_that_is_told_again_to_wait_waits() -> None:
    """Its group is held open for one that was sent on, of which it has not heard."""
    node, host, place = searching(next(m for m in range(4) if m != host_of(4)))
    (first,) = from_host(node, WAIT, encode_wait(place.key, 0.05), host, 0.02)
    assert isinstance(first, Arm)
    effects = node.step(first.at_s, Expired(first.timer))
    assert [e.run.key.stage for e in effects if isinstance(e, Send)] == [ANNOUNCE]
    (reminded,) = [e for e in effects if isinstance(e, Arm)]
    (longer,) = from_host(node, WAIT, encode_wait(place.key, 0.05), host, first.at_s + 0.01)
    assert isinstance(longer, Arm) and longer.at_s > reminded.at_s
    assert node.step(reminded.at_s, Expired(reminded.timer)) == []
    now_s, timer, said = longer.at_s, longer, []
    for _ in range(20):  # but not for ever
        effects = node.step(now_s, Expired(timer.timer))
        said += [e.what for e in effects if isinstance(e, Noted)]
        if said:
            break
        (timer,) = from_host(node, WAIT, encode_wait(place.key, 0.05), host, now_s + 0.01)  # type: ignore[assignment]
        now_s = timer.at_s
    assert said == ["no roster"] and now_s < node.deadline_s()


def test_a_host_that_waits_for_a_second_member_as_long_as_this_peer_would_is_believed() -> None:
    """That is as long as the longest of late, though it usually waits for less."""
    node, host, place = searching(next(m for m in range(4) if m != host_of(4)))
    for apart_s in (5.0, *(20 * [0.001])):
        node._host.wait.completed(apart_s)
    wait_s = node._host.alone_s()
    assert wait_s > 5.0 > 20 * node.wait_s()
    (until,) = from_host(node, WAIT, encode_wait(place.key, wait_s), host, 0.02)
    assert isinstance(until, Arm) and 0.02 + wait_s < until.at_s < node.deadline_s()


def test_a_member_that_is_no_host_has_no_say_in_anothers_search() -> None:
    node, host, place = searching(next(m for m in range(4) if m != host_of(4)))
    other = min({0, 1, 2, 3} - {node.me, host})
    pair = encode_roster(Roster(place.key, (node.me, other), (0, 1)))
    for stage, blob in ((MET, b"\0"), (WAIT, encode_wait(place.key, 9.0)), (ROSTER, pair)):
        assert from_host(node, stage, blob, other, 0.01) == []
        search = node._search
        assert node.active == 0 and search is not None and not search.answered
    quick = blob_message(other, MessageKey(0, 0, WAIT, 1), encode_wait(place.key, 0.05))
    node.step(1e-6, Arrived((quick,)))
    assert node._answer.typical_s() == RTT_S, "and answers for no host"
    own = encode_roster(Roster(place.key, (node.me, host), (0, 1)))
    effects = from_host(node, ROSTER, own, host, 0.02)
    assert {e.run.peer for e in effects if isinstance(e, Send)} == {host}


def test_a_peer_that_sends_much_too_early_pushes_out_its_own() -> None:
    node = moshpit(4)(0, View(range(4)))
    early = [blob_message(peer, MessageKey(0, 5, SCATTER, at), b"\0") for peer in (1, 2) for at in range(9)]
    flood = [blob_message(3, MessageKey(0, 5, SCATTER, at), b"\0") for at in range(2 * EARLY_MAX)]
    node.step(0.0, Arrived((*early, *flood)))
    kept = [run.peer for run in node._early]
    assert len(kept) == EARLY_MAX and [kept.count(peer) for peer in (1, 2)] == [9, 9]


def test_what_came_too_early_is_kept_though_its_buffer_is_used_again() -> None:
    node = moshpit(4)(0, View(range(4)))
    told = blob_message(1, MessageKey(0, 5, SCATTER, 0), b"\7")
    parts = [np.array(part) for part in (told.payload, told.weight, told.heard, np.ones(1, np.bool_))]
    payload, weight, heard, mask = parts
    node.step(0.0, Arrived((replace(told, payload=payload, weight=weight, heard=heard, mask=mask),)))
    before = [part.copy() for part in parts]
    for part in parts:
        part[:] = part == 0
    (kept,) = node._early
    for was, part in zip(before, (kept.payload, kept.weight, kept.heard, kept.mask), strict=True):
        np.testing.assert_array_equal(part, was)


def host_of(n: int) -> int:
    """Where the only group of a crew meets first."""
    view = View(range(n))
    return view.hosts(mix(RandomKeys(0, 0, n).place(0, view).key), 1)[0]


def test_nonsense_is_refused() -> None:
    node = moshpit(4)(0, View(range(4)))
    with pytest.raises(ValueError, match="contiguous float32"):
        node.step(0.0, Average(0, np.zeros((3, 272), np.float32), 1.0))
    with pytest.raises(KeyError, match="channel 5"):
        node.step(0.0, Average(5, np.zeros((4, 272), np.float32), 1.0))
    node.step(0.0, Average(0, np.zeros((4, 272), np.float32), 1.0))
    with pytest.raises(RuntimeError, match="one at a time"):
        node.step(0.0, Average(0, np.zeros((4, 272), np.float32), 1.0))
    with pytest.raises(ValueError, match="own view"):
        moshpit(4)(9, View(range(4)))


def test_a_run_of_one_seed_is_the_same_every_time() -> None:
    faults = Faults(loss=Loss(0.1), latency_s=RTT_S / 2, jitter_s=0.002)
    digests = {
        GroupCrew(24, moshpit(5), rounds=3, faults=faults, seed=9).run().world.digest() for _ in range(2)
    }
    assert len(digests) == 1


# -- Finding each other again


@pytest.mark.parametrize("make", [moshpit, random_groups])
@pytest.mark.parametrize("jitter", [0.5, 2.0])
def test_answers_that_come_later_than_expected_keep_nobody_alone(
    make: Callable[[int], Make], jitter: float
) -> None:
    """Half a round trip, or two, at random on each way. A late answer was taken for a quick one to a later
    announcement: deadlines stayed below the round trip, and half of all rounds were spent alone.
    """
    faults = Faults(latency_s=RTT_S / 2, jitter_s=RTT_S / 2 * jitter)
    crew = GroupCrew(16, make(4), rounds=30, faults=faults).run()
    outcomes = [o for p in range(16) for o in crew.outcomes[p]]
    assert np.mean([len(o.members) > 1 for o in outcomes]) > 0.95
    assert np.mean([o.averaged.all() for o in outcomes]) > 0.9


def test_round_trips_are_measured_from_the_announcement_that_is_answered() -> None:
    node, host, place = searching(next(m for m in range(4) if m != host_of(4)))
    began = node._answer.budget_s()
    for name in ("answer/1", "answer/2", "answer/3"):  # three more announcements; then the first is answered
        node.step(began, Expired(Timer(0, 0, name)))
    late = blob_message(host, MessageKey(0, 0, WAIT, 1), encode_wait(place.key, 0.05))
    node.step(1.2 * began, Arrived((late,)))
    assert node._answer.typical_s() == pytest.approx(1.2 * began)
    node.step(2.0 * began, Arrived((late,)))  # once
    assert node._answer.typical_s() == pytest.approx(1.2 * began)
    node.step(
        9.0 * began, Arrived((blob_message(host, MessageKey(0, 0, WAIT, 9), b"\0" * 12),))
    )  # none of its own
    assert node._answer.typical_s() == pytest.approx(1.2 * began)


def pauses(late_s: float, make: Make, n: int = 4) -> GroupCrew:
    """All compute a second, and average in 50 ms; the last one begins ``late_s`` after the others."""
    crew = GroupCrew(n, make, rounds=10, start_s=lambda peer: late_s * (peer == n - 1))
    ask = crew.ask
    crew.ask = lambda peer, at_s, weight=None: ask(peer, at_s + 1.0, weight)  # type: ignore[method-assign]
    return crew.run()


@pytest.mark.parametrize("make", [moshpit(4), random_groups(4)])
@pytest.mark.parametrize("late_s", [0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_who_is_out_of_step_meets_the_others_in_a_few_rounds(make: Make, late_s: float) -> None:
    """Late by most of a step is late by as much for the next round, too; and early is early again."""
    crew = pauses(late_s, make)
    assert len(crew.outcomes[3][0].members) == 1
    for peer in range(4):  # in the last round the three others are done, where the fourth has skipped one
        sizes = [len(o.members) for o in crew.outcomes[peer] if 3 <= o.round < 9]
        assert len(sizes) >= 5 and set(sizes) == {4}


def test_a_host_that_waits_longer_than_one_believes_is_believed_in_a_later_round() -> None:
    """It has learned that members come far apart; who never waits for the roster never learns that."""
    view = View(range(4))
    place = MoshpitKeys(0, 0, 4).place(0, view)  # of one cell: everybody's, in each round
    host = view.hosts(mix(place.key), 1)[0]
    node = moshpit(4)((host + 1) % 4, view)
    at_s, waits = 0.0, []
    for number in range(8):
        node.step(at_s, Average(0, np.zeros((4, 272), np.float32), 1.0))
        wait = blob_message(host, MessageKey(0, number, WAIT, 1), encode_wait(place.key, 60.0))
        (until,) = node.step(at_s, Arrived((wait,)))
        assert isinstance(until, Arm)
        waits.append(until.at_s - at_s)
        effects = node.step(until.at_s, Expired(until.timer))
        assert [e.what for e in effects if isinstance(e, Noted)] == ["no roster"]
        at_s = until.at_s + 1.0
    believed = [waits[0] * min(2**number, 64) for number in range(8)]
    # one that has met nobody for a while waits for as long as it computes, too
    longer = [wait - least for wait, least in zip(waits, believed, strict=True)]
    assert all(extra == pytest.approx(0.0) or extra == pytest.approx(1.0) for extra in longer)


def test_what_goes_first_in_a_round_goes_first_in_a_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and answers of repairs do, before whole messages that wait for a slow line."""
    group = Group(7, 2, Roster(5, (3, 7, 9), (0, 1, 2), 0.25), channel(), None)
    rows = np.zeros((1, 8), np.uint8)
    run = Run(
        2, MessageKey(0, 2, 1, 0), 0, 1, rows, np.ones(1, np.float32), np.ones(1, np.uint64), None, True
    )
    monkeypatch.setattr(group, "machine", SimpleNamespace(step=lambda now_s, event: [Send(run, 1.0, True)]))
    (sent,) = group.expire(0.0, Timer(0, 2, "repair"))
    assert isinstance(sent, Send) and sent.run.peer == 9 and sent.first


def test_what_is_noted_in_a_group_names_the_peer_of_the_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(7, 2, Roster(5, (3, 7, 9), (0, 1, 2), 0.25), channel(), None)
    noted = SimpleNamespace(step=lambda now_s, event: [Noted("unsound", 2, "why")])
    monkeypatch.setattr(group, "machine", noted)
    assert group.expire(0.0, Timer(0, 2, "repair")) == [Noted("unsound", 9, "why")]


@pytest.mark.parametrize(
    ("peer", "blob"),
    [(1, b""), (1, bytes(64)), (9, encode_announce(Announcement(5, 0, 4)))],
    ids=["of nothing", "for no peers", "of no member"],
)
def test_an_announcement_that_makes_no_sense_is_not_answered(peer: int, blob: bytes) -> None:
    node = moshpit(4)(0, View(range(4)))
    assert node.step(0.0, Arrived((blob_message(peer, MessageKey(0, 0, ANNOUNCE, 0), blob),))) == []
    good = encode_announce(Announcement(5, 0, 4))
    assert node.step(0.0, Arrived((blob_message(1, MessageKey(0, 0, ANNOUNCE, 0), good),))) != []


def test_one_that_is_late_is_alone_twice_and_waits_in_its_third_round() -> None:
    """After that it is counted anew, and a group that it meets takes a tenth of the count away."""
    node, host, _ = searching(next(m for m in range(4) if m != host_of(4)))
    effects = from_host(node, MET, b"\0", host, 0.01)
    assert [e for e in effects if isinstance(e, Noted)] == [Noted("late", node.me, "round 0")]
    (alone,) = [e.outcome for e in effects if isinstance(e, Done)]
    counts = [node._lonely]
    for members in ((node.me,), (node.me,), (node.me,), (node.me, host)):
        node._ask, node.active = Average(0, np.zeros((4, 272), np.float32), 1.0), node.done + 1
        node._finish(1.0, replace(alone, round=node.active, members=members))
        counts.append(node._lonely)
    assert counts == pytest.approx([1.0, 2.0, 0.0, 1.0, 0.9])


def test_averagers_are_written_as_a_user_writes_them() -> None:
    assert [repr(Moshpit(4)), repr(Moshpit(4, repair=False)), repr(RandomGroups(4))] == [
        "Moshpit(group=4)",
        "Moshpit(group=4, repair=False)",
        "RandomGroups(group=4)",
    ]


def test_one_that_tells_far_rounds_time_and_again_has_nobody_skip_to_each() -> None:
    """It may have been alone, but not again and again; what two tell, or the only other one, is believed."""

    def tell(node: GroupNode, peer: int, number: int) -> None:
        node.step(0.0, Arrived((blob_message(peer, MessageKey(0, number, SCATTER, 0), b"\0"),)))

    node, pair = (moshpit(4)(0, View(range(n))) for n in (4, 2))
    assert isinstance(node, GroupNode) and isinstance(pair, GroupNode)
    node.resume(0)
    pair.resume(0)
    tell(node, 3, 1000)
    for number in (1 << 20, 1 << 21, 1000 + 2 * CATCH_UP):
        tell(node, 3, number)
    assert node.highest == 1000
    tell(node, 2, 5000)
    assert node.highest == 5000, "an honest one and that"
    for number in (1000, 1 << 20):
        tell(pair, 1, number)
        assert pair.highest == number
