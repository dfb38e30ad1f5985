"""Batches follow speeds, in virtual time; each sample is used once an epoch; means by samples stay right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from ragtag.core.channels import topic_of
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.samples.ledger import EpochReport
from ragtag.training.samples.portion import Portion
from ragtag.training.samples.sizes import _POST, BatchSizes, Sizer, share
from tests.protocols.hall import Hall
from tests.training.simulated import SimulatedTransport, TappedCrew, run_peers
from tests.training.test_split import Crew, Numbers, Seat, Stream, flat

BATCH, GRAIN = 32, 4


class Posting(Seat):
    """A seat whose clock goes on with steps alone."""

    def now_s(self) -> float:
        return self.crew.at_s


@dataclass
class Steps:
    """Peers that take steps together: a step takes as long as its slowest peer computes.

    speeds: samples per second of each peer, now. sizes: of each step's batches. took_s: of each epoch.
    """

    speeds: list[float]
    samples: int
    asked: BatchSizes | None
    overhead_s: float = 0.0
    sizes: list[dict[int, int]] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    used: list[Counter[int]] = field(default_factory=list)
    reports: list[EpochReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.speeds)
        self.hall = Hall(n, latency_s=0.0)
        self.hall.now_s = 1_000.0
        self.busy_s = [0.0] * n
        self.crew = crew = Crew(n, frozenset(range(n)), hall=self.hall, at_s=self.hall.now_s)
        loader = DataLoader(Numbers(self.samples), batch_size=BATCH, shuffle=True)
        self.splits = [
            Portion(
                loader,
                me,
                Posting(crew, me),
                seed=7,
                sizes=self.asked,
                busy_s=lambda me=me: self.busy_s[me],  # type: ignore[misc]
                on_epoch=self.reports.append if me == 0 else None,
            )
            for me in range(n)
        ]

    def epoch(self) -> None:
        streams: dict[int, Iterator[object]] = {me: iter(split) for me, split in enumerate(self.splits)}
        used: Counter[int] = Counter()
        began_s = self.crew.at_s
        while streams:
            batches = {me: flat(batch) for me, s in streams.items() if (batch := next(s, None)) is not None}
            streams = {me: streams[me] for me in batches}
            if not batches:
                break
            for batch in batches.values():
                used.update(batch)
            self.sizes.append({me: len(batch) for me, batch in batches.items()})
            took_s = {me: self.overhead_s + len(b) / self.speeds[me] for me, b in batches.items()}
            for me, s in took_s.items():
                self.busy_s[me] += s
            self.crew.at_s += max(took_s.values())
            self.hall.run(self.crew.at_s)
        self.took_s.append(self.crew.at_s - began_s)
        self.used.append(used)

    def middle(self) -> dict[int, float]:
        """Each peer's mean batch in the middle of what was done last."""
        last = [s for s in self.sizes[-40:-8] if len(s) == len(self.speeds)]
        return {me: sum(s[me] for s in last) / len(last) for me in range(len(self.speeds))}


@pytest.fixture
def steps() -> Callable[..., Steps]:
    """A crew of these speeds."""

    def make(speeds: Sequence[float], asked: BatchSizes | None, samples: int = 8_000, **how: float) -> Steps:
        return Steps(list(speeds), samples, asked, **how)

    return make


ASKED = BatchSizes(grain=GRAIN)


def test_sizes_follow_speeds_and_their_sum_stays(steps: Callable[..., Steps]) -> None:
    crew = steps([400.0, 200.0, 100.0], ASKED)
    crew.epoch()
    crew.epoch()
    mean = sum(crew.speeds) / 3
    for me, size in crew.middle().items():
        assert size == pytest.approx(BATCH * crew.speeds[me] / mean, abs=GRAIN)
    assert sum(crew.middle().values()) == pytest.approx(3 * BATCH, abs=2 * GRAIN)


def test_each_sample_is_used_once_an_epoch_and_counted(steps: Callable[..., Steps]) -> None:
    crew = steps([300.0, 70.0, 30.0, 200.0], ASKED, samples=4_003)
    for _ in range(3):
        crew.epoch()
    for used in crew.used:
        assert used == Counter(range(4_003))
    for split in crew.splits:
        split.close(0.0)
    assert [(r.epoch, r.samples, r.missed, r.twice) for r in crew.reports] == [
        (epoch, 4_003, 0, 0) for epoch in range(3)
    ]
    assert sum(split.samples for split in crew.splits) == 3 * 4_003
    assert crew.splits[0].samples > 3 * crew.splits[2].samples


def test_a_crew_is_as_fast_as_its_machines_together(steps: Callable[..., Steps]) -> None:
    speeds = [400.0, 200.0, 50.0]
    best_s = 8_000 / sum(speeds)
    crew = steps(speeds, ASKED)
    for _ in range(2):
        crew.epoch()
    assert crew.took_s[1] < 1.15 * best_s
    plain = steps(speeds, None)
    plain.epoch()
    assert plain.took_s[0] > 2 * best_s


def test_sizes_follow_a_speed_that_changes(steps: Callable[..., Steps]) -> None:
    crew = steps([100.0, 100.0], ASKED)
    crew.epoch()
    assert crew.middle() == {0: BATCH, 1: BATCH}
    crew.speeds[1] = 25.0
    crew.epoch()
    assert crew.middle()[0] == pytest.approx(BATCH * 1.6, abs=GRAIN)
    assert crew.middle()[1] == pytest.approx(BATCH * 0.4, abs=GRAIN)


