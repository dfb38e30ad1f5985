"""The sparse hook's parts, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import ragtag
from ragtag.codecs.sparse.density import Density
from ragtag.codecs.sparse.options import Options
from ragtag.core.wire import CHUNK_BYTES
from ragtag.hooks import message as wire
from ragtag.hooks.backward import Names
from ragtag.hooks.message import Head, complaint, fit, pack, unpack
from ragtag.hooks.plan import Memory, Plan

# -- Messages


@given(
    st.integers(1, 5),
    st.integers(1, CHUNK_BYTES),
    st.integers(0, 6 * CHUNK_BYTES),
    st.integers(0, 2**31),
)
def test_a_message_comes_back_as_far_as_it_fits(fragments: int, used: int, room: int, seed: int) -> None:
    chunks = np.random.default_rng(seed).integers(1, 256, (fragments, CHUNK_BYTES)).astype(np.uint8)
    chunks[-1, used:] = 0
    fitted = fit(chunks, room)
    assert fitted.wanted == (fragments - 1) * CHUNK_BYTES + used
    assert len(fitted.payload) <= room
    assert (
        fitted.fragments == fragments or (fitted.fragments + 1) * CHUNK_BYTES > room or fitted.wanted > room
    )
    head, got = unpack(pack(Head(7, fitted.wanted, len(fitted.payload)), fitted.payload, room))
    assert head == Head(7, fitted.wanted, len(fitted.payload))
    np.testing.assert_array_equal(got, chunks[: fitted.fragments])


def test_nothing_to_send_is_a_head() -> None:
    fitted = fit(np.zeros((0, CHUNK_BYTES), np.uint8), 64)
    assert (fitted.wanted, fitted.fragments) == (0, 0)
    head, chunks = unpack(pack(Head(1), fitted.payload, 0))
    assert (head.fault, len(chunks)) == (wire.FINE, 0)


@pytest.mark.parametrize("sent", [-1, 65, 1 << 40])
def test_a_length_that_cannot_be_is_refused(sent: int) -> None:
    with pytest.raises(ValueError, match="in a room of 64"):
        unpack(pack(Head(1, 0, sent), np.zeros(0, np.uint8), 64))


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8", "2bit"])
@pytest.mark.parametrize("d", [1, 100, 70_000, 1_000_000])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.5, 1.0])
def test_the_first_room_is_enough_for_top_k(values: Any, d: int, ratio: float) -> None:
    plan = plan_of([d], Options(Density(ratio), values=values))
    plan.room = plan.first_room(0)
    fitted = plan.prepare(np.random.default_rng(1).standard_normal(d).astype(np.float32), 0)
    assert fitted.wanted == len(fitted.payload) <= plan.room
    # beside 2 bits the 16 of an index, which ranks without numba need, weigh more
    assert plan.room < (5 if values == "2bit" else 3) * fitted.wanted + 256
    assert plan.returned == 0


# -- Plans


def plan_of(
    sizes: list[int], options: Options, memories: dict[int, Memory] | None = None, **other: int
) -> Plan:
    settings = {"dense_below": 1, "rank": 0, "seed": 0, **other}
    kept = {} if memories is None else memories
    return Plan(range(len(sizes)), sizes, options, memories=kept, **settings)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 40))
def test_a_bucket_is_parted_and_put_together(sizes: list[int], dense_below: int) -> None:
    plan = plan_of(sizes, Options(), dense_below=dense_below)
    flat = np.arange(sum(sizes), dtype=np.float32)
    sparse, dense = plan.gather(flat, sparse=True), plan.gather(flat, sparse=False)
    assert (len(sparse), len(dense)) == (plan.n_sparse, plan.n_dense)
    np.testing.assert_array_equal(plan.scatter(sparse, dense), flat)


@given(st.integers(0, 2**31), st.booleans())
def test_what_is_remembered_moves_to_other_buckets(seed: int, momentum: bool) -> None:
    random = np.random.default_rng(seed)
    options = Options(Density(0.1), momentum=0.9 if momentum else 0.0)
    sizes = [30, 5, 200]
    plan = plan_of(sizes, options, dense_below=10)
    plan.room = 1 << 16
    plan.prepare(random.standard_normal(sum(sizes)).astype(np.float32), 0)
    plan.dense_average(np.ones(5, np.float32))
    before = plan.memories()
    plan.settle(delivered=False)
    for number, memory in plan.memories().items():  # what was under way counted as not sent
        for kind, values in memory.items():
            np.testing.assert_allclose(values, before[number][kind], atol=1e-6)
    kept = dict(before)
    halves = [
        Plan(numbers, [sizes[n] for n in numbers], options, dense_below=10, rank=0, seed=0, memories=kept)
        for numbers in ([2], [1, 0])
    ]
    assert not kept
    after = halves[0].memories() | halves[1].memories()
    assert after.keys() == before.keys()
    for number, memory in before.items():
        assert memory.keys() == after[number].keys()
        for kind, values in memory.items():
            np.testing.assert_array_equal(values, after[number][kind])


def test_what_does_not_fit_goes_back() -> None:
    d = 20_000
    plan = plan_of([d], Options(Density(0.5), values="fp32"))
    plan.room = 3 * CHUNK_BYTES
    gradient = np.random.default_rng(0).standard_normal(d).astype(np.float32)
    fitted = plan.prepare(gradient, 0)
    assert (fitted.fragments, len(fitted.payload)) == (3, 3 * CHUNK_BYTES)
    assert fitted.wanted > 3 * CHUNK_BYTES
    returned = plan.returned
    plan.settle(delivered=True)
    assert int(np.count_nonzero(plan.feedback.residual)) == d // 2 + returned
    plan.room = plan.next_room([Head(0, fitted.wanted)], 0)
    assert plan.prepare(gradient, 1).wanted <= plan.room


class Bucket:
    """A bucket of DDP's, as far as a plan looks at it."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._parameters = parameters

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return torch.cat([parameter.reshape(-1) for parameter in self._parameters])


