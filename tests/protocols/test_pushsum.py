import numpy as np
import pytest

from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Arrived, MessageKey, Outcome, PeerId
from ragtag.protocols.groups.keys import View
from ragtag.protocols.groups.pushsum import _ROUNDS_SEEN, PushSum
from ragtag.protocols.rounds.base import whole_message
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


def test_a_peer_that_sends_in_round_after_round_keeps_out_nobody_else() -> None:
    """Of each peer the newest messages are known: what is kept is bounded, and copies do not count."""
    node = PushSum(0, View(range(4)), 0, channel(1))
    payload, ones = np.ones((1, 1088), np.uint8), np.ones(1, np.float32)

    def give(peer: PeerId, number: int) -> float:
        run = whole_message(peer, MessageKey(0, number, 0, 0), payload, ones, np.ones(1, np.uint64))
        before = float(node._weight[0])
        node.step(0.0, Arrived((run,)))
        return float(node._weight[0]) - before

    assert give(1, 1000) == 1, "the crew is that far"
    assert sum(give(3, number) for number in range(300)) == 300
    assert sum(len(known) for known in node._seen.values()) <= 3 * _ROUNDS_SEEN
    assert [give(3, number) for number in (0, 200, 299)] == [0, 0, 0], "copies"
    assert give(2, 1002) == 1
