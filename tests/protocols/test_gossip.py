import numpy as np
import pytest

from ragtag.core.faults import Crash, Faults, Loss
from ragtag.protocols.groups.gossip import Gossip
from ragtag.protocols.groups.keys import View
from tests.protocols.group_crews import RTT_S, GroupCrew, Make, channel


def gossip(ring: bool = False) -> Make:
    return lambda me, view: Gossip(me, view, 0, channel(), ring=ring)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_partners_are_each_others(n: int, ring: bool) -> None:
    view = View(range(3, 3 + n))
    peers = {me: gossip(ring)(me, view) for me in view.peers}
    for round_ in range(6):
        alone = 0
        for me, peer in peers.items():
            partner = peer.partner(round_)  # type: ignore[attr-defined]
            alone += partner is None
            assert partner is None or (partner != me and peers[partner].partner(round_) == me)  # type: ignore[attr-defined]
        assert alone == n % 2


def test_on_a_ring_a_peer_meets_one_neighbour_and_then_the_other() -> None:
    def partners(n: int) -> list[list[int | None]]:
        view = View(range(n))
        peers = [gossip(ring=True)(me, view) for me in view.peers]
        return [[peer.partner(round_) for peer in peers] for round_ in range(3)]  # type: ignore[attr-defined]

    assert partners(6) == [[1, 0, 3, 2, 5, 4], [5, 2, 1, 4, 3, 0], [1, 0, 3, 2, 5, 4]]
    assert partners(5) == [[1, 0, 3, 2, None], [None, 2, 1, 4, 3], [1, 0, 3, 2, None]]


def test_who_meets_whom_follows_from_seed_and_round_alone_in_all_versions() -> None:
    """Peers of two versions average with each other."""
    view = View(range(6))
    pairs = [[gossip()(me, view).partner(r) for me in view.peers] for r in range(3)]  # type: ignore[attr-defined]
    assert pairs == [[5, 4, 3, 2, 1, 0], [1, 0, 5, 4, 3, 2], [2, 4, 0, 5, 1, 3]]


def test_pairs_halve_the_variance_each_round_and_keep_the_mean() -> None:
    crew = GroupCrew(64, gossip(), rounds=8).run()
    assert crew.variance() == pytest.approx(2**-8, rel=0.3)
    assert np.allclose(np.mean(crew.values, axis=0), crew.start.mean(axis=0), atol=1e-5)


def test_a_ring_is_slow() -> None:
    assert GroupCrew(64, gossip(ring=True), rounds=8).run().variance() > 0.05


def test_two_neighbours_on_a_ring_of_two_meet_always() -> None:
    assert GroupCrew(2, gossip(ring=True), rounds=2).run().variance() < 1e-12


def test_losses_and_deaths_leave_nobody_waiting_and_are_said() -> None:
    faults = Faults(loss=Loss(0.2), latency_s=RTT_S / 2, crashes=(Crash(3, 0.05),))
    crew = GroupCrew(16, gossip(), rounds=10, faults=faults).run()
    assert all(len(o) == 10 for p, o in crew.outcomes.items() if p != 3)
    kept = [o for outcomes in crew.outcomes.values() for o in outcomes if not o.averaged.all()]
    assert kept
