"""Per epoch each block is used once, or survivors report it as missed, whatever happens to them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from ragtag.core import seed as random
from ragtag.training.samples.blocks import Pace
from ragtag.training.samples.claims import decode
from ragtag.training.samples.pool import Over, Tell, Use, Wait
from tests.training.drawers import Drawers, deck_of, shards_of

SIZE = 2  # samples of a block


def hold(crew: Drawers, *, agree: bool = True, deaths: int = 0, bounded: bool = True) -> None:
    """What must be so at the end."""
    alive = set(range(crew.n)) - crew.hall.dead
    assert alive <= crew.finished
    leases = deaths * (max(2, ceil(crew.lease_s / min(crew.pace_s))) + 2)
    for epoch in range(crew.epochs):
        assert set(crew.counts(epoch).values()) <= {1}
        unused = len(crew.missing(epoch)) * SIZE
        reports = {peer: crew.reports[peer][epoch] for peer in alive if epoch in crew.reports[peer]}
        for peer, report in reports.items():
            assert report.samples == len(crew.deck.sizes) * SIZE
            assert report.twice == 0
            assert unused <= report.missed
            assert report.missed <= leases * SIZE or not bounded
            assert report.missed + sum(report.by_peer.values()) == report.samples
            mine = sum(who[0][0] == peer for who in crew.drawn[epoch].values())
            assert report.used_by_me <= mine * SIZE
        if agree:
            assert len(reports) == len(alive)
            assert len({(r.missed, tuple(sorted(r.by_peer.items()))) for r in reports.values()}) == 1


def drawn_by(crew: Drawers, epoch: int) -> list[int]:
    return [sum(who[0][0] == p for who in crew.drawn[epoch].values()) for p in range(crew.n)]


def test_the_fast_draw_more_and_all_end_together() -> None:
    crew = Drawers(deck_of(4, 200), [0.05, 0.05, 0.05, 0.2], epochs=3)
    for peer in range(4):
        crew.start(peer)
    hold(crew.run())
    for epoch in range(3):
        fast, _, _, slow = drawn_by(crew, epoch)
        assert 3 * slow < fast
        ends = [crew.ended[peer][epoch] for peer in range(4)]
        assert max(ends) - min(ends) < crew.lease_s
    assert max(crew.ended[0].values()) < 1.1 * 3 * 200 / (3 / 0.05 + 1 / 0.2)
    assert max(crew.waited_s) < 0.1  # of some ten seconds: claims are made ahead


def test_shards_stay_with_their_peers_whatever_their_speed() -> None:
    crew = Drawers(shards_of([5, 40, 20]), [0.2, 0.01, 0.05], epochs=3)
    for peer in range(3):
        crew.start(peer)
    hold(crew.run())
    assert [drawn_by(crew, epoch) for epoch in range(3)] == [[5, 40, 20]] * 3


def test_survivors_share_a_dead_peers_shard() -> None:
    crew = Drawers(shards_of([40, 40, 40]), [0.05] * 3, epochs=3, lease_s=0.5)
    for peer in range(3):
        crew.start(peer)
    crew.kill(1, 0.6)
    hold(crew.run(), deaths=1)
    assert 0 < len(crew.missing(0)) <= 0.5 / 0.05 + 2
    for epoch in (1, 2):
        assert crew.missing(epoch) == set()
        shares = drawn_by(crew, epoch)
        assert shares[1] == 0
        assert min(shares[0], shares[2]) >= 50


def test_a_newcomer_begins_in_the_crews_epoch_and_finds_work_at_once() -> None:
    crew = Drawers(deck_of(3, 300), [0.05] * 3, epochs=3)
    crew.start(0)
    crew.start(1)
    crew.start(2, 9.0)  # the first epoch takes two peers some 7.5 s
    crew.run()
    hold(crew, agree=False)
    assert drawn_by(crew, 0)[2] == 0
    assert min(crew.ended[2]) == 1
    first = min(at_s for who in crew.drawn[1].values() for peer, at_s in who if peer == 2)
    assert first < 9.5
    assert {report.missed for reports in crew.reports for report in reports.values()} == {0}


def test_a_newcomer_begins_in_the_oldest_epoch_that_has_work_for_it() -> None:
    crew = Drawers(shards_of([40, 40, 20]), [0.02, 0.02, 0.02], epochs=3)
    crew.start(0)
    crew.start(1)
    crew.start(2, 1.0)  # the others, which leave its shard to it, are in the second epoch then
    crew.run()
    hold(crew, agree=False)
    assert min(at_s for who in crew.drawn[1].values() for _, at_s in who) < 1.0
    assert [drawn_by(crew, epoch)[2] for epoch in range(3)] == [20, 20, 20]


def test_a_newcomer_waits_for_word_of_what_a_peer_that_does_not_answer_had_claimed() -> None:
    """That of a peer that answers, from after it came: what was told before may lack those claims."""
    crew = Drawers(deck_of(3, 300), [0.05] * 3, epochs=1, known_s=30.0, lease_s=3.0)
    crew.start(0)
    crew.start(1)
    crew.freeze(1, 2.0, 30.0)
    crew.start(2, 2.01)
    told: list[float] = []
    post = crew.hall.post

    def posting(peer: int, topic: int, blob: bytes) -> int:
        if peer == 0:
            told.append(crew.hall.now_s)
        return post(peer, topic, blob)

    crew.hall.post = posting  # type: ignore[method-assign]
    crew.run(20.0)
    first = min(at_s for who in crew.drawn[0].values() for peer, at_s in who if peer == 2)
    assert first > min(at_s for at_s in told if at_s > 2.01), (first, told)


def test_a_newcomer_waits_two_leases_for_word_of_a_silent_peers_claims_and_no_longer() -> None:
    """The one that might tell of them has all that it may claim, and says nothing meanwhile."""
    crew = Drawers(deck_of(3, 300), [30.0, 0.05, 0.05], epochs=1, known_s=60.0, lease_s=1.0)
    crew.start(0)
    crew.start(1)
    crew.freeze(1, 2.0, 60.0)
    crew.start(2, 2.01)
    crew.run(10.0)
    first = min(at_s for who in crew.drawn[0].values() for peer, at_s in who if peer == 2)
    assert 2.01 + 2.0 <= first < 2.01 + 2.5


def test_what_a_dead_peer_leaves_of_an_epoch_is_drawn_by_those_that_are_in_the_next() -> None:
    """Also by one that has claimed the next one's first blocks."""
    crew = Drawers(shards_of([10, 60]), [0.2, 0.1], epochs=2, lease_s=0.5)
    crew.start(0)
    crew.start(1)
    crew.kill(1, 2.5)
    hold(crew.run(), deaths=1)
    assert min(at_s for who in crew.drawn[1].values() for _, at_s in who) < 2.5
    assert drawn_by(crew, 0)[0] > 10 + 25


