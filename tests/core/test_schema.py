"""What is averaged is compared in full, and by hash."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragtag.core.schema import ALIGN, SCHEMA_BYTES_MAX, VALUES_MAX, Schema, TensorSpec

CONV = TensorSpec("conv2.weight", (32, 16, 3, 3), "float32")
BIAS = TensorSpec("conv2.bias", (32,), "float32")
HERE = Schema((CONV, BIAS), "fp32", "rps")


def changed(schema: Schema = HERE, **fields: object) -> Schema:
    return msgspec.structs.replace(schema, **fields)


@dataclass
class Case:
    there: Schema
    expected: str


CASES = [
    Case(
        changed(tensors=(msgspec.structs.replace(CONV, shape=(64, 16, 3, 3)), BIAS)),
        "tensor 0: 'conv2.weight' (32, 16, 3, 3) float32 here, (64, 16, 3, 3) float32 there",
    ),
    Case(
        changed(tensors=(CONV, msgspec.structs.replace(BIAS, dtype="bfloat16"))),
        "tensor 1: 'conv2.bias' (32,) float32 here, (32,) bfloat16 there",
    ),
    Case(
        changed(tensors=(BIAS, CONV)),
        "tensor 0: 'conv2.weight' (32, 16, 3, 3) float32 here, 'conv2.bias' (32,) float32 there",
    ),
    Case(
        changed(tensors=(msgspec.structs.replace(CONV, order=(0, 2, 3, 1)), BIAS)),
        "tensor 0: 'conv2.weight' (32, 16, 3, 3) float32 here, "
        "(32, 16, 3, 3) float32 in memory order (0, 2, 3, 1) there",
    ),
    Case(changed(tensors=(CONV,)), "tensor 1: 'conv2.bias' (32,) float32 here, none there"),
    Case(changed(tensors=(CONV, BIAS, BIAS)), "tensor 2: none here, 'conv2.bias' (32,) float32 there"),
    Case(changed(method="ring"), "this peer averages by rps, the other ring"),
    Case(changed(codec="bf16"), "this peer sends as fp32, the other bf16"),
    Case(changed(content="gradients"), "this peer averages models, the other gradients"),
]


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (
            "k (a 1, b 2, c 3)",
            "k (a 1, b 4, c 5)",
            "this peer averages k with b 2, c 3, the other with b 4, c 5",
        ),
        ("k (a 1)", "k (a 2)", "this peer averages k with a 1, the other with a 2"),
        ("k (a 1)", "j (a 2)", "this peer averages k (a 1), the other j (a 2)"),
        ("k (a 1)", "k (a 1, b 2)", "this peer averages k (a 1), the other k (a 1, b 2)"),
        ("k (a 1)", "k (a 1", "this peer averages k (a 1), the other k (a 1"),
    ],
)
def test_of_settings_those_that_differ_are_named(here: str, there: str, expected: str) -> None:
    assert changed(HERE, content=here).difference(changed(HERE, content=there)) == expected


@pytest.mark.parametrize("case", CASES, ids=[case.expected[:40] for case in CASES])
def test_the_first_difference_is_named(case: Case) -> None:
    assert HERE.difference(case.there) == case.expected
    assert HERE.hash32() != case.there.hash32()


def test_the_same_schema_differs_in_nothing() -> None:
    again = Schema.decode(HERE.encode())
    assert again == HERE
    assert HERE.difference(again) is None
    assert again.hash32() == HERE.hash32()
    assert 0 <= HERE.hash32() < 1 << 32


def test_the_hash_is_the_same_on_every_machine() -> None:
    assert HERE.hash32() == 2171582886


def test_a_chunk_of_several_tensors_lies_between_edges_alone() -> None:
    sizes = (544, 160, 16, 1000, 16)
    tensors = tuple(TensorSpec(f"t{i}", (n,), "float32") for i, n in enumerate(sizes))
    assert Schema(tensors, "fp32", "rps").edges(272) == (2, 3, 6, 7)
    assert Schema(tensors[:1], "fp32", "rps").edges(272) == ()


def test_tensors_begin_at_multiples() -> None:
    assert HERE.offsets == (0, 4608, 4640)
    assert Schema((BIAS, TensorSpec("s", (), "float32"), BIAS), "", "").offsets == (0, 32, 32 + ALIGN, 80)
    assert HERE.n_values == 4640
    assert HERE.n_chunks(272) == 18


@given(st.binary(max_size=200))
def test_garbage_is_no_schema(data: bytes) -> None:
    with pytest.raises(ValueError, match="no schema"):
        Schema.decode(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_another_schema_or_none(at: int, value: int) -> None:
    data = bytearray(HERE.encode())
    at %= len(data)
    same = data[at] == value
    data[at] = value
    try:
        assert (Schema.decode(data) == HERE) is same
    except ValueError:
        assert not same


@pytest.mark.parametrize(
    "shape", ["[-1]", f"[{VALUES_MAX + 1}]", "[2000000,2000000]", "[1.5]", '["a"]', "[" + "1," * 64 + "1]"]
)
def test_a_shape_that_is_none_is_refused(shape: str) -> None:
    good = '{"tensors":[{"name":"a","shape":[1],"dtype":"float32"}],"codec":"c","method":"m"}'
    assert Schema.decode(good.encode()).n_values == ALIGN
    data = good.replace("[1]", shape)
    with pytest.raises(ValueError, match="no schema"):
        Schema.decode(data.encode())


def test_size_is_bounded_both_ways() -> None:
    many = changed(tensors=tuple(TensorSpec("n" * 500, (1,), "float32") for _ in range(4000)))
    with pytest.raises(ValueError, match="average fewer tensors on one channel"):
        many.encode()
    with pytest.raises(ValueError, match="at most 1000000 are read"):
        Schema.decode(b" " * (SCHEMA_BYTES_MAX + 1))
