import numpy as np
import pytest

from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Outcome, PeerId
from ragtag.protocols.groups.keys import View
from ragtag.protocols.groups.pushsum import PushSum
from tests.protocols.group_crews import RTT_S, GroupCrew, channel


class Carried(GroupCrew):
    """Push-sum: the next round's weight is what the last one left."""

    def _done(self, peer: PeerId, now_s: float, outcome: Outcome) -> None:
        self.outcomes[peer].append(outcome)
        self.values[peer] = outcome.mean
        if len(self.outcomes[peer]) < self._rounds:
            self.ask(peer, now_s, float(outcome.weight[0]))

    def mass(self) -> tuple[np.ndarray, float]:
        weights = [outcomes[-1].weight[0] for outcomes in self.outcomes.values()]
        return np.tensordot(weights, np.stack(self.values), 1), float(sum(weights))


def crew(n: int, rounds: int, exponential: bool = False, faults: Faults | None = None) -> Carried:
    return Carried(
        n,
        lambda me, view: PushSum(me, view, 0, channel(), exponential=exponential),
        rounds=rounds,
        faults=faults or Faults(latency_s=RTT_S / 2),
        exact=False,
    ).run()


def test_sum_and_weight_are_kept() -> None:
    c = crew(32, 6)
    total, weight = c.mass()
    pots = [node.inner for node in c.nodes]
    total = total + sum(p._sum for p in pots)  # type: ignore[attr-defined]
    weight += sum(float(p._weight[0]) for p in pots)  # type: ignore[attr-defined]
    assert weight == pytest.approx(32, rel=1e-5)
    assert np.allclose(total, c.start.sum(axis=0), atol=1e-3)


def test_estimates_reach_the_mean_where_peers_receive_unequally_often() -> None:
    c = crew(32, 40)
    assert np.allclose(np.stack(c.values), c.start.mean(axis=0), atol=1e-3)
    weights = [outcomes[-1].weight[0] for outcomes in c.outcomes.values()]
    assert max(weights) > 1.5 * min(weights)  # which is why the weights are needed


def test_on_powers_of_two_the_exponential_graph_is_exact_after_log2_n_rounds() -> None:
    c = crew(32, 5, exponential=True)
    assert np.allclose(np.stack(c.values), c.start.mean(axis=0), atol=1e-5)


def test_what_is_lost_takes_its_weight_along() -> None:
    c = crew(32, 40, faults=Faults(loss=Loss(0.05), latency_s=RTT_S / 2, duplicate=0.3))
    spread = np.stack(c.values).std(axis=0).mean()
    _, weight = c.mass()
    assert weight < 32 and spread < 0.05
    assert np.abs(np.stack(c.values).mean(axis=0) - c.start.mean(axis=0)).mean() < 0.2


def test_a_crew_of_one_keeps_what_it_has() -> None:
    c = crew(1, 2)
    assert np.array_equal(c.values[0], c.start[0])
    assert len(View([0])) == 1