def test_what_a_peer_has_used_is_in_its_posts_until_all_have_reported_that_epoch() -> None:
    crew = Drawers(deck_of(3, 90), [0.05, 0.05, 0.07], epochs=4, loss=0.2, lease_s=0.5)
    for peer in range(3):
        crew.start(peer)
    post, ahead = crew.hall.post, 0

    def posting(peer: int, topic: int, blob: bytes) -> int:
        nonlocal ahead
        number = post(peer, topic, blob)
        sections = decode(blob, 77, peer, number)
        assert sections is not None and sections[0].peer == peer
        others = [s.closed for (who, _), s in crew.pools[peer].ledger.sections.items() if who != peer]
        told = {block for a, b in sections[0].firm for block in range(a, b)}
        ahead += sections[0].closed > min(others, default=0)
        for epoch in range(min([*others, sections[0].closed]), crew.epochs):
            mine = {b for b, who in crew.drawn[epoch].items() if any(p == peer for p, _ in who)}
            assert {epoch * 90 + block for block in mine} <= told, (peer, epoch)
        return number

    crew.hall.post = posting  # type: ignore[method-assign]
    hold(crew.run())
    assert ahead > 0, "nobody was ahead of another"


def test_a_peer_that_stood_still_leaves_alone_what_was_reported_without_it() -> None:
    crew = Drawers(deck_of(3, 60), [0.05] * 3, epochs=4, lease_s=0.3)
    for peer in range(3):
        crew.start(peer)
    crew.freeze(2, 0.5, 5.0)
    hold(crew.run(), agree=False, deaths=1)
    for epoch in range(4):
        mine, others = crew.reports[0][epoch], crew.reports[1][epoch]
        assert replace(mine, used_by_me=others.used_by_me) == others or epoch in (0, 3)
        reported = crew.reports[0][epoch].missed
        assert reported == SIZE * len(crew.missing(epoch)) or epoch == 0
    assert list(crew.ended[2]) == [0, 3], "it goes on where the crew is"


