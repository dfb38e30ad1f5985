"""Who computes which named tensor: balanced, agreed on, and moved little when somebody goes or comes."""

from __future__ import annotations

import pytest

from ragtag.core.seed import generator
from ragtag.protocols.publish.assignment import OwnerPair, assigned


def costs_of(k: int, seed: int) -> dict[str, float]:
    """As of layers: widths from 16 to 1,024, cubed."""
    widths = 2.0 ** generator(seed, "widths").uniform(4, 10, k)
    return {f"layer{i}": float(width) ** 3 for i, width in enumerate(widths)}


def loads(costs: dict[str, float], owners: dict[str, OwnerPair], live: set[int]) -> list[float]:
    return [sum(costs[name] for name, pair in owners.items() if pair.first == peer) for peer in sorted(live)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("n", [1, 2, 5, 16, 64])
def test_it_is_balanced_moves_only_what_the_dead_had_and_the_second_becomes_the_first(
    n: int, seed: int
) -> None:
    costs = costs_of(200, seed)
    everyone = set(range(n))
    before = assigned(costs, everyone, seats=n, founded=n, seed=seed)
    assert before == assigned(
        dict(reversed(costs.items())), frozenset(everyone), seats=n, founded=n, seed=seed
    )
    fair = max(sum(costs.values()) / n, max(costs.values()))
    assert max(loads(costs, before, everyone)) <= 4 / 3 * fair
    for gone in range(n) if n > 1 else ():
        live = everyone - {gone}
        after = assigned(costs, live, seats=n, founded=n, seed=seed)
        for name, (first, second) in before.items():
            assert second != first
            assert after[name].first == (second if first == gone else first)
        largest = max(costs[name] for name, pair in before.items() if pair.first == gone)
        most = max(max(loads(costs, before, live)), sum(costs.values()) / len(live) + largest)
        assert max(loads(costs, after, live)) <= most + 1e-6 * most
    if n == 1:
        assert set(before.values()) == {OwnerPair(0, 0)}


@pytest.mark.parametrize("seed", range(10))
def test_a_newcomer_takes_a_share_and_nothing_moves_between_the_others(seed: int) -> None:
    costs = costs_of(200, seed)
    before = assigned(costs, range(8), seats=8, founded=8, seed=seed)
    after = assigned(costs, range(9), seats=9, founded=8, seed=seed)
    moved = [name for name in costs if before[name].first != after[name].first]
    assert {after[name].first for name in moved} == {8}
    assert (
        0.7 * sum(costs.values()) / 9 <= sum(costs[name] for name in moved) <= 1.3 * sum(costs.values()) / 9
    )
    assert assigned(costs, range(8), seats=9, founded=8, seed=seed).keys() == costs.keys()


@pytest.mark.parametrize("seed", range(5))
def test_views_that_differ_in_one_peer_differ_in_its_names_or_in_few(seed: int) -> None:
    """With others dead already, too: what moves beyond the dead one's names is what was moved before."""
    costs = costs_of(200, seed)
    live = set(range(16)) - {3, 7}
    before = assigned(costs, live, seats=16, founded=16, seed=seed)
    after = assigned(costs, live - {5}, seats=16, founded=16, seed=seed)
    home = assigned(costs, range(16), seats=16, founded=16, seed=seed)
    for name in costs:
        if home[name].first not in (3, 5, 7):
            assert before[name].first == after[name].first == home[name].first


def test_equal_costs_are_dealt_otherwise_by_another_seed() -> None:
    costs = dict.fromkeys("abcdefgh", 1.0)
    dealt = {tuple(assigned(costs, range(4), seats=4, founded=4, seed=seed).values()) for seed in range(20)}
    assert len(dealt) > 10
    one = {assigned({"a": 1.0}, range(4), seats=4, founded=4, seed=seed)["a"].first for seed in range(40)}
    assert one == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("costs", "live", "says"),
    [
        ({"a": 0.0}, {0}, "cost of 'a' is 0"),
        ({"a": float("inf")}, {0}, "cost of 'a' is inf"),
        ({"a": 1.0}, set(), "live peers"),
        ({"a": 1.0}, {4}, "live peers"),
    ],
)
def test_what_cannot_be_is_refused(costs: dict[str, float], live: set[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        assigned(costs, live, seats=4, founded=4, seed=1)
