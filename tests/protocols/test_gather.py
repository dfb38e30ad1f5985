"""Rows of all peers to all peers, through owners."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core.seed import generator
from ragtag.core.types import Average, Bytes, Joined, Offer, Outcome, Run
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.node import Channel, Node
from ragtag.protocols.rounds.gather import gather, nothing_gathered
from tests.protocols.harness import TINY, World

MOST = 12


def rows_of(peer: int, round_: int, count: int) -> Bytes:
    """Rows that no other peer or round has."""
    rows = generator(3, "rows", peer, round_).integers(0, 256, (count, CHUNK_BYTES), np.uint8)
    rows[:, 0], rows[:, 1] = peer, round_
    return rows


def offered(world: World, counts: list[list[int]], weights: list[float] | None = None) -> World:
    """Peer p offers ``counts[round][p]`` rows in each round, as soon as it has its last outcome."""

    def ask(peer: int, at: int, after_s: float) -> None:
        rows = rows_of(peer, at, counts[at][peer])
        weight = 1.0 if weights is None else weights[peer]
        world.push(world.now_s + after_s, peer, Offer(0, rows, weight))

    def again(peer: int, outcome: Outcome) -> None:
        if outcome.round + 1 < len(counts):
            ask(peer, outcome.round + 1, 0.001)

    world.on_done = again
    for peer in range(world.n):
        if peer not in world.dead:
            ask(peer, 0, 0.0)
    return world.run()


def applied(world: World, peer: int) -> dict[int, Counter[bytes]]:
    """All rows that a peer has had by its last outcome, by round."""
    found: dict[int, Counter[bytes]] = {}
    for outcome in world.outcomes[peer]:
        assert outcome.gathered is not None
        parts = [(outcome.round, outcome.gathered), *outcome.gathered.late]
        for number, part in parts:
            found.setdefault(number, Counter()).update(row.tobytes() for row in part.rows)
    return found


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_without_loss_everybody_has_all_rows_once(n: int) -> None:
    counts = [[(3 * peer + at) % (MOST + 1) for peer in range(n)] for at in range(4)]
    world = offered(World(n, gather, MOST), counts)
    for peer in range(n):
        found = applied(world, peer)
        for at in range(4):
            expected = Counter(row.tobytes() for p in range(n) for row in rows_of(p, at, counts[at][p]))
            assert found[at] == expected
        assert all(o.gathered is not None and o.gathered.whole.all() for o in world.outcomes[peer])
        assert not any(o.expired for o in world.outcomes[peer])
        assert all((o.heard == (1 << n) - 1).all() for o in world.outcomes[peer])


def test_rows_count_by_their_senders_share_of_all_weights() -> None:
    weights = [1.0, 2.0, 5.0]
    world = offered(World(3, gather, MOST), [[4, 4, 4]], weights)
    for outcomes in world.outcomes:
        part = outcomes[0].gathered
        assert part is not None
        assert part.factor == pytest.approx([weights[row[0]] / 8.0 for row in part.rows])


def test_who_has_no_weight_takes_and_gives_nothing() -> None:
    world = offered(World(3, gather, MOST), [[4, 4, 4]], [0.0, 1.0, 1.0])
    for outcomes in world.outcomes:
        part = outcomes[0].gathered
        assert part is not None
        assert sorted({int(row[0]) for row in part.rows}) == [1, 2]
        assert part.factor == pytest.approx([0.5] * 8)


def test_rows_of_one_that_hears_nobody_count_as_if_all_had_been_heard() -> None:
    world = World(3, gather, MOST)
    world.dead |= {1: 0.0, 2: 0.0}
    part = offered(world, [[4, 4, 4]]).outcomes[0][0].gathered
    assert part is not None and len(part.rows) > 0
    assert part.factor == pytest.approx([1 / 3] * len(part.rows))


def test_nobody_offers_anything() -> None:
    world = offered(World(4, gather, MOST), [[0, 0, 0, 0]] * 2)
    for outcomes in world.outcomes:
        assert len(outcomes) == 2
        for outcome in outcomes:
            assert outcome.gathered is not None
            assert len(outcome.gathered.rows) == 0
            assert outcome.averaged.all()
            assert not outcome.expired


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(2, 6),
    seed=st.integers(0, 1000),
    loss=st.sampled_from([0.02, 0.1, 0.3]),
    counts=st.lists(st.integers(0, MOST), min_size=6, max_size=6),
)
def test_under_loss_replicas_have_the_same_rows_no_row_twice_and_none_that_was_not_offered(
    n: int, seed: int, loss: float, counts: list[int]
) -> None:
    rounds = 8
    world = World(n, gather, MOST, seed=seed, loss=loss)
    offered(world, [[counts[(peer + at) % 6] for peer in range(n)] for at in range(rounds)])
    found = [applied(world, peer) for peer in range(n)]
    lost = {
        entry
        for outcomes in world.outcomes
        for o in outcomes
        for entry in ([] if o.gathered is None else o.gathered.given_up)
    }
    for at in range(rounds - 3):  # what lacks of the last rounds may still come
        sent = Counter(row.tobytes() for p in range(n) for row in rows_of(p, at, counts[(p + at) % 6]))
        for peer in range(n):
            assert not found[peer].get(at, Counter()) - sent
            if not any(number == at for number, _ in lost):
                assert found[peer].get(at) == found[0].get(at)


def test_what_lacked_at_a_deadline_comes_with_a_later_round() -> None:
    world = World(3, gather, MOST, probe_s=0.02, floor_s=0.0)
    slow: list[tuple[int, int]] = []

    def carry(source: int, run: Run) -> list[tuple[float, Run]]:
        if run.key.stage == 1 and run.key.round == 1 and source == 1 and run.peer == 2:
            slow.append((run.key.round, run.key.block))
            return [(0.5, run)]  # far behind every deadline
        return [(0.0, run)]

    world.carry = carry

    def again(peer: int, outcome: Outcome) -> None:
        at = outcome.round + 1
        if at < 3:
            world.push(world.now_s + (1.0 if at == 2 else 0.001), peer, Offer(0, rows_of(peer, at, 6), 1.0))

    world.on_done = again
    for peer in range(3):
        world.push(0.0, peer, Offer(0, rows_of(peer, 0, 6), 1.0))
    world.run()
    assert slow
    late = world.outcomes[2]
    assert late[1].expired
    assert late[1].gathered is not None
    assert not late[1].gathered.whole.all()
    assert late[2].gathered is not None
    assert [number for number, _ in late[2].gathered.late] == [1]
    found = [applied(world, peer) for peer in range(3)]
    for number in (0, 1):
        assert found[2][number] == found[0][number] == found[1][number]
        assert sum(found[2][number].values()) == 18


def test_a_dead_owners_block_is_given_up_and_then_others() -> None:
    world = World(4, gather, MOST, probe_s=0.05)
    world.dead[3] = 0.0
    world = offered(world, [[5, 5, 5, 5]] * 8)
    for peer in range(3):
        outcomes = world.outcomes[peer]
        assert len(outcomes) == 8
        assert outcomes[0].missed == (3,)
        first, last = outcomes[0].gathered, outcomes[-1].gathered
        assert first is not None
        assert last is not None
        assert first.none.sum() == 1
        assert last.whole.all()
        assert len(last.rows) == 15
        assert last.factor == pytest.approx([1 / 3] * 15)
    given_up = {entry for o in world.outcomes[0] if o.gathered is not None for entry in o.gathered.given_up}
    assert 0 in {number for number, _ in given_up}


def test_a_round_that_its_trainer_numbers_is_that_one_whatever_is_heard_of_others() -> None:
    """Peer 2 is not in some rounds, and late in one that the others have left. It does not go on to theirs,
    where its rows would be of another state, and gives in the next, however many it was not in.
    """
    world = World(3, gather, MOST)
    most = {8: 0.0, 16: 1.0, 24: 2.0, 40: 3.0, 48: 4.0, 56: 5.0, 64: 6.0}
    begins_s = [most, most, {8: 0.0, 40: 3.0, 48: 5.005, 64: 6.0}]
    for peer, times in enumerate(begins_s):
        for number, at_s in times.items():
            world.push(at_s, peer, Offer(0, rows_of(peer, number, 4), 1.0, number=number))
    for peer in (0, 1):  # its trainers' other channel has brought it back
        for at_s in (2.9, 5.9):
            world.push(at_s, peer, Joined(2))
    world.run()
    for peer, times in enumerate(begins_s):
        of = {outcome.round: outcome.gathered for outcome in world.outcomes[peer]}
        assert list(of) == list(times), peer
        for number in (40, 64):
            gathered = of[number]
            assert gathered is not None and gathered.whole.all() and len(gathered.rows) == 12, (peer, number)
            assert gathered.factor == pytest.approx([1 / 3] * 12), (peer, number)
    assert not [note for _, note in world.notes if note.what == "skipped"]


def test_a_channel_takes_what_its_method_is_for() -> None:
    node = Node(0, 1, 1)
    node.configure(0, Channel(gather, TINY, MOST, 0.1, 0.01))
    with pytest.raises(ValueError, match="takes rows"):
        node.step(0.0, Average(0, np.zeros((MOST, 4), np.float32), 1.0))
    with pytest.raises(ValueError, match="may offer 12"):
        node.step(0.0, Offer(0, rows_of(0, 0, MOST + 1), 1.0))
    with pytest.raises(ValueError, match="give uint8"):
        node.step(0.0, Offer(0, np.zeros((2, 8), np.uint8), 1.0))


def test_in_place_of_a_round_all_that_was_offered_goes_back() -> None:
    outcome = nothing_gathered(7)
    assert outcome.channel == 7 and outcome.gathered is not None
    assert len(outcome.gathered.rows) == len(outcome.gathered.factor) == len(outcome.gathered.block) == 0
    assert outcome.gathered.whole.all() and not outcome.gathered.none.any(), "nothing more is waited for"
    assert (outcome.weight == 0).all() and (outcome.heard == 0).all() and not outcome.averaged.any()
    assert outcome.mean.dtype == np.float32 and outcome.mean.size == 0
