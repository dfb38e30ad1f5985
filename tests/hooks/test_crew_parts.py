"""The averaging hook in one process: a crew of one, and several over a fake network."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import ragtag
from ragtag.app.crew.peer import Peer
from ragtag.app.crew.transport import SoloTransport
from ragtag.app.environment import Place
from ragtag.app.tracefile import TraceWriter, peer_file, read_run
from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.trace import Leave
from ragtag.core.types import Outcome
from ragtag.hooks.alone import alone
from ragtag.hooks.crew_hook import CrewState, models_due
from ragtag.hooks.table import Table
from ragtag.protocols.node import CATCH_UP

GRADIENTS, MODELS, INTEGERS = map(channel_of, ("gradients", "gradients/models", "gradients/models/fixed"))


class Ready:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def wait(self) -> Outcome:
        return self._outcome


class Told:
    """A crew of two whose other peer has ``theirs`` everywhere; it says which round each is."""

    def __init__(self, theirs: float = 3.0) -> None:
        self._peer = self.transport = self
        self.me, self.n, self.live = 0, 2, frozenset({0, 1})
        self.theirs, self.next = theirs, {GRADIENTS: 0, MODELS: 0, INTEGERS: 0}
        self.weights: list[tuple[int, float]] = []
        self.recorded: list[Outcome] = []
        self.configured: list[int] = []

    def configure(self, channel: int, *_: Any, **__: Any) -> None:
        self.configured.append(channel)

    def take_name(self, name: str | None, kind: str) -> str:
        return kind if name is None else name

    def averages(self, what: Any) -> None:
        pass

    def enter(self, channel: int) -> bool:
        return False

    def stepped_by_hook(self, channel: int) -> None:
        pass

    def record_round(self, outcome: Outcome) -> None:
        self.recorded.append(outcome)

    def start(self, channel: int, values: Any, weight: float, *rest: object) -> Ready:
        self.weights.append((channel, weight))
        number = self.next[channel]
        self.next[channel] += 1
        n = len(values)
        mean = (weight * values + np.float32(self.theirs)) / np.float32(weight + 1)
        return Ready(
            Outcome(
                channel=channel,
                round=number,
                mean=mean.astype(np.float32),
                weight=np.full(n, weight + 1, np.float32),
                heard=np.full(n, 3, np.uint64),
                averaged=np.ones(n, np.bool_),
                missed=(),
                waited_for=(1,),
                started_s=0.0,
                scatter_s=0.0,
                gather_s=0.0,
                total_s=0.0,
                expired=False,
            )
        )


class Alone:
    """A crew of one."""

    def __init__(self) -> None:
        self._peer, self.transport = self, SoloTransport(0)

    def take_name(self, name: str | None, kind: str) -> str:
        return kind if name is None else name

    def averages(self, what: Any) -> None:
        pass

    def enter(self, channel: int) -> bool:
        return False

    def stepped_by_hook(self, channel: int) -> None:
        pass

    def record_round(self, outcome: Outcome) -> None:
        pass


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_crew_of_one_has_the_gradients_it_would_have() -> None:
    plain, module = network(), network()
    inputs = torch.randn(8, 6)
    ddp = ragtag.hooks.ddp(module, Alone(), bucket_cap_mb=0.0001)
    for _ in range(3):  # over buckets that are dealt anew
        for model in (plain, ddp):
            model.zero_grad()
            model(inputs).square().sum().backward()
        for name, gradient in gradients(plain).items():
            assert torch.equal(gradient, gradients(module)[name])
    assert not dist.is_initialized()


def test_a_trace_counts_the_steps_of_a_script_that_stays_on_ddp(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / peer_file(0))
    peer = Peer(Place(0, 1, "alone"), SoloTransport(0), None, writer, time.monotonic())
    with ragtag.Crew(peer) as crew:
        ddp = ragtag.hooks.ddp(network(), crew)
        for _ in range(3):
            with ddp.no_sync():
                ddp(torch.randn(8, 6)).sum().backward()
            ddp(torch.randn(8, 6)).sum().backward()
    (leave,) = [one for one in read_run(tmp_path).records() if isinstance(one, Leave)]
    assert leave.steps == 3


def test_gradients_are_the_crew_s_mean_and_no_sync_gathers() -> None:
    module = network()
    crew = Told(theirs=3.0)
    state = CrewState(crew, averager=ragtag.AllReduce())
    ddp = ragtag.hooks.ddp(module, state)
    inputs = torch.randn(8, 6)
    plain = copy.deepcopy(module)
    with ddp.no_sync():
        ddp(inputs).square().sum().backward()
    assert crew.weights == []
    ddp(inputs).square().sum().backward()
    for _ in range(2):
        plain(inputs).square().sum().backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(module)[name], (gradient + 3.0) / 2)
    assert crew.weights == [(GRADIENTS, 1.0)]
    assert crew.configured == [GRADIENTS]
    assert state.outcome is crew.recorded[0]


def step(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad()
    ddp(torch.ones(4, 6)).sum().backward()


def test_models_are_averaged_every_so_often_and_once_at_first() -> None:
    crew = Told(theirs=3.0)
    module = network()
    before = module[0].weight.detach().clone()
    state = CrewState(crew, module, models_every=4)
    ddp = ragtag.hooks.ddp(module, state)
    assert crew.configured == [GRADIENTS, MODELS, INTEGERS]
    torch.testing.assert_close(module[0].weight, (before + 3.0) / 2)
    for _ in range(4):
        step(ddp)
    g, m = GRADIENTS, MODELS
    assert [channel for channel, _ in crew.weights] == [
        m,
        INTEGERS,
        g,
        m,
        g,
        m,
        g,
        g,
    ]  # after 1 and 2 rounds, too
    with torch.no_grad():
        ddp(torch.ones(4, 6))  # an evaluation averages nothing
    before, mean = module[0].weight.detach().clone(), module[1].running_mean.clone()
    step(ddp)
    assert [channel for channel, _ in crew.weights[8:]] == [m, g]
    torch.testing.assert_close(module[0].weight, (before + 3.0) / 2)
    assert not torch.equal(module[1].running_mean, mean)


@pytest.mark.parametrize(
    ("every", "after"),
    [(1, [1, 2, 3, 4]), (2, [1, 2, 4, 6]), (4, [1, 2, 4, 8]), (32, [1, 2, 4, 8, 16, 32, 64])],
)
def test_models_are_due_after_powers_of_two_and_then_every_so_often(every: int, after: list[int]) -> None:
    due = [r for r in range(1, after[-1] + 1) if models_due(r, every) > models_due(r - 1, every)]
    assert due == after
    assert all(models_due(r, every) - models_due(r - 1, every) <= 1 for r in range(1, 200))


def test_who_missed_many_rounds_has_no_weight_until_it_has_a_model() -> None:
    crew = Told(theirs=3.0)
    module = network()
    state = CrewState(crew, module, models_every=100)
    ddp = ragtag.hooks.ddp(module, state)
    for _ in range(66):
        step(ddp)  # the next round of models is after 100
    crew.next[GRADIENTS] += CATCH_UP
    step(ddp)
    step(ddp)
    assert crew.weights[-1] == (GRADIENTS, 1.0), "a few missed rounds cost nothing"
    crew.next[GRADIENTS] += 1
    step(ddp)
    assert state.behind
    step(ddp)
    assert crew.weights[-1] == (GRADIENTS, 0.0)
    crew.next[GRADIENTS] = 105  # the others averaged models meanwhile, without it
    step(ddp)
    step(ddp)
    assert crew.weights[-1] == (GRADIENTS, 0.0)
    crew.next[GRADIENTS] = 199
    step(ddp)
    step(ddp)
    assert crew.weights[-2:] == [(MODELS, 0.0), (GRADIENTS, 1.0)]
    assert not state.behind
    torch.testing.assert_close(module[0].weight, torch.full((5, 6), 3.0))


def test_nan_is_named_and_training_goes_on() -> None:
    crew = Told()
    module = network()
    ddp = ragtag.hooks.ddp(module, CrewState(crew, module))
    step(ddp)
    sent = crew.weights.count((GRADIENTS, 1.0))
    with pytest.raises(ragtag.NotFinite, match=r"gradient of '0.weight' has 30 NaN .* Nothing was sent"):
        (ddp(torch.ones(4, 6)).sum() * torch.nan).backward()
    assert crew.weights.count((GRADIENTS, 1.0)) == sent
    step(ddp)
    assert crew.weights.count((GRADIENTS, 1.0)) == sent + 1
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(module).values())


def test_a_model_that_is_not_the_one_inside_is_refused() -> None:
    state = CrewState(Told(), torch.nn.Linear(2, 2))
    ddp = ragtag.hooks.ddp(torch.nn.Linear(3, 1), state)
    with pytest.raises(RuntimeError, match="give CrewState the module that is inside DDP"):
        ddp(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"codec": "fp8"}, "codec is 'fp8'; it is one of"),
        ({"models_every": 0}, "models_every is 0"),
        ({"models_every": 2.5}, "models_every is 2.5"),
        ({"averager": ragtag.Centre(ragtag.schedules.Asynchronous())}, "mixed with those of earlier steps"),
        ({"weight": -1.0}, "the weight of this peer is -1"),
        ({"deadline_s": -1.0}, "give seconds above 0"),
        ({"weight": "much"}, "weight is 'much'; it is a number"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CrewState(Told(), **options)


def test_a_model_in_the_place_of_the_crew_is_named() -> None:
    model: Any = network()
    crew: Any = Told()
    for make in (ragtag.hooks.ddp, lambda one, other: CrewState(other, one)):
        with pytest.raises(TypeError, match=r"crew is a Sequential; give what ragtag\.join\(\) returned"):
            make(model, model)
        with pytest.raises(TypeError, match=r"model is .*; write model=your torch\.nn\.Module"):
            make(crew, crew)
    with pytest.raises(TypeError, match=r"model is .*; write model=your torch\.nn\.Module"):
        ragtag.hooks.SparseState(model=crew)


@pytest.mark.parametrize("option", ["process_group", "init_sync", "broadcast_buffers"])
def test_what_the_group_of_one_is_for_cannot_be_given(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: ragtag.hooks.ddp sets"):
        ragtag.hooks.ddp(network(), Told(), **{option: None})


def test_models_cannot_be_averaged_without_one() -> None:
    with pytest.raises(RuntimeError, match="give CrewState the model"):
        CrewState(Told()).average_models()


def test_a_group_of_one_is_nobody_s_default() -> None:
    group = alone()
    assert (group.size(), group.rank()) == (1, 0)
    assert not dist.is_initialized()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_table_gives_back_what_it_took(sizes: list[int], random: Any) -> None:
    parameters = [torch.zeros(size) for size in sizes]
    table = Table([f"p{at}" for at in range(len(sizes))], parameters, fp32, "rps")
    order = list(range(len(sizes)))
    random.shuffle(order)
    cut = random.randrange(len(sizes) + 1)
    buckets = [
        (numbers, torch.randn(sum(sizes[n] for n in numbers)))
        for numbers in (order[:cut], order[cut:])
        if numbers
    ]
    for numbers, bucket in buckets:
        table.put(numbers, bucket)
    assert table.fault() is None
    for numbers, bucket in buckets:
        out = torch.empty_like(bucket)
        table.take(table.values.copy(), numbers, out)
        assert torch.equal(out, bucket)
    buckets[0][1][0] = torch.inf
    table.put(*buckets[0])
    assert table.fault() == f"gradient of 'p{buckets[0][0][0]}' has 0 NaN and 1 infinite of " + (
        f"{sizes[buckets[0][0][0]]} values"
    )


def test_an_averager_may_be_named_here_too() -> None:
    assert CrewState(Told(), averager="moshpit=4")._averaged._averager.name == ragtag.Moshpit(group=4).name
    with pytest.raises(TypeError, match=r"call it: averager=RPS\(\)"):
        CrewState(Told(), averager=ragtag.RPS)  # type: ignore[arg-type]
