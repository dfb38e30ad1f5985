"""Drawing goes on while others are slow, deaf, frozen or dead, and what that costs is counted."""

from __future__ import annotations

import pytest

from ragtag.training.samples.answers import PATIENCE_MAX
from tests.training.drawers import LOOK_S, Drawers, deck_of, shards_of

PEERS, EPOCHS, SIZE = 6, 6, 2
ENTERED_S = 0.5
TWICE_MAX = 1e-3
"""The share of an epoch's samples that waiting no longer may cost, in blocks used twice."""


def crew_of(shards: bool, loss: float, seed: int, n: int = PEERS) -> Drawers:
    """Each epoch of 40 blocks a peer takes 0.8 s; round trips take 10 to 30 ms."""
    deck = shards_of([40] * n) if shards else deck_of(n, 40 * n)
    crew = Drawers(deck, [0.02] * n, epochs=EPOCHS, seed=seed, loss=loss, jitter_s=0.01, lease_s=0.5)
    for peer in range(n):
        crew.start(peer)
    return crew


def longest(crew: Drawers, peers: range = range(PEERS), *, thawed_s: dict[int, float] | None = None) -> float:
    """The longest wait of these peers in a draw, once all had entered, or this one stands still no more."""
    from_s = dict.fromkeys(peers, ENTERED_S) | (thawed_s or {})
    waits = [took_s for peer in peers for since_s, took_s in crew.waits[peer] if since_s > from_s[peer]]
    return max(waits, default=0.0)


def twice(crew: Drawers) -> int:
    """Blocks that were used twice, each of them reported by somebody."""
    count = 0
    for epoch in range(EPOCHS):
        used_twice = sum(n > 1 for n in crew.counts(epoch).values())
        reported = max((r[epoch].twice for r in crew.reports if epoch in r), default=0)
        assert reported >= used_twice * SIZE
        count += used_twice
    return count


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.2])
def test_in_its_own_shard_a_peer_waits_for_nobody(loss: float) -> None:
    crew = crew_of(True, loss, 1).run()
    assert longest(crew) == 0.0
    assert [len(crew.missing(epoch)) for epoch in range(EPOCHS)] == [0] * EPOCHS
    assert twice(crew) == 0


SHARDS = pytest.mark.parametrize("shards", [False, True], ids=["pool", "shards"])


def hurt(shards: bool, loss: float, seed: int) -> Drawers:
    """One peer stands still for 3 s, then another dies."""
    crew = crew_of(shards, loss, seed)
    crew.freeze(2, 1.2, 3.0)
    crew.kill(4, 2.5)
    return crew.run()


def hold(crew: Drawers) -> int:
    """No wait is longer than it may be, and nearly nothing is used twice: how many blocks are."""
    limit_s = PATIENCE_MAX * crew.rto_max_s + 2 * LOOK_S
    assert (
        longest(crew, thawed_s={2: 4.2}) <= limit_s < 1.5
    )  # rto_max_s: of a line of 30 ms that loses a fifth
    return twice(crew)


@SHARDS
@pytest.mark.parametrize("loss", [0.1, 0.2])
def test_no_wait_is_longer_than_some_round_trips_though_peers_freeze_and_die(
    shards: bool, loss: float
) -> None:
    assert hold(hurt(shards, loss, 0)) <= TWICE_MAX * EPOCHS * 40 * PEERS


@pytest.mark.slow
@SHARDS
@pytest.mark.parametrize("loss", [0.1, 0.2])
def test_no_wait_is_longer_with_many_seeds(shards: bool, loss: float) -> None:
    seeds = range(1, 13)
    used_twice = sum(hold(hurt(shards, loss, seed)) for seed in seeds)
    assert used_twice <= TWICE_MAX * EPOCHS * 40 * PEERS * len(seeds)


@SHARDS
def test_a_peer_that_hears_and_is_not_heard_holds_nobody_up(shards: bool) -> None:
    crew = crew_of(shards, 0.1, 3)
    crew.hall.cut = lambda source, dest: source == 5 and 1.0 < crew.hall.now_s < 1.6
    crew.run()
    assert longest(crew, range(5)) < 0.3
    assert longest(crew) <= PATIENCE_MAX * crew.rto_max_s + 2 * LOOK_S
    assert twice(crew) <= 0.01 * EPOCHS * 40 * PEERS


def test_an_epoch_that_nobody_began_is_not_reported() -> None:
    crew = Drawers(deck_of(2, 40), [0.01] * 2, epochs=45, lease_s=0.2)
    crew.start(0)
    crew.hall.call(1.0, lambda: crew.begin(1, 0, 30))  # its loop says so: it goes on from a checkpoint
    crew.run()
    drawn = {epoch for epoch in range(crew.epochs) if crew.drawn[epoch]}
    assert {0, 30, 44} <= drawn
    assert not drawn & set(range(20, 30))
    for reports in crew.reports:
        assert set(reports) <= drawn
        assert reports[44].missed == 0