def test_a_process_that_is_started_again_does_not_use_its_old_ones_blocks() -> None:
    crew = Drawers(deck_of(3, 200), [0.05] * 3, epochs=2, lease_s=0.4)
    for peer in range(3):
        crew.start(peer)
    crew.kill(2, 1.0)
    crew.restart(2, 2.5)
    hold(crew.run(), agree=False, deaths=1)
    assert crew.reports[0][0] == crew.reports[1][0] or crew.reports[0][0].missed == crew.reports[1][0].missed
    assert drawn_by(crew, 0)[2] > 20


def test_two_parts_that_do_not_hear_each_other_count_what_both_used() -> None:
    crew = Drawers(deck_of(2, 200), [0.05] * 2, epochs=1)
    for peer in range(2):
        crew.start(peer)
    crew.hall.cut = lambda source, dest: 1.0 < crew.hall.now_s < 5.0
    crew.hall.call(
        1.1, lambda: [live.intersection_update({me}) for me, live in enumerate(crew.live)] and None
    )
    crew.run()
    both = sum(count == 2 for count in crew.counts(0).values())
    assert both > 3
    assert crew.missing(0) == set()
    for reports in crew.reports:
        assert reports[0].missed == 0
        assert reports[0].twice == both * SIZE


def test_an_epoch_that_is_broken_off_gives_back_what_it_had_claimed() -> None:
    crew = Drawers(deck_of(2, 40), [0.05] * 2, epochs=1)
    crew.start(1)
    pool, hall = crew.pools[0], crew.hall
    pool.begin(0)
    drew = 0
    hall.run(0.01)
    while drew < 3:
        action = pool.next(hall.now_s, hall.boards[0].notices(0), {0, 1})
        if isinstance(action, Tell):
            pool.posted(hall.now_s, hall.post(0, 0, action.blob))
        elif isinstance(action, Use):
            drew += 1
        hall.run(hall.now_s + 0.02)
    tell = pool.give_back()
    pool.posted(hall.now_s, hall.post(0, 0, tell.blob))
    left = pool.settle(hall.now_s, hall.boards[0].notices(0), {0, 1})
    assert isinstance(left, Wait), "one that ended now might take it along: a post before is under way"
    hall.run(hall.now_s + 5.0)
    assert len(crew.drawn[0]) == 40 - drew
    while isinstance(action := pool.settle(hall.now_s, hall.boards[0].notices(0), {0, 1}, True), Tell):
        pool.posted(hall.now_s, hall.post(0, 0, action.blob))
    assert isinstance(action, Over)
    assert not pool.reports, "it is not over: the other draws on"


