"""Distance correlation: against dcor, against its own definition, and by what must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragtag.core.seed import generator
from ragtag.privacy import distance_correlation


def drawn(*shape: int, seed: int = 0, name: str = "points", kind: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(generator(seed, name).standard_normal(shape)).to(kind)


def by_definition(x: Tensor, z: Tensor) -> float:
    """Szekely et al. (2007), definitions 3 to 5, written out."""

    def centred(points: Tensor) -> np.ndarray:
        p = points.flatten(1).double().numpy()
        d = np.array([[np.sqrt(((u - v) ** 2).sum()) for v in p] for u in p])
        return d - d.mean(0) - d.mean(1)[:, None] + d.mean()

    a, b = centred(x), centred(z)
    covariance, of_x, of_z = (np.sqrt((u * v).mean()) for u, v in ((a, b), (a, a), (b, b)))
    return float(covariance / np.sqrt(of_x * of_z))


KINDS = ("independent", "dependent", "far from the origin")


def pair(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, z = drawn(96, 48, name="x"), drawn(96, 64, name="z")
    if kind != "independent":
        z = (x @ drawn(48, 64, name="map")).relu() + 0.1 * z
    if kind == "far from the origin":
        x, z = x + 100.0, z - 50.0
    return x.to(dtype), z.to(dtype)


DCORS = {
    ("independent", torch.float32): (0.8285039949841514, 0.6864188697046987),
    ("independent", torch.float64): (0.8285039949386586, 0.6864188696293168),
    ("dependent", torch.float32): (0.9264381489075691, 0.8582876437512832),
    ("dependent", torch.float64): (0.9264381489526002, 0.8582876438347202),
    ("far from the origin", torch.float32): (0.9264381452152127, 0.8582876369098036),
    ("far from the origin", torch.float64): (0.9264381489525882, 0.858287643834698),
}
"""What dcor 0.7 says of each pair, and its square. Its import compiles for 13 s: a slow test asks it anew."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_it_is_dcors(kind: str, dtype: torch.dtype, within: float) -> None:
    x, z = pair(kind, dtype)
    value, square = DCORS[kind, dtype]
    assert float(distance_correlation(x, z)) == pytest.approx(value, rel=within)
    assert float(distance_correlation(x, z, squared=True)) == pytest.approx(square, rel=2 * within)


@pytest.mark.slow
def test_dcor_says_so_and_agrees_at_the_size_of_images() -> None:
    import dcor

    for (kind, dtype), (value, square) in DCORS.items():
        x, z = (side.double().numpy() for side in pair(kind, dtype))
        assert dcor.distance_correlation(x, z) == pytest.approx(value, rel=1e-13)
        assert dcor.distance_correlation_sqr(x, z) == pytest.approx(square, rel=1e-13)
    x, z = drawn(512, 3072, name="x").float(), drawn(512, 4096, name="z").float()
    expected = dcor.distance_correlation(x.double().numpy(), z.double().numpy())
    assert float(distance_correlation(x, z)) == pytest.approx(expected, rel=1e-6)


def test_it_is_its_definition() -> None:
    x, z = drawn(9, 2, 3, name="x"), drawn(9, 4, name="z")
    assert float(distance_correlation(x, z)) == pytest.approx(by_definition(x, z), rel=1e-12)


@pytest.mark.parametrize("rows", [4, 11])
@pytest.mark.parametrize("squared", [False, True])
def test_its_gradient_is_right(rows: int, squared: bool) -> None:
    x, z = drawn(7, 5, name="x").requires_grad_(), drawn(7, 2, 3, name="z").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, z: distance_correlation(x, z, squared=squared, rows=rows), (x, z)
    )


