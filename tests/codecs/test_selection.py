"""Selectors, one table for all: what they select, that it is never empty or unbounded, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ragtag.codecs.sparse.reused import REUSED_MAX, add, add_select_clear, reused, reused_most
from ragtag.codecs.sparse.selection import Selector, require_k
from ragtag.codecs.sparse.threshold import (
    SIDCO_EVERY,
    dgc_sampling,
    gaussian,
    gaussian_k,
    gaussian_strict,
    sidco_exponential,
)
from ragtag.codecs.sparse.topk import chunked, chunked_top_k, exact, randomly, sampled, sampled_top_k, top_k
from ragtag.codecs.sparse.topk_torch import sampled_top_k_tensor
from ragtag.core import fast
from ragtag.core.errors import NotFinite
from tests.codecs.vectors import by_definition, heavy, kinds, vector

SELECTORS = [
    exact,
    sampled,
    randomly,
    chunked(512),
    gaussian,
    gaussian_strict,
    dgc_sampling,
    sidco_exponential,
    reused,
]
EXACT = [exact, sampled, gaussian_strict]
D = 70_000

named = pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: s.name)
needs_numba = pytest.mark.skipif(not fast.available(), reason="numba is not installed (ragtag[fast])")


def holds(selector: Selector, u: np.ndarray, k: int) -> None:
    """What every selection must be."""
    before = u.copy()
    chosen = selector.select(u, k, selector.init(), 7)
    assert u.tobytes() == before.tobytes()
    assert chosen.indices.dtype == np.int64 and chosen.values.dtype == np.float32
    assert 1 <= len(chosen.indices) <= selector.most(k, len(u)) <= len(u)
    assert (np.diff(chosen.indices) > 0).all()
    assert chosen.indices[0] >= 0 and chosen.indices[-1] < len(u)
    assert np.array_equal(chosen.values, u[chosen.indices])


@named
@pytest.mark.parametrize("kind", list(kinds(1)))
def test_never_nothing_and_never_without_bound(selector, kind) -> None:
    for ratio in (0.001, 0.1):
        holds(selector, vector(kind, D), int(D * ratio))


@named
@settings(max_examples=40, deadline=None)
@given(
    u=hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    share=st.floats(0, 1),
)
def test_any_vector_and_any_k(selector, u, share) -> None:
    holds(selector, u, max(1, int(share * len(u))))


@named
def test_sizes_of_nothing_and_one(selector) -> None:
    empty = selector.select(np.zeros(0, np.float32), 5, selector.init(), 7)
    assert len(empty.indices) == len(empty.values) == 0
    one = selector.select(np.zeros(1, np.float32), 1, selector.init(), 7)
    assert one.indices.tolist() == [0]


@pytest.mark.parametrize("selector", EXACT, ids=lambda s: s.name)
@pytest.mark.parametrize("kind", list(kinds(1)))
def test_the_exact_ones_select_what_the_definition_says(selector, kind) -> None:
    u = vector(kind, D)
    for k in (1, 37, 100, D // 10, D - 1, D):
        assert np.array_equal(selector.select(u, k, selector.init(), 7).indices, by_definition(u, k))


@settings(max_examples=150, deadline=None)
@given(
    u=hnp.arrays(np.float32, st.integers(1, 400), elements=st.sampled_from([0.0, -0.0, 1, -1, 2, -3, 1e-45])),
    share=st.floats(0, 1),
    key=st.integers(0, 2**63),
)
def test_ties_go_to_the_lower_index_whatever_the_sample(u, share, key) -> None:
    k = max(1, int(share * len(u)))
    expected = by_definition(u, k)
    assert np.array_equal(top_k(u, k).indices, expected)
    assert np.array_equal(sampled_top_k(u, k, key, sample=64).indices, expected)
    at, values = sampled_top_k_tensor(torch.from_numpy(u), k, key, sample=64, native=True)
    assert np.array_equal(at.numpy(), expected) and np.array_equal(values.numpy(), u[expected])


@needs_numba
@named
@pytest.mark.parametrize("kind", list(kinds(1)))
def test_compiled_and_plain_select_the_same(selector, kind) -> None:
    u = vector(kind, D)
    for k in (1, 100, 5000):
        quick = selector.select(u, k, selector.init(), 11)
        with fast.plain():
            slow = selector.select(u, k, selector.init(), 11)
        assert np.array_equal(quick.indices, slow.indices) and np.array_equal(quick.values, slow.values)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", list(kinds(1)))
def test_tensors_are_selected_from_as_arrays_are(kind, native) -> None:
    u = vector(kind, D)
    for k in (1, 100, D // 10, D):
        at, values = sampled_top_k_tensor(torch.from_numpy(u), k, native=native)
        assert np.array_equal(at.numpy(), by_definition(u, k))
        assert np.array_equal(values.numpy(), u[at.numpy()])


def test_tensors_that_are_refused() -> None:
    for wrong in (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(TypeError, match="float32"):
            sampled_top_k_tensor(wrong, 1)
    with pytest.raises(ValueError, match="flatten"):
        sampled_top_k_tensor(torch.zeros(3, 3), 1)
    with pytest.raises(ValueError, match="k is 4"):
        sampled_top_k_tensor(torch.zeros(3), 4)
    bad = torch.tensor([0.0, 1.0, float("nan")])
    with pytest.raises(NotFinite, match="1 NaN and 0 infinite of 3 values, the first at 2"):
        sampled_top_k_tensor(bad, 1, native=True)
    assert len(sampled_top_k_tensor(torch.zeros(0), 1, native=True)[0]) == 0


@named
@pytest.mark.parametrize("path", ["compiled", "plain"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(selector, path, value) -> None:
    u = heavy(D)
    u[[54_321, 60_000]] = value
    with pytest.raises(NotFinite, match="of 70000 values, the first at 54321"):
        if path == "plain":
            with fast.plain():
                selector.select(u, 100, selector.init(), 7)
        else:
            selector.select(u, 100, selector.init(), 7)


@named
def test_other_kinds_of_vectors_are_refused(selector) -> None:
    for wrong in (np.zeros(9, np.int32), np.zeros(9, np.float64), np.zeros(9, np.bool_)):
        with pytest.raises(TypeError, match="not float32"):
            selector.select(wrong, 1, selector.init(), 7)
    with pytest.raises(TypeError, match="complex values have no order"):
        selector.select(np.zeros(9, np.complex64), 1, selector.init(), 7)
    with pytest.raises(TypeError, match="Tensor"):
        selector.select(torch.zeros(9), 1, selector.init(), 7)
    for wrong in (np.zeros((3, 3), np.float32), np.zeros(18, np.float32)[::2]):
        with pytest.raises(ValueError, match="flatten"):
            selector.select(wrong, 1, selector.init(), 7)


@named
@pytest.mark.parametrize("k", [0, -1, 10])
def test_a_k_of_nothing_or_of_more_than_there_is_is_refused(selector, k) -> None:
    with pytest.raises(ValueError, match=f"k is {k}"):
        selector.select(np.ones(9, np.float32), k, selector.init(), 7)


def test_a_k_for_nothing() -> None:
    require_k(3, 0)
    with pytest.raises(ValueError, match="at least 1"):
        require_k(0, 0)


def test_a_sample_that_misleads_is_doubled_and_given_up() -> None:
    """Large values only where the stride never looks, then only where it does: still exact."""
    u = heavy(1 << 18)
    u[::8] = 0.0
    for offset in range(8):
        there = np.roll(u, offset)
        assert np.array_equal(sampled_top_k(there, 4000, 5).indices, by_definition(there, 4000))


def test_random_k_is_uniform_and_named_by_its_key() -> None:
    u = heavy(1000)
    counts = np.zeros(1000)
    for key in range(2000):
        counts[randomly.select(u, 50, randomly.init(), key).indices] += 1
    assert abs(counts.mean() - 100) < 1e-9
    assert counts.std() == pytest.approx(np.sqrt(2000 * 0.05 * 0.95), rel=0.15)
    first, again, other = (randomly.select(u, 50, randomly.init(), key).indices for key in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_chunked_gives_every_chunk_its_share_and_a_short_one_too() -> None:
    u = heavy(10_050)
    chosen = chunked_top_k(u, 100, 100)
    for start in range(0, 10_000, 100):
        inside = chosen.indices[(chosen.indices >= start) & (chosen.indices < start + 100)] - start
        assert np.array_equal(inside, by_definition(u[start : start + 100], 1))
    assert (chosen.indices >= 10_000).sum() == 1
    with pytest.raises(ValueError, match="chunk of 0"):
        chunked_top_k(u, 100, 0)


def test_gaussian_k_follows_the_fit_where_it_holds_and_not_where_not() -> None:
    normal = vector("normal", D)
    assert 2 / 3 * 1000 <= len(gaussian_k(normal, 1000).indices) <= 4 / 3 * 1000
    flat = np.linspace(-1, 1, D, dtype=np.float32)  # no tail: the threshold jumps over where it should be
    assert len(gaussian_k(flat, 100).indices) == gaussian.most(100, D) == 6400
    assert np.array_equal(gaussian_k(flat, 100, strict=True).indices, by_definition(flat, 100))


def test_sidco_judges_the_mean_count_of_some_rounds() -> None:
    """One round that is off among rounds that fit adds no stage; its state says what it has seen since."""
    u, state = heavy(D), sidco_exponential.init()
    seen = 0
    for round_ in range(1, SIDCO_EVERY):
        seen += len(sidco_exponential.select(u, 100, state, 0).indices)
        assert state.tolist() == [state[0], seen, round_]
    sidco_exponential.select(u, 100, state, 0)
    assert state[1:].tolist() == [0, 0], "it begins anew"


def test_sidco_adds_stages_until_its_count_fits() -> None:
    u, state = heavy(D), sidco_exponential.init()
    counts = [len(sidco_exponential.select(u, 100, state, 0).indices) for _ in range(30)]
    assert state[0] > 1
    assert abs(counts[-1] / 100 - 1) < abs(counts[0] / 100 - 1)


def test_a_threshold_serves_until_it_has_aged_or_does_not_fit() -> None:
    u, state = heavy(D), reused.init()
    first = reused.select(u, 100, state, 0)
    assert np.array_equal(first.indices, by_definition(u, 100)) and state[1] == 1
    assert len(reused.select(u * np.float32(1.02), 100, state, 0).indices) > 100 and state[1] == 2
    assert len(reused.select(u * np.float32(3), 100, state, 0).indices) == 100 and state[1] == 1
    for round_ in range(2, REUSED_MAX + 1):
        reused.select(u * np.float32(3), 100, state, 0)
        assert state[1] == round_
    reused.select(u * np.float32(3), 100, state, 0)
    assert state[1] == 1


@pytest.mark.parametrize("path", ["compiled", "plain"])
def test_fused_is_add_select_and_clear(path) -> None:
    with fast.plain() if path == "plain" else fast_as_it_is():
        residual, state = np.zeros(D, np.float32), reused.init()
        unfused, other = residual.copy(), reused.init()
        for round_ in range(8):
            gradient = heavy(D, round_)
            chosen = add_select_clear(residual, gradient, 100, state)
            unfused += gradient
            expected = reused.select(unfused, 100, other, 0)
            assert np.array_equal(chosen.indices, expected.indices)
            assert np.array_equal(chosen.values, expected.values)
            unfused[expected.indices] = 0.0
            assert np.array_equal(residual, unfused) and np.array_equal(state, other)
            assert 1 <= len(chosen.indices) <= reused_most(100, D)


class fast_as_it_is:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize("path", ["compiled", "plain"])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 1000, (1 << 17) + 3])
def test_fused_at_the_edges_of_its_blocks(path, size) -> None:
    with fast.plain() if path == "plain" else fast_as_it_is():
        residual, gradient = heavy(size), heavy(size, 2)
        total, k = residual + gradient, max(1, size // 10)
        state = np.array([float(np.sort(np.abs(total))[-k]), 1.0])
        chosen = add_select_clear(residual, gradient, k, state)
        assert np.array_equal(chosen.indices, by_definition(total, k))
        total[chosen.indices] = 0.0
        assert np.array_equal(residual, total)


@pytest.mark.parametrize("path", ["compiled", "plain"])
@pytest.mark.parametrize("serving", [False, True])
def test_fused_leaves_the_residual_clean(path, serving) -> None:
    with fast.plain() if path == "plain" else fast_as_it_is():
        residual, state = heavy(D), np.array([8.0, float(serving)])
        before, gradient = residual.copy(), heavy(D, 2)
        gradient[67_777] = np.nan
        with pytest.raises(
            NotFinite, match="the gradient has 1 NaN and 0 infinite of 70000 values, the first at 67777"
        ):
            add_select_clear(residual, gradient, 3000, state)
        assert np.isfinite(residual).all()
        assert np.allclose(residual, before, rtol=0, atol=1e-5)
        if not serving:
            assert np.array_equal(residual, before)


def test_a_sum_that_overflows() -> None:
    residual, gradient = np.full(200, 3e38, np.float32), np.full(200, 3e38, np.float32)
    with pytest.raises(NotFinite, match="gradient plus residual"):
        add_select_clear(residual, gradient, 10, np.array([1.0, 1.0]))
    assert (residual == np.float32(3e38)).all()
    add(residual, gradient)
    assert (residual == np.finfo(np.float32).max).all()


def test_fused_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="3 values for a residual of 4"):
        add_select_clear(np.zeros(4, np.float32), np.zeros(3, np.float32), 1, reused.init())
    assert (
        len(add_select_clear(np.zeros(0, np.float32), np.zeros(0, np.float32), 1, reused.init()).values) == 0
    )


def test_energy_captured_is_that_of_exact_top_k() -> None:
    u = heavy(1_000_000)
    assert np.array_equal(top_k(u, 1000).values, sampled_top_k(u, 1000).values)


@needs_numba
def test_without_numba_everything_is_there(tmp_path) -> None:
    """In a fresh interpreter in which numba cannot be imported."""
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np\n"
        "from ragtag.codecs.sparse import topk, threshold, reused\n"
        "from ragtag.core import fast\n"
        "assert not fast.available() and not fast.compiled()\n"
        "u = np.arange(100000, dtype=np.float32)\n"
        "assert topk.sampled_top_k(u, 10).indices.tolist() == list(range(99990, 100000))\n"
        "assert len(reused.add_select_clear(u, u, 10, np.zeros(2)).values) == 10\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)
