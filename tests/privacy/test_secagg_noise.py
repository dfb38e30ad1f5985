"""Secure averages with distributed noise: what is added, and what is claimed for it, also with dropouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from ragtag.core.faults import Crash, Faults
from ragtag.core.seed import generator
from ragtag.privacy import (
    DistributedNoise,
    NoSecureSum,
    PrivacyLedger,
    SecureAverage,
    SecureMean,
    epsilon_of,
)
from ragtag.privacy.noise import KEY_BYTES, NoiseStream
from ragtag.protocols.secagg import NOISE_STEPS, SecureClient, SecureSetting, SecureWaits, ring_for
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport

pytest.importorskip("opacus")  # its accountant
N, DROPOUTS, COLLUDERS = 8, 2, 1
LENGTH, DEADLINE_S = 400, 0.5
NOISE = DistributedNoise(multiplier=2.0, max_norm=0.5)
LINE: dict[str, Any] = {"latency_s": 0.002, "rate_bytes_per_s": 1e8}


def vector(peer: int) -> torch.Tensor:
    """Its norm is far above ``max_norm``, but for peer 0's."""
    drawn = torch.from_numpy(generator(2, "vector", peer).normal(size=LENGTH)).float()
    return drawn * (0.2 / float(drawn.norm())) if peer == 0 else drawn


class Crew:
    """A crew's rounds of ``vector``: means by peer (``None``: no sum), and its ends of the average."""

    def __init__(self, rounds: int = 1, crashes: tuple[Crash, ...] = ()) -> None:
        self.means: dict[int, list[SecureMean | None]] = {peer: [] for peer in range(N)}
        self.ends: dict[int, SecureAverage] = {}
        self.sent_s: list[float] = []

        def train(peer: SimulatedTransport) -> None:
            secure = self.ends[peer.me] = SecureAverage(
                peer,
                {"w": (LENGTH,)},
                clip=0.5,
                dropouts=DROPOUTS,
                colluders=COLLUDERS,
                deadline_s=DEADLINE_S,
                noise=NOISE,
                ledger=PrivacyLedger(f"{peer.me}"),
                random=generator(9, "keys", peer.me).bytes,
                on_publish=lambda: self.sent_s.append(peer.now_s()) if peer.me == N - 1 else None,
            )
            for _ in range(rounds):
                try:
                    self.means[peer.me].append(secure.average({"w": vector(peer.me)}))
                except NoSecureSum:
                    self.means[peer.me].append(None)

        SimulatedCrew(N, Faults(**LINE, crashes=crashes), seed=4).run(train)

    def noise_of(self, clients: Any) -> np.ndarray[Any, Any]:
        """What these clients add in the first round, in units of values."""
        setting = self.ends[0].setting
        streams = [NoiseStream(generator(9, "keys", peer).bytes(KEY_BYTES)) for peer in clients]
        drawn = [stream.discrete_gaussians(LENGTH, setting.deviation_steps) for stream in streams]
        return np.asarray(sum(drawn) / setting.scale)


def clipped(peer: int) -> np.ndarray[Any, Any]:
    values = vector(peer).double().numpy()
    return np.asarray(values * min(1.0, NOISE.max_norm / np.linalg.norm(values)))


@pytest.fixture(scope="module")
def calm() -> Crew:
    return Crew(rounds=2)


def test_a_sum_is_of_clipped_vectors_and_of_everybodys_noise(calm: Crew) -> None:
    mean = calm.means[3][0]
    assert mean is not None and mean.clients == tuple(range(N))
    expected = sum(clipped(peer) for peer in range(N)) + calm.noise_of(range(N))
    error = calm.ends[3].setting.error + 1e-6
    np.testing.assert_allclose(mean["w"].numpy() * N, expected, atol=error)
    assert np.linalg.norm(clipped(0)) == pytest.approx(0.2), "a short vector is not changed"


def test_the_noise_of_a_sum_is_normal_and_a_little_more_than_is_counted_on(calm: Crew) -> None:
    noise = calm.noise_of(range(N))
    deviation = NOISE.multiplier * NOISE.max_norm * math.sqrt(N / (N - DROPOUTS - COLLUDERS))
    assert kstest(noise / deviation, norm.cdf).pvalue > 0.001
    second = calm.means[3][1]
    assert second is not None
    apart = second["w"].double().numpy() * N - sum(clipped(peer) for peer in range(N))
    assert kstest(apart / deviation, norm.cdf).pvalue > 0.001
    assert abs(np.corrcoef(apart, noise)[0, 1]) < 0.2, "each round has noise of its own"


def test_with_as_many_dropouts_as_are_allowed_the_noise_still_is_what_was_claimed(calm: Crew) -> None:
    at_s = calm.sent_s[2] - 1e-4  # before they send their vectors
    found = Crew(crashes=(Crash(3, at_s), Crash(7, at_s)))
    (mean,) = found.means[1]
    alive = [peer for peer in range(N) if peer not in (3, 7)]
    assert mean is not None and mean.clients == tuple(alive)
    expected = sum(clipped(peer) for peer in alive) + found.noise_of(alive)
    np.testing.assert_allclose(
        mean["w"].numpy() * len(alive), expected, atol=found.ends[1].setting.error + 1e-6
    )
    others = [peer for peer in alive if peer != 5]  # one of them tells its own noise to the rest
    left = found.ends[1].setting.deviation * math.sqrt(len(others))
    assert left == pytest.approx(NOISE.multiplier * NOISE.max_norm)
    two = {key: 2 * rounds for key, rounds in found.ends[1].ledger.spent.items()}
    assert two == calm.ends[1].ledger.spent, "no credit for peers that stay"


