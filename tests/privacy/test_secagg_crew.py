"""Secure averages between peers in virtual time: exact sums over lost datagrams and dropouts, errors else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ragtag.core.errors import NotFinite
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.schema import Schema, SchemaMismatch
from ragtag.core.seed import generator
from ragtag.privacy import CutForm, NoSecureSum, SecureAverage, SecureMean
from ragtag.privacy.split import Cut
from ragtag.protocols.secagg import ADVERT_BYTES, SecureSetting
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport

SHAPES = {"w": (30, 20), "b": (7,)}
DEADLINE_S, LOSSY_DEADLINE_S = 0.5, 10.0
N, DROPOUTS = 8, 2
LINE: dict[str, Any] = {"latency_s": 0.002, "rate_bytes_per_s": 1e8}


def update(peer: int, turn: int = 0) -> dict[str, Tensor]:
    draws = generator(3, "update", peer, turn)
    return {name: torch.from_numpy(draws.uniform(-1, 1, shape)).float() for name, shape in SHAPES.items()}


def exact(setting: SecureSetting, clients: Any, turn: int = 0) -> np.ndarray[Any, Any]:
    """The mean of quantised values, as it must come out to the last bit."""
    total = np.zeros(setting.length, np.int64)
    for peer in clients:
        flat = torch.cat([part.reshape(-1) for part in update(peer, turn).values()]).numpy()
        total += setting.joined(setting.quantised(flat)[0]).view(np.int32)
    return np.asarray(total / setting.scale, np.float32) / np.float32(len(list(clients)))


class Rounds:
    """A crew's rounds: what each peer got, when they ended, when the crew had opened."""

    def __init__(
        self,
        n: int,
        dropouts: int,
        rounds: int = 1,
        *,
        aggregator: int = 0,
        deadline_s: float = DEADLINE_S,
        **faults: Any,
    ) -> None:
        self.got: dict[int, list[SecureMean | str]] = {peer: [] for peer in range(n)}
        self.settings: list[SecureSetting] = []
        self.sent_s: dict[int, list[float]] = {peer: [] for peer in range(n)}
        self.open_s = self.end_s = 0.0
        self.averages: dict[int, SecureAverage] = {}
        self.crew = SimulatedCrew(n, Faults(**{**LINE, **faults}), seed=4)

        def train(peer: SimulatedTransport) -> None:
            secure = self.averages[peer.me] = SecureAverage(
                peer,
                SHAPES,
                clip=1.0,
                dropouts=dropouts,
                aggregator=aggregator,
                deadline_s=deadline_s,
                random=generator(9, "keys", peer.me).bytes,
                on_publish=lambda: self._sent(peer),
            )
            self.open_s = max(self.open_s, peer.now_s())
            for turn in range(rounds):
                if peer.me == aggregator:
                    self.settings.append(secure.setting)
                try:
                    self.got[peer.me].append(secure.average(update(peer.me, turn)))
                except NoSecureSum as error:
                    self.got[peer.me].append(str(error))
            self.end_s = max(self.end_s, peer.now_s())

        self.crew.run(train)

    def _sent(self, peer: SimulatedTransport) -> None:
        """When a peer has sent its messages: the first four are its stages', if it owns no block."""
        self.sent_s[peer.me].append(peer.now_s())

    def before_s(self, message: int, peers: tuple[int, ...]) -> float:
        """Just before the first of these peers sends this message of its own."""
        return min(self.sent_s[peer][message] for peer in peers) - 1e-4

    def judge(self, peers: Any, clients: Any, turn: int = 0) -> None:
        expected = exact(self.settings[turn], clients, turn)
        for peer in peers:
            mean = self.got[peer][turn]
            assert isinstance(mean, SecureMean), mean
            assert mean.clients == tuple(clients) and mean.round == turn
            flat = torch.cat([mean[name].reshape(-1) for name in SHAPES]).numpy()
            np.testing.assert_array_equal(flat, expected)


@pytest.fixture(scope="module")
def calm() -> Rounds:
    return Rounds(N, DROPOUTS)


def test_a_crew_averages_exactly(calm: Rounds) -> None:
    calm.judge(range(N), range(N))
    plain = torch.stack([update(peer)["w"] for peer in range(N)]).double().mean(0)
    mean = calm.got[3][0]
    assert isinstance(mean, SecureMean)
    assert (mean["w"] - plain).abs().max() < calm.settings[0].error / N + 1e-7
    assert calm.end_s - calm.open_s < DEADLINE_S, "nobody waited for a deadline"


