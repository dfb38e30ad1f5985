"""Tensors become one table and come back, and those that can live in the table do."""

from __future__ import annotations

import copy
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ragtag.core.schema import offsets_of
from ragtag.core.types import Floats
from ragtag.training.tensors.bucket import Bucket
from ragtag.training.tensors.layout import Part

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def bucket_of(*tensors: torch.Tensor, elements: int = 8, share: bool = True) -> Bucket:
    parts = [Part(f"t{i}", "parameter", lambda t=t: t) for i, t in enumerate(tensors)]
    return Bucket(parts, elements, share=share)


def all_chunks(bucket: Bucket) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(len(bucket.values), np.bool_)


def inside(tensor: torch.Tensor, bucket: Bucket) -> bool:
    start = bucket.values.ctypes.data
    return start <= tensor.data_ptr() < start + bucket.values.nbytes


def test_parameters_live_in_the_table() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    bucket = bucket_of(*model.parameters())
    for parameter in model.parameters():
        assert inside(parameter, bucket)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with torch.no_grad():
        model[2].weight.fill_(7.0)
    at = offsets_of(bucket.specs)[4]
    assert (bucket.flatten().reshape(-1)[at : at + 8] == 7.0).all()


def test_flattening_and_restoring_allocate_nothing_of_the_models_size() -> None:
    parameters = [nn.Parameter(torch.randn(500, 500)) for _ in range(4)]
    bucket = bucket_of(*parameters, elements=272)
    mean = bucket.flatten().copy()
    averaged = all_chunks(bucket)
    tracemalloc.start()
    values = bucket.flatten()
    bucket.restore(mean, averaged)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values is bucket.values
    assert peak < 0.01 * values.nbytes


def test_the_gaps_and_the_end_are_zeros() -> None:
    bucket = bucket_of(torch.ones(3), torch.ones(17), elements=10)
    values = bucket.flatten().reshape(-1)
    assert values.shape == (50,)
    assert values.nonzero()[0].tolist() == [0, 1, 2, *range(16, 33)]


def test_every_tensor_begins_at_64_bytes() -> None:
    tensors = [nn.Parameter(torch.ones(n)) for n in (1, 5, 16, 17)]
    bucket = bucket_of(*tensors)
    base = bucket.values.ctypes.data
    assert [(t.data_ptr() - base) % 64 for t in tensors] == [0, 0, 0, 0]


def test_channels_last_lives_in_the_table_in_its_own_order() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    expected = weight.detach().clone()
    bucket = bucket_of(weight)
    assert inside(weight, bucket)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight, expected)
    assert bucket.specs[0].order == (0, 2, 3, 1)
    in_memory = expected.permute(0, 2, 3, 1).reshape(-1).numpy()
    np.testing.assert_array_equal(bucket.flatten().reshape(-1)[:48], in_memory)


def test_size_1_dimensions_do_not_make_an_order() -> None:
    weight = torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last)
    assert bucket_of(weight).specs[0].order == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_copied(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.arange(10.0).to(dtype))
    own = weight.data_ptr()
    bucket = bucket_of(weight)
    mean = bucket.flatten() * 2
    bucket.restore(mean, all_chunks(bucket))
    assert weight.data_ptr() == own
    assert weight.dtype == dtype
    assert weight.tolist() == [2.0 * i for i in range(10)]


def test_float64_keeps_its_digits_where_nothing_was_averaged() -> None:
    weight = nn.Parameter(torch.full((16,), 0.1, dtype=torch.float64))
    bucket = bucket_of(weight)
    mean = bucket.flatten() + 1
    bucket.restore(mean, np.array([True, False]))
    assert (weight[8:] == 0.1).all()
    torch.testing.assert_close(weight[:8], torch.full((8,), 1.1, dtype=torch.float64), rtol=1e-6, atol=0)