def test_ranks_get_the_mean_of_what_all_have_sent() -> None:
    """Three ranks in one process: all of a large parameter sparsely, and a small one densely."""
    n, sizes = 3, [4000, 10]
    bucket: Any = Bucket([torch.zeros(size) for size in sizes])
    flats = np.random.default_rng(0).standard_normal((n, sum(sizes))).astype(np.float32)
    states = [ragtag.hooks.SparseState(ratio=1.0, values="fp32") for _ in range(n)]
    for state in states:
        state._step = 0
    plans = [state._plan(bucket, rank) for rank, state in enumerate(states)]
    offers = [
        (*state._offer(plan, flat), plan.room) for state, plan, flat in zip(states, plans, flats, strict=True)
    ]
    table = np.stack([pack(head, payload, room) for head, payload, _, room in offers])
    dense = np.sum([small for _, _, small, _ in offers], axis=0)
    for state, plan in zip(states, plans, strict=True):
        got = torch.zeros(sum(sizes))
        state._take(plan, state._step, table, dense, got)
        np.testing.assert_allclose(got.numpy(), flats.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_the_first_parameter_that_is_not_finite_is_found() -> None:
    plan = plan_of([4, 6, 5], Options())
    flat = np.ones(15, np.float32)
    assert plan.fault_of(flat, 3) is None
    flat[[5, 6, 12]] = [np.inf, np.nan, np.nan]
    assert plan.fault_of(flat, 3) == Head(3, 0, 0, wire.GRADIENT, 1, 1, 1, 6)
    huge = np.full(15, 3e38, np.float32)  # finite, and its sum is not
    assert plan.fault_of(huge, 3) is None


def test_complaints_are_the_same_in_any_order() -> None:
    names = Names(torch.nn.Linear(2, 3))
    faults = [(2, Head(1, 0, 0, wire.SUM, 1)), (1, Head(1, 0, 0, wire.GRADIENT, 0, 2, 1, 6))]
    said = complaint(faults, names)
    assert said == complaint(faults[::-1], names)
    expected = "rank 1: the gradient of 'weight' has 2 NaN and 1 infinite of 6 values (and 1 more ranks have"
    assert said.startswith(expected)
    assert "overflow in the bucket of 'bias'" in complaint(faults[:1], names)


# -- The state


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratio": 0.0}, "a ratio of 0"),
        ({"ratio": 1.5}, "a ratio of 1.5"),
        ({"ratio": float("nan")}, "a ratio of nan"),
        ({"selection": "best"}, "selection is 'best'; it is one of sampled, exact"),
        ({"values": "fp8"}, "values as 'fp8'"),
        ({"momentum": 1.0}, "a momentum of 1"),
        ({"warm_up": -1}, "a warm-up of -1"),
        ({"dense_below": -1}, "dense_below is -1"),
        ({"decay": 0.0}, "a decay of 0"),
        ({"not_finite": "ignore"}, 'not_finite is \'ignore\': give "raise" or "skip"'),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ragtag.hooks.SparseState(**options)


GOOD: dict[str, Any] = {"format": 1, "step": 3, "skipped": 0, "residual": {}, "velocity": {}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "of format 2, not 1"),
        ({"step": "3"}, "no counts"),
        ({"skipped": -1}, "no counts"),
        ({"residual": None}, "has no 'residual'"),
        ({"residual": {"weight": torch.zeros(2, 2)}}, "residual of 'weight' is no float32 vector"),
        ({"velocity": {"weight": torch.zeros(2, dtype=torch.float64)}}, "no float32 vector"),
        ({"residual": {"weight": torch.tensor([1.0, float("nan")])}}, "values that are not finite"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, Any], said: str) -> None:
    state = ragtag.hooks.SparseState()
    state.load_state_dict(GOOD)
    with pytest.raises(ValueError, match=said):
        state.load_state_dict({**GOOD, **change})


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_a_state_of_another_model_is_refused_when_its_bucket_comes() -> None:
    model = torch.nn.Linear(40, 50)
    state = ragtag.hooks.SparseState(model=model)
    state.load_state_dict({**GOOD, "residual": {"weight": torch.zeros(7)}})
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, ragtag.hooks.sparse)
    with pytest.raises(ValueError, match="residual of 'weight' has 7 values, the parameter has 2000"):
        ddp(torch.ones(2, 40)).sum().backward()


@pytest.mark.usefixtures("world_of_one")
def test_names_are_numbers_where_no_model_is_given() -> None:
    model = torch.nn.Linear(40, 50)
    state = ragtag.hooks.SparseState()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, ragtag.hooks.sparse)
    model.weight.data[3, 4] = torch.inf
    with pytest.raises(ragtag.NotFinite, match=r"the gradient of parameter 0 of shape \(50, 40\) has"):
        ddp(torch.ones(2, 40)).square().sum().backward()
    model.weight.data.zero_()
    ddp.zero_grad()
    ddp(torch.ones(2, 40)).square().sum().backward()  # and all goes on
    assert state.stats.steps == 2
    assert state.stats.skipped == 1