def test_payload_is_as_by_the_formulas(calm: Rounds) -> None:
    setting = calm.settings[0]
    traffic = [calm.averages[peer].traffic for peer in range(N)]
    assert sum(one.up_bytes for one in traffic) == setting.upload_bytes()
    assert sum(one.down_bytes for one in traffic) == setting.download_bytes()


def die_at(stage: int, calm: Rounds, n: int, gone: tuple[int, ...]) -> None:
    """They die just before they would send that stage's message."""
    at_s = calm.before_s(stage, gone)
    found = Rounds(n, len(gone), crashes=tuple(Crash(peer, at_s) for peer in gone))
    alive = [peer for peer in range(n) if peer not in gone]
    found.judge(alive, range(n) if stage == 3 else alive)


def test_a_peer_whose_parts_come_late_takes_the_sum_that_it_is_not_in(calm: Rounds) -> None:
    """It stands still from just before it sends them until the others have decided who is in the sum."""
    found = Rounds(N, DROPOUTS, freezes=(Freeze(7, calm.before_s(2, (7,)), DEADLINE_S + 0.004),))
    found.judge(range(N), range(7))


@pytest.mark.parametrize("stage", range(4))
def test_a_quarter_may_die_at_each_stage(calm: Rounds, stage: int) -> None:
    die_at(stage, calm, N, (3, 7))


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """These short vectors go in three blocks, of peers 0 to 2."""
    monkeypatch.setattr("ragtag.privacy.secagg.WINDOW", 1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 4], ids=["before their parts", "before their shares"])