def test_blocks_change_nothing() -> None:
    """Blocks of rows, of which the last is short; and of columns, of which there are 2,100."""
    x, z = drawn(23, 3, name="x"), drawn(23, 2100, name="z").requires_grad_()
    values, gradients = [], []
    for rows in (1, 5, 22, 23, 24):
        z.grad = None
        value = distance_correlation(x, z, rows=rows)
        value.backward()
        assert z.grad is not None
        values.append(float(value.detach()))
        gradients.append(z.grad.clone())
    assert values == pytest.approx([values[-1]] * 5, rel=1e-13)
    assert values[-1] == pytest.approx(by_definition(x, z.detach()), rel=1e-12)
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[-1], rtol=1e-10, atol=1e-15)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(2, 12),
    width=st.integers(1, 6),
    scale=st.floats(1e-6, 1e6),
    shift=st.floats(-10.0, 10.0),
)
def test_what_must_not_change_it(seed: int, n: int, width: int, scale: float, shift: float) -> None:
    x, z = drawn(n, 4, seed=seed, name="x"), drawn(n, width, seed=seed, name="z")
    value = float(distance_correlation(x, z))
    turn, _ = torch.linalg.qr(drawn(width, width, seed=seed, name="turn"))
    order = torch.from_numpy(generator(seed, "order").permutation(n))
    assert 0.0 <= value <= 1.0 + 1e-12
    for other in (
        distance_correlation(z, x),
        distance_correlation(x, scale * z),
        distance_correlation(x, z + shift),
        distance_correlation(x, z @ turn),
        distance_correlation(x[order], z[order]),
    ):
        assert float(other) == pytest.approx(value, rel=1e-6)
    assert float(distance_correlation(x, scale * (x @ torch.linalg.qr(x[:4].T @ x[:4])[0]))) == pytest.approx(
        1.0
    )


def test_independent_samples_have_little_and_the_less_the_more_there_are() -> None:
    few, many = (
        float(distance_correlation(drawn(n, 2, name="x"), drawn(n, 2, name="z"))) for n in (50, 2000)
    )
    assert many < few < 0.4
    assert many < few / 4, "it falls as the root of their number"
    x = drawn(2000, 1, name="x")
    assert float(distance_correlation(x, x.square())) > 0.4, "dependent, though not correlated"


def test_of_what_is_constant_it_is_0_with_a_gradient_of_0() -> None:
    x = drawn(64, 30, name="x").float()
    z = torch.full((64, 1500), 0.1, requires_grad=True)  # .1 is no float32: its mean may differ from it
    value = distance_correlation(x, z)
    value.backward()
    assert float(value.detach()) == 0.0
    assert z.grad is not None and not z.grad.any()
    assert float(distance_correlation(z.detach(), x)) == 0.0


def test_samples_that_are_equal_have_a_finite_gradient() -> None:
    x = drawn(8, 3, name="x").float()
    z = drawn(4, 3, name="z").float().repeat(2, 1).requires_grad_()
    distance_correlation(x, z).backward()
    assert z.grad is not None and z.grad.isfinite().all() and z.grad.any()


def test_nan_is_not_hidden() -> None:
    x, z = drawn(5, 3, name="x"), drawn(5, 3, name="z")
    z[2, 1] = float("nan")
    z.requires_grad_()
    value = distance_correlation(x, z)
    value.backward()
    assert value.isnan()
    assert z.grad is not None and z.grad.isnan().any()


def test_lower_precision_is_computed_in_float32() -> None:
    x, z = drawn(16, 8, name="x").bfloat16(), drawn(16, 4, name="z").bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = distance_correlation(x, z)
    value.backward()
    assert value.dtype == torch.float32 and z.grad is not None and z.grad.dtype == torch.bfloat16
    assert float(value.detach()) == pytest.approx(by_definition(x, z.detach()), rel=1e-6)
    counts = torch.arange(16)
    assert float(distance_correlation(counts, counts)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("x", "z", "options", "said"),
    [
        (torch.zeros(1, 3), torch.zeros(1, 3), {}, "batch of one"),
        (torch.zeros(4, 3), torch.zeros(5, 3), {}, "one row for each sample"),
        (torch.tensor(1.0), torch.zeros(1, 3), {}, "one row for each sample"),
        (torch.zeros(4, 0), torch.zeros(4, 3), {}, "empty"),
        (torch.zeros(4, 3), torch.zeros(4, 3), {"rows": 0}, "rows is 0"),
    ],
)
def test_what_cannot_be_is_refused(x: Tensor, z: Tensor, options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        distance_correlation(x, z, **options)


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        distance_correlation(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.complex64))