def storm(seed: int, *, shards: bool, freezes: bool) -> tuple[Drawers, int]:
    """A crew to which random things happen; how many of its processes die, or stand still."""
    draw = random.generator(seed, "storm")
    n = int(draw.integers(2, 8))
    lengths = [int(draw.integers(0, 50)) for _ in range(n - 1)]
    deck = shards_of([*lengths, 20]) if shards else deck_of(n, int(draw.integers(5 * n, 250)))
    pace_s = [float(draw.choice([0.02, 0.05, 0.3])) for _ in range(n)]
    loss = float(draw.choice([0.0, 0.1, 0.3]))
    jitter_s = float(draw.choice([0.0, 0.02]))
    lease_s = float(draw.choice([0.2, 1.0]))
    crew = Drawers(deck, pace_s, epochs=3, seed=seed, loss=loss, jitter_s=jitter_s, lease_s=lease_s)
    span_s = 3 * len(deck.sizes) / sum(1 / pace for pace in pace_s)
    crew.start(0)
    hurt = 0
    for peer in range(1, n):
        at_s = float(draw.uniform(0, span_s))
        fate = draw.choice(["calm", "kill", "late", "freeze" if freezes else "calm"])
        crew.start(peer, at_s if fate == "late" else 0.0)
        if fate == "kill" and not (shards and hurt):
            crew.kill(peer, at_s)
            hurt += 1
        elif fate == "freeze":
            crew.freeze(peer, at_s, float(draw.choice([0.1, 1.0, 3.0])))
            hurt += 1
    return crew.run(), hurt


CASES = pytest.mark.parametrize("shards", [False, True], ids=["pool", "shards"])


@CASES
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_block_is_used_once_or_missed(seed: int, shards: bool) -> None:
    crew, hurt = storm(seed, shards=shards, freezes=seed % 2 == 1)
    hold(crew, agree=False, deaths=hurt, bounded=not shards)  # no survivor may be at work any more


@pytest.mark.slow
@CASES
@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_with_many_seeds(part: int, shards: bool) -> None:
    for seed in range(100 + 25 * part, 125 + 25 * part):
        crew, hurt = storm(seed, shards=shards, freezes=seed % 2 == 1)
        hold(crew, agree=False, deaths=hurt, bounded=not shards)  # no survivor may be at work any more


# -- Where a peer goes on, and how much it claims


def mask_of(*free: tuple[int, int], blocks: int = 20) -> np.ndarray:
    mask = np.zeros(blocks, np.bool_)
    for a, b in free:
        mask[a:b] = True
    return mask


@pytest.mark.parametrize(
    ("cursor", "free", "start"),
    [
        (7, [(5, 9)], 7),  # on from where it was
        (7, [(0, 3), (8, 20)], 0),  # at its arc's beginning
        (7, [(1, 3), (8, 20)], 14),  # amid the largest gap
        (7, [(1, 3), (9, 12)], 10),
        (7, [(12, 13)], 12),  # which is a single block
        (-1, [(19, 20)], 19),
    ],
)
def test_a_peer_goes_on_then_begins_its_arc_then_halves_the_largest_gap(
    cursor: int, free: list[tuple[int, int]], start: int
) -> None:
    assert deck_of(4, 20).start(0, cursor, mask_of(*free)) == start


def test_the_first_block_may_be_where_a_peer_was() -> None:
    assert deck_of(4, 20).start(1, 0, mask_of((0, 20))) == 0


def test_a_claim_is_half_a_lease_and_no_less_than_a_batch() -> None:
    pace = Pace(batch=6)
    assert pace.blocks(1.0, 1000, 2) == 6, "before anything is measured"
    for _ in range(60):
        pace.drew(0.02)
    assert pace.blocks(1.0, 1000, 2) == 25
    assert pace.blocks(0.1, 1000, 2) == 6
    assert pace.blocks(1.0, 40, 2) == 10, "towards the end half of an even share"
    assert pace.blocks(1.0, 4, 0) == 25, "where nobody else may, as much as ever"


def test_an_epoch_in_which_a_peer_finds_nothing_to_draw_is_in_its_reports() -> None:
    """It was begun: that there was nothing left is no reason not to tell what became of it."""
    crew = Drawers(deck_of(2, 3), [0.05, 5.0], epochs=2)
    for peer in range(2):
        crew.start(peer)
    crew.run()
    assert [sorted(reports) for reports in crew.reports] == [[0, 1], [0, 1]]
    assert drawn_by(crew, 0)[0] >= 2