def test_owners_of_blocks_may_die(in_blocks: None, stage: int) -> None:
    """In a third round: whoever takes over a block speaks after its owner of the earlier ones."""
    calm = Rounds(N, DROPOUTS, 3)
    assert calm.settings[0].blocks == 3
    for turn in range(3):
        calm.judge(range(N), range(N), turn)
    at_s = calm.before_s(len(calm.sent_s[2]) * 2 // 3 + stage, (1, 2))
    found = Rounds(N, DROPOUTS, 3, crashes=(Crash(1, at_s), Crash(2, at_s)))
    alive = [0, *range(3, N)]
    found.judge(alive, range(N), 1)
    found.judge(alive, range(N) if stage == 4 else alive, 2)
    assert found.end_s - at_s < 5 * DEADLINE_S, "the new owners' sums were taken at once"


@pytest.mark.slow
def test_four_of_sixteen_may_die_at_each_stage() -> None:
    calm = Rounds(16, 4)
    calm.judge(range(16), range(16))
    for stage in range(4):
        die_at(stage, calm, 16, (3, 8, 12, 15))


def test_with_more_gone_there_is_an_error_and_no_sum(calm: Rounds) -> None:
    gone = (3, 4, 7)
    found = Rounds(N, DROPOUTS, crashes=tuple(Crash(peer, calm.before_s(2, gone)) for peer in gone))
    for peer in range(N):
        if peer not in gone:
            (said,) = found.got[peer]
            assert isinstance(said, str) and "5 of 8 clients are left" in said


def test_lost_datagrams_change_nothing_but_the_time() -> None:
    found = Rounds(5, 1, 2, loss=Loss(0.1), deadline_s=LOSSY_DEADLINE_S)
    for turn in range(2):
        found.judge(range(5), range(5), turn)


def test_rounds_go_on_after_a_dropout_and_each_has_keys_of_its_own() -> None:
    calm = Rounds(5, 1, 3, aggregator=2)
    for turn in range(3):
        calm.judge(range(5), range(5), turn)
    half_s = calm.open_s + (calm.end_s - calm.open_s) / 2
    found = Rounds(5, 1, 3, aggregator=2, crashes=(Crash(4, half_s),))
    for turn in range(3):
        first = found.got[0][turn]
        assert isinstance(first, SecureMean)
        found.judge(range(4), first.clients, turn)
    assert isinstance(first, SecureMean) and first.clients == (0, 1, 2, 3)


@pytest.mark.slow
def test_a_peer_that_was_frozen_is_in_step_again() -> None:
    calm = Rounds(5, 1, 4)
    at_s = calm.open_s + (calm.end_s - calm.open_s) * 0.4
    found = Rounds(5, 1, 4, freezes=(Freeze(4, at_s, 1.6 * DEADLINE_S),))
    whole = [isinstance(end, SecureMean) for end in found.got[4]]
    assert found.crew.world.now_s > calm.crew.world.now_s
    for turn in range(4):
        first = found.got[0][turn]
        assert isinstance(first, SecureMean)
        found.judge(range(4), first.clients, turn)
    assert whole[0] and not whole[1], "it was too late"
    found.judge(range(5), range(5), 3)


def test_a_message_in_another_peers_name_is_not_taken() -> None:
    """Peer 1 publishes keys of peer 4 that nobody has, before the crew's second round."""
    means: dict[int, SecureMean] = {}
    settings: list[SecureSetting] = []

    def train(peer: SimulatedTransport) -> None:
        secure = SecureAverage(
            peer,
            SHAPES,
            clip=1.0,
            dropouts=1,
            deadline_s=DEADLINE_S,
            random=generator(9, "keys", peer.me).bytes,
        )
        settings.append(secure.setting)
        secure.average(update(peer.me))
        for _ in range(2 if peer.me == 1 else 0):  # the first has a lower version than what peer 4 has sent
            secure._send("up KEYS", 4, 1, generator(9, "forged").bytes(ADVERT_BYTES))
        if peer.me == 4:
            peer.pause(DEADLINE_S / 4)
        means[peer.me] = secure.average(update(peer.me))

    SimulatedCrew(5, Faults(**LINE), seed=4).run(train)
    for mean in means.values():
        assert mean.clients == (0, 1, 2, 3, 4)
        flat = torch.cat([mean[name].reshape(-1) for name in SHAPES]).numpy()
        np.testing.assert_array_equal(flat, exact(settings[0], range(5)))


def test_an_aggregator_that_dies_is_told_of(calm: Rounds) -> None:
    found = Rounds(N, DROPOUTS, crashes=(Crash(0, calm.before_s(2, (N - 1,))),))
    for peer in range(1, N):
        (said,) = found.got[peer]
        assert isinstance(said, str) and "aggregator" in said
    assert found.end_s < calm.end_s + 10 * DEADLINE_S


def test_a_crew_that_is_too_large_is_refused() -> None:
    crowd: Any = SimpleNamespace(n=65, me=0)
    with pytest.raises(ValueError, match="65 peers; at most 64"):
        SecureAverage(crowd, SHAPES, clip=1.0, dropouts=1)


def test_what_cannot_be_is_refused() -> None:
    def train(peer: SimulatedTransport) -> None:
        for options, why in (
            ({"aggregator": 5}, "aggregator 5 of 5 peers"),
            ({"dropouts": 3}, "allow fewer"),
            ({"deadline_s": 0.0}, "above 0"),
            ({"clip": -1.0}, "above 0"),
        ):
            with pytest.raises(ValueError, match=why):
                SecureAverage(peer, SHAPES, **({"clip": 1.0, "dropouts": 1} | options))  # type: ignore[arg-type]
        secure = SecureAverage(peer, SHAPES, clip=1.0, dropouts=1, deadline_s=DEADLINE_S)
        with pytest.raises(ValueError, match="'v' is odd"):
            secure.average(update(0) | {"v": torch.zeros(1)})
        with pytest.raises(ValueError, match="give floats"):
            secure.average(update(0) | {"b": torch.zeros(8)})
        with pytest.raises(ValueError, match="'w' is missing"):
            secure.average({"b": torch.zeros(7)})
        with pytest.raises(NotFinite, match="'b' has values that are not finite"):
            secure.average(update(0) | {"b": torch.full((7,), torch.nan)})
        mean = secure.average(update(0) | {"b": torch.full((7,), 3.0)})
        assert mean.clipped == 7 and mean.round == 0 and mean["b"].tolist() == [1.0] * 7
        with pytest.raises(SchemaMismatch):
            SecureAverage(peer, SHAPES, clip=1.0 + peer.me, dropouts=1, name="other")

    SimulatedCrew(5, Faults(**LINE), seed=4).run(train)


@pytest.mark.parametrize("what", ["secure averages", "split learning"])
def test_a_peer_that_comes_later_is_told_that_those_before_it_are_alone_in_this(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told of a tensor that the others do not have."""
    schemas: list[Schema] = []
    real = SimulatedTransport.configure

    def noted(self: SimulatedTransport, channel: int, schema: Schema, *rest: Any) -> None:
        schemas.append(schema)
        real(self, channel, schema, *rest)

    def train(peer: SimulatedTransport) -> None:
        if what == "secure averages":
            SecureAverage(peer, SHAPES, clip=1.0, dropouts=1, deadline_s=DEADLINE_S)
        else:
            Cut(peer, CutForm(batch=8, codes=(4,)), server=0)

    monkeypatch.setattr(SimulatedTransport, "configure", noted)
    for n in (5, 6):
        SimulatedCrew(n, Faults(**LINE), seed=4).run(train)
    told = schemas[-1].difference(schemas[0])
    assert told is not None and told.endswith(" with peers 0 to 5 alone, the other with peers 0 to 4 alone")