def test_restore_takes_only_what_was_averaged() -> None:
    weight = nn.Parameter(torch.zeros(32))
    bucket = bucket_of(weight)
    bucket.flatten()
    ones = np.ones_like(bucket.values)
    bucket.restore(ones, np.array([False, True, False, False]))
    assert weight.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
    bucket.restore(ones, np.array([True, True, True, False]))
    assert weight.tolist() == [1.0] * 24 + [0.0] * 8
    bucket.restore(ones * 5, np.zeros(4, np.bool_))
    assert weight.tolist() == [1.0] * 24 + [0.0] * 8


def test_loading_a_state_keeps_parameters_in_the_table() -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    bucket = bucket_of(*model.parameters())
    model.load_state_dict(other.state_dict())
    assert all(inside(p, bucket) for p in model.parameters())
    np.testing.assert_array_equal(bucket.flatten().reshape(-1)[:9], other.weight.detach().numpy().reshape(-1))


def test_new_memory_is_noticed_and_moves_in_again() -> None:
    weight = nn.Parameter(torch.zeros(4))
    bucket = bucket_of(weight)
    weight.data = torch.full((4,), 3.0)
    assert not inside(weight, bucket)
    assert (bucket.flatten().reshape(-1)[:4] == 3.0).all()
    assert inside(weight, bucket)


def test_a_transposed_square_is_noticed() -> None:
    weight = nn.Parameter(torch.arange(9.0).reshape(3, 3))
    bucket = bucket_of(weight)
    weight.data = weight.data.t()
    expected = weight.detach().clone()
    assert bucket.flatten().reshape(-1)[:9].tolist() == expected.reshape(-1).tolist()
    assert torch.equal(weight, expected)
    bucket.restore(bucket.values + 1, all_chunks(bucket))
    assert torch.equal(weight, expected + 1)


def test_a_new_dtype_is_copied_from_then_on() -> None:
    model = nn.Linear(3, 3)
    bucket = bucket_of(*model.parameters())
    model.to(torch.bfloat16)
    bucket.flatten()
    bucket.restore(np.full_like(bucket.values, 2.0), all_chunks(bucket))
    assert model.weight.dtype == torch.bfloat16
    assert (model.weight == 2).all()


def test_a_new_shape_is_refused_by_name() -> None:
    weight = nn.Parameter(torch.zeros(4))
    bucket = bucket_of(weight)
    weight.data = torch.zeros(5)
    with pytest.raises(ValueError, match=r"parameter 't0' has shape \(5,\) now and had \(4,\)"):
        bucket.flatten()


def test_tensors_in_one_storage_stay_tied() -> None:
    base = torch.zeros(8)
    first, second = nn.Parameter(base[:]), nn.Parameter(base[4:])
    bucket = bucket_of(first, second)
    assert not bucket.shared(0)
    assert not bucket.shared(1)
    with torch.no_grad():
        first.fill_(1.0)
    assert (second == 1).all()


def test_a_view_of_other_memory_stays_where_it_is() -> None:
    base = torch.zeros(8)
    weight = nn.Parameter(base[:4])
    bucket = bucket_of(weight)
    bucket.restore(bucket.flatten() + 1, all_chunks(bucket))
    assert base.tolist() == [1.0] * 4 + [0.0] * 4


def test_tied_after_the_start_stays_tied() -> None:
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    bucket = bucket_of(first, second)
    second.data = first.data
    bucket.flatten()
    with torch.no_grad():
        first.fill_(5.0)
    assert (second == 5).all()


def test_memory_shared_between_processes_stays_where_it_is() -> None:
    weight = nn.Parameter(torch.zeros(4).share_memory_())
    bucket = bucket_of(weight)
    assert not bucket.shared(0)
    assert weight.is_shared()


def test_a_buffer_may_be_replaced_by_its_module() -> None:
    holder = {"buffer": torch.zeros(4)}
    bucket = Bucket([Part("b", "buffer", lambda: holder["buffer"])], 8)
    holder["buffer"] = torch.ones(4)
    assert bucket.flatten().sum() == 4
    bucket.restore(bucket.values * 3, all_chunks(bucket))
    assert holder["buffer"].tolist() == [3.0] * 4