def test_a_round_without_a_sum_counts(calm: Crew) -> None:
    at_s = calm.sent_s[2] - 1e-4
    found = Crew(crashes=tuple(Crash(peer, at_s) for peer in (3, 4, 7)))
    assert found.means[1] == [None]
    assert found.ends[1].ledger.steps == 1


def test_what_is_claimed_follows_from_the_theorem(calm: Crew) -> None:
    """Kairouz, Liu, Steinke 2021, theorem 1 and proposition 14, of what each client does in integers."""
    end = calm.ends[2]
    setting, counted_on = end.setting, N - DROPOUTS - COLLUDERS
    sigma, moved = setting.deviation_steps, NOISE.max_norm * setting.scale + math.sqrt(LENGTH) / 2
    tau = 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, counted_on))
    l2 = moved / (sigma * math.sqrt(counted_on))
    orders = np.arange(1.05, 200, 0.05)
    one = np.minimum(orders / 2 * l2**2 + tau * LENGTH, orders / 2 * (l2 + math.sqrt(LENGTH) * tau) ** 2)
    delta, rounds = 1e-5, 2
    epsilon = rounds * one + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    assert end.ledger.spent == {(end.noise_multiplier, 1.0): rounds}
    assert end.epsilon(delta) == pytest.approx(float(epsilon.min()), rel=1e-3)
    assert end.noise_multiplier == pytest.approx(NOISE.multiplier, rel=1e-3)
    assert end.epsilon(delta) == epsilon_of({(end.noise_multiplier, 1.0): 2}, delta)


def test_an_independent_accountant_agrees(calm: Crew) -> None:
    accounting = pytest.importorskip("dp_accounting")
    event = accounting.GaussianDpEvent(calm.ends[0].noise_multiplier)
    told = accounting.rdp.RdpAccountant().compose(event, 2).get_epsilon(1e-6)
    assert calm.ends[0].epsilon(1e-6) == pytest.approx(told, rel=0.01)


def test_no_vector_moves_a_sum_by_more_than_is_counted(calm: Crew) -> None:
    """In the integers that a client adds its noise to, whatever it is given."""
    setting = calm.ends[0].setting
    most = NOISE.max_norm * setting.scale + math.sqrt(LENGTH) / 2
    from ragtag.privacy.secagg import _within

    for seed in range(20):
        draws = generator(seed, "vectors")
        values = (draws.standard_cauchy(LENGTH) * 10.0 ** draws.integers(-6, 6)).astype(np.float32)
        words, _ = setting.quantised(_within(values, NOISE.max_norm))
        assert np.linalg.norm(words[:LENGTH].view(np.int32).astype(np.float64)) <= most


def test_the_adding_peer_sees_noise_under_the_masks() -> None:
    """A client's vector has its noise before its masks: without masks it is not what it was."""
    setting = SecureSetting(5, 50, 1.0, 4, 3, 4, deviation=0.1)
    assert NOISE_STEPS / 2 < setting.deviation_steps <= NOISE_STEPS
    zeros, noise = np.zeros(50, np.float32), np.arange(-25, 25)
    client = SecureClient(setting, 0, zeros, generator(1, "keys").bytes, SecureWaits(1.0), noise)
    assert np.array_equal(client._words[:50].view(np.int32), noise)
    assert not client._words[50:].any(), "the check words have none"


def test_noise_that_the_setting_does_not_have_is_refused_and_so_is_none_where_it_has() -> None:
    for deviation, noise in ((0.0, np.ones(4, np.int64)), (0.1, None)):
        setting = SecureSetting(5, 4, 1.0, 4, 3, 4, deviation=deviation)
        with pytest.raises(ValueError, match="the setting says otherwise"):
            SecureClient(
                setting, 0, np.zeros(4, np.float32), generator(1, "keys").bytes, SecureWaits(1.0), noise
            )


def test_too_little_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="too little to be counted in whole steps"):
        SecureSetting(64, 4, 1e6, 62, 40, 50, deviation=1e-3)
    for multiplier, max_norm in ((0.0, 1.0), (1.0, 0.0), (math.inf, 1.0)):
        with pytest.raises(ValueError, match="both must be above 0"):
            DistributedNoise(multiplier, max_norm)
    with pytest.raises(TypeError, match="multiplier is '1'; it is a number"):
        DistributedNoise("1", 1.0)  # type: ignore[arg-type]


def test_there_always_is_somebody_left_whose_noise_counts() -> None:
    for n in range(3, 40):
        for dropouts in range(n):
            for colluders in range(max(1, n - dropouts), n + 1):
                with pytest.raises(ValueError, match="allow fewer"):
                    ring_for(n, dropouts, colluders)


def test_without_noise_nothing_is_claimed() -> None:
    def train(peer: SimulatedTransport) -> float:
        secure = SecureAverage(peer, {"w": (4,)}, clip=1.0, dropouts=1, deadline_s=DEADLINE_S)
        return secure.epsilon(1e-5)

    assert SimulatedCrew(5, Faults(**LINE), seed=4).run(train) == [math.inf] * 5