def test_they_settle_where_steps_have_a_part_that_is_not_by_samples(steps: Callable[..., Steps]) -> None:
    """All then take about the same time, and sizes do not go to and fro."""
    crew = steps([800.0, 200.0, 100.0], ASKED, samples=20_000, overhead_s=0.05)
    crew.epoch()
    sizes = crew.middle()
    took_s = [0.05 + size / crew.speeds[me] for me, size in sizes.items()]
    assert max(took_s) < 1.35 * min(took_s)
    assert len({tuple(s.items()) for s in crew.sizes[-40:-20]}) <= 3


def test_they_stay_within_bounds(steps: Callable[..., Steps]) -> None:
    crew = steps([1_000.0, 100.0, 1.0], BatchSizes(least=10, most=50, grain=5), samples=2_000)
    crew.epoch()
    full = [size for step in crew.sizes[:-12] for size in step.values()]
    assert max(full) <= 50
    assert min(full) >= 10
    assert {50, 10} <= set(full)


@given(
    st.dictionaries(st.integers(0, 9), st.floats(1e-6, 10.0), min_size=1, max_size=10),
    st.integers(1, 300),
    st.integers(1, 40),
)
def test_the_sum_of_what_is_wanted_is_the_loaders(speeds: dict[int, float], batch: int, grain: int) -> None:
    """But for rounding, and where no bound cuts it: so the crew's batch stays what it was."""
    wide = (0, 10**9)
    sizes = {peer: share(speeds, peer, batch, grain, wide, -1) * grain for peer in speeds}
    assert abs(sum(sizes.values()) - batch * len(speeds)) <= len(speeds) * (grain / 2 + 1e-6 * batch)
    ranked = sorted(speeds, key=lambda peer: speeds[peer])
    assert [sizes[peer] for peer in ranked] == sorted(sizes.values(), reverse=True)
    assert share(speeds, 11, batch, grain, wide, 3) == 3  # who is not measured yet stays


def test_what_is_posted_is_not_believed_without_a_look() -> None:
    crew = Crew.of(4)
    busy_s = 0.0
    sizer = Sizer(Posting(crew, 0), ASKED, BATCH, lambda: busy_s)
    topic = topic_of("split 0/speeds")
    for blob in (b"", b"x" * 9, _POST.pack(2, 1.0), _POST.pack(1, float("nan")), _POST.pack(1, -1.0)):
        Posting(crew, 1).post(topic, blob)
        assert sizer.size() == BATCH
    Posting(crew, 1).post(topic, _POST.pack(1, 0.01))
    Posting(crew, 2).post(topic, _POST.pack(1, 0.01))
    Posting(crew, 3).post(topic, _POST.pack(1, 1e-30))  # faster than anything
    for _ in range(4):
        sizer.handed(BATCH)
        busy_s += 0.01 * BATCH
    assert sizer.size() == BATCH


def test_batches_that_are_handed_out_ahead_count_together() -> None:
    """As with workers: two batches before either is computed."""
    crew, busy_s = Crew.of(2), 1.0
    sizer = Sizer(Posting(crew, 0), ASKED, BATCH, lambda: busy_s)
    for _ in range(3):
        sizer.handed(BATCH)
        sizer.handed(BATCH)
        busy_s += 0.02 * BATCH
    sizer.handed(BATCH)
    assert _POST.unpack(crew.as_seen_by(1).posts(topic_of("split 0/speeds"))[0]) == (1, pytest.approx(0.01))


def test_gradients_weighed_by_samples_are_those_of_all_samples_at_once() -> None:
    """Peers with batches of 12 and of 4, beside one with a batch of 16."""
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 3, generator=draw), torch.randn(16, 1, generator=draw)
    parts = {0: slice(0, 12), 1: slice(12, 16)}
    models = {me: nn.Linear(3, 1) for me in (0, 1, 2)}
    for model in models.values():
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: slice) -> None:
        (model(x[at]) - y[at]).square().mean().backward()
        optimizer.step()

    def train(transport: SimulatedTransport) -> None:
        me = transport.me
        optimizer = CrewOptimizer(
            torch.optim.SGD(models[me].parameters(), lr=0.1),
            transport,
            average="gradients",
            weight="samples",
            samples=lambda: parts[me].stop - parts[me].start,
            model=models[me],
        )
        step(models[me], optimizer, parts[me])

    run_peers(TappedCrew(2), train)
    step(models[2], torch.optim.SGD(models[2].parameters(), lr=0.1), slice(0, 16))
    for me in (0, 1):
        torch.testing.assert_close(models[me].weight, models[2].weight)


def test_workers_draw_them_too() -> None:
    loader = DataLoader(Numbers(50), batch_size=8, num_workers=1, multiprocessing_context="fork", timeout=30)
    split = Portion(loader, 0, Posting(Crew.of(1), 0), sizes=BatchSizes(grain=4))
    assert sorted(i for batch in split for i in flat(batch)) == list(range(50))
    assert split.samples == 50
    assert len(split) == 7


def test_what_cannot_be_is_refused() -> None:
    seat = Posting(Crew.of(2), 0)
    for wrong in ({"least": 0}, {"most": -1}, {"grain": 1.5}, {"least": 9, "most": 8}):
        with pytest.raises(ValueError, match="batch sizes"):
            BatchSizes(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no multiple of the grain, 16, is 1 to 8"):
        Portion(DataLoader(Numbers(9), batch_size=8), 0, seat, sizes=BatchSizes(most=8, grain=16))
    for loader in (DataLoader(Stream(9), batch_size=2), DataLoader(Numbers(9), batch_size=None)):
        with pytest.raises(ValueError, match="a loader that makes batches"):
            Portion(loader, 0, seat, sizes=BatchSizes())