def test_autograd_notices_that_values_were_replaced() -> None:
    weight = nn.Parameter(torch.ones(4))
    bucket = bucket_of(weight)
    loss = (weight * weight).sum()
    bucket.flatten()
    bucket.restore(bucket.values * 3, all_chunks(bucket))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_averaged_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"parameter 't0' is torch\.complex64"):
        bucket_of(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"'t1' is torch\.int64"):
        bucket_of(torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="sparse"):
        bucket_of(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="overlaps itself"):
        bucket_of(torch.zeros(1).expand(5))
    with pytest.raises(ValueError, match="run the model once"):
        bucket_of(*nn.LazyLinear(3).parameters())
    with pytest.raises(ValueError, match="meta device"):
        bucket_of(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="nothing to average"):
        bucket_of(torch.zeros(0))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any shape and dtype, any order of dimensions in memory, with and without gaps."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    in_memory = [shape[d] for d in order] + [draw(st.sampled_from([1, 1, 2]))]
    memory = torch.arange(float(np.prod(in_memory))).to(draw(st.sampled_from(DTYPES)))
    return nn.Parameter(
        memory.reshape(in_memory)[..., 0].permute([order.index(d) for d in range(len(shape))])
    )


@given(st.lists(tensors(), min_size=1, max_size=5), st.integers(1, 40), st.booleans(), st.data())
def test_there_and_back_for_any_shape_dtype_and_layout(
    parameters: list[torch.Tensor], elements: int, share: bool, data: st.DataObject
) -> None:
    parameters.append(nn.Parameter(torch.zeros(1)))
    before = [p.detach().clone() for p in parameters]
    strides = [p.stride() for p in parameters]
    bucket = bucket_of(*parameters, elements=elements, share=share)
    values = bucket.flatten()
    assert values.shape[1] == elements
    for at, (parameter, expected) in enumerate(zip(parameters, before, strict=True)):
        assert torch.equal(parameter, expected)
        assert torch.equal(bucket.on_host(at), expected.float())
        assert inside(parameter, bucket) == bucket.shared(at)
    mean: Floats = values + np.float32(1.0)
    averaged = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    bucket.restore(mean, averaged)
    flat = np.repeat(averaged, elements)
    for at, (parameter, expected) in enumerate(zip(parameters, before, strict=True)):
        start = offsets_of(bucket.specs)[at]
        moved = torch.from_numpy(flat[start : start + parameter.numel()].astype(np.float32))
        moved = moved.as_strided(bucket.on_host(at).shape, bucket.on_host(at).stride())
        assert torch.equal(parameter.detach(), (expected + moved).to(parameter.dtype))
        assert parameter.stride() == strides[at]


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
def test_on_a_gpu_parameters_live_in_one_flat_tensor_there() -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20)).cuda()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bucket = bucket_of(*model.parameters(), elements=16)
    assert all(bucket.shared(at) for at in range(4))
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    assert bucket.flat.is_pinned()
    values = bucket.flatten()
    np.testing.assert_array_equal(values.reshape(-1)[:600], before["0.weight"].cpu().numpy().reshape(-1))
    bucket.restore(values + 1, all_chunks(bucket))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] + 1)


@cuda
def test_on_a_gpu_streams_are_kept_in_order() -> None:
    weight = nn.Parameter(torch.zeros(4_000_000, device="cuda"))
    bucket = bucket_of(weight, elements=272)
    for number in range(8):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            assert (bucket.flatten().reshape(-1)[:4_000_000] == number).all()
            bucket.restore(bucket.values + 1, all_chunks(bucket))
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())


@cuda
def test_a_model_on_both_devices_and_one_that_moves() -> None:
    first, second = nn.Linear(5, 5).cuda().bfloat16(), nn.Linear(5, 5)
    bucket = bucket_of(*first.parameters(), *second.parameters())
    bucket.flatten()
    bucket.restore(np.full_like(bucket.values, 2.0), all_chunks(bucket))
    assert (first.weight == 2).all()
    assert (second.weight == 2).all()
    second.cuda()
    bucket.flatten()
    bucket.restore(np.full_like(bucket.values, 3.0), all_chunks(bucket))
    assert (second.weight == 3).all()
    assert bucket.shared(2)
