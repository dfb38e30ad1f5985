import numpy as np
import pytest

from ragtag.codecs.dense import fp32
from ragtag.protocols.rounds.allreduce import direct, ring
from ragtag.protocols.rounds.rps import rps
from ragtag.recipes.lockstep import run_rounds
from ragtag.recipes.rps.theory import line

CODEC = fp32._replace(elements=4)


def _values(n: int) -> list[np.ndarray]:
    return [np.full((2 * n, 4), peer, np.float32) for peer in range(n)]


@pytest.mark.parametrize("method", [rps, direct, ring], ids=lambda m: m.name)
def test_without_loss_every_peer_gets_the_mean_each_round(method) -> None:
    seen = []

    def then(done, outcomes):
        seen.append([o.round for o in outcomes])
        assert all(np.allclose(o.mean, 1.5 + done) for o in outcomes)
        return [v + done + 1 for v in _values(4)] if done < 2 else None

    run_rounds(_values(4), then, method=method, faults=line(0.0), seed=3, codec=CODEC)
    assert seen == [[0] * 4, [1] * 4, [2] * 4]


def test_the_same_seed_gives_the_same_rounds() -> None:
    def run() -> list[np.ndarray]:
        means = []

        def then(done, outcomes):
            means.append(np.stack([o.mean for o in outcomes]))
            return [o.mean for o in outcomes] if done < 3 else None

        run_rounds(_values(6), then, method=rps, faults=line(0.3), seed=5, codec=CODEC)
        return means

    first, second = run(), run()
    assert len(first) == 4 and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert not np.allclose(first[0], 2.5)
