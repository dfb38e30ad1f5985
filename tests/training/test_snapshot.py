"""A snapshot's bytes: the same layout on peers that are alike, and nothing else is ever taken for one."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn
from torch.optim import lr_scheduler

from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.capture import Snapshot, capture
from ragtag.training.state.snapshot import HEADER_BYTES_MAX, layout_of
from ragtag.training.state.tree import DEPTH_MAX, Packer, Unpacker, copy_tree
from tests.training.test_state import adam, crew, net, same, train


def peer(seed: int, steps: int) -> tuple[nn.Module, CrewOptimizer, Any]:
    model = net(seed)
    optimizer = crew(adam(model), model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.2, 2_000)
    train(model, optimizer, seed, seed + steps, scheduler)
    return model, optimizer, scheduler


def test_chunks_of_one_layout_may_come_from_different_donors() -> None:
    donors = [capture(o._averaged, {"lr": s}) for _, o, s in (peer(1, 2), peer(2, 105))]
    a, b = (donor.to_bytes() for donor in donors)
    assert a != b
    layout = layout_of(a)
    assert layout == layout_of(b)
    assert (layout.n_bytes, layout.front_bytes % 8) == (len(a), 0)
    for chunk in (8, 1_024, 4_096):
        pieces = [(a, b)[at // chunk % 2][at : at + chunk] for at in range(0, len(a), chunk)]
        mixed = Snapshot.from_bytes(b"".join(pieces))
        for name, tensor in mixed.model.items():
            choices = torch.stack([donor.model[name].reshape(-1) for donor in donors])
            assert bool((tensor.reshape(-1) == choices).any(0).all()), name
    front = Snapshot.from_bytes(a[: layout.front_bytes] + b[layout.front_bytes :])
    assert (front.step, front.extra["lr"]["last_epoch"]) == (2, 2)
    assert same(dict(front.model), dict(Snapshot.from_bytes(b).model))
    assert layout_of(a[: layout.front_bytes]) == layout
    assert layout_of(capture(peer(1, 2)[1]._averaged).to_bytes()).digest != layout.digest


def test_the_file_is_plain_safetensors_with_the_numbers_first() -> None:
    _, optimizer, scheduler = peer(1, 3)
    data = capture(optimizer._averaged, {"lr": scheduler}, round=17).to_bytes()
    tensors = load(data)
    assert {"__numbers__", "model.1.num_batches_tracked", "optimizer.state.0.exp_avg"} <= set(tensors)
    assert tensors["__numbers__"][:4].tolist() == [3, 17, 0, 0]
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__numbers__"]["data_offsets"][0] == 0
    assert list(header["__metadata__"]) == ["ragtag"]
    assert capture(optimizer._averaged, {"lr": scheduler}, round=17).to_bytes() == data


numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=5)
shapes = st.lists(st.integers(0, 3), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64])
tensors = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, dtypes)
trees = st.recursive(
    numbers | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def snapshot_of(extra: Any) -> Snapshot:
    plain = {"class": "SGD", "defaults": [], "names": [], "param_groups": [], "state": {}}
    return Snapshot(
        3, 4, 1, {"w": torch.arange(5.0), "": torch.zeros(())}, plain, extra={"x": extra}, before=9
    )


@given(tree=trees)
def test_every_tree_comes_back(tree: Any) -> None:
    back = Snapshot.from_bytes(snapshot_of(copy_tree(tree, "tree")).to_bytes())
    assert same(back.extra["x"], tree)
    assert (back.step, back.round, back.since, back.before) == (3, 4, 1, 9)
    assert back.progress == (13, 3)


def test_numbers_of_numpy_are_numbers() -> None:
    tree = copy_tree([np.float64(1.5), np.int32(-3), np.bool_(True), np.float32(0.5), np.str_("x")], "tree")
    assert same(tree, [1.5, -3, True, 0.5, "x"])


def test_names_that_meet_are_kept_apart() -> None:
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.ones(2), "1": torch.zeros(2)}
    assert same(Snapshot.from_bytes(snapshot_of(tree).to_bytes()).extra["x"], tree)


WHOLE = snapshot_of({"f": 1.5, "t": torch.ones(2, dtype=torch.bool), "l": [1, "two", None, (3,)]}).to_bytes()


def read_or_refuse(data: bytes) -> None:
    """Only a snapshot or a ValueError may come of it."""
    try:
        snapshot = Snapshot.from_bytes(data)
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(snapshot, Snapshot)


@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_bytes_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="no snapshot"):
        Snapshot.from_bytes(WHOLE[:length])


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no snapshot"):
        Snapshot.from_bytes(data)


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(at: int, value: int) -> None:
    read_or_refuse(WHOLE[:at] + bytes([value]) + WHOLE[at + 1 :])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 65) | st.sampled_from(["int", "float", "bool", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["str", "big", "tensor", "list", "tuple", "dict", "ordered", "counter"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


def forged(form: Any, numbers: int = 3, **entry: Any) -> bytes:
    tensors = {"__numbers__": torch.zeros(numbers, dtype=torch.int64).view(torch.uint64)}
    body = {"version": 3, "schema": snapshot_of(None).schema_hash, "form": form} | entry
    return save(tensors, {"ragtag": json.dumps(body)})


@given(st.lists(json_values, min_size=6, max_size=8) | json_values, st.integers(0, 6), st.integers(0, 4))
def test_a_forged_form_is_read_or_refused(form: Any, numbers: int, version: int) -> None:
    read_or_refuse(forged(form, numbers, version=version))


@pytest.mark.parametrize(("version", "parts"), [(1, 6), (2, 7)])
def test_files_of_earlier_versions_are_read(version: int, parts: int) -> None:
    """They had no count of the rounds before a run; the first ones no outer momentum."""
    data = snapshot_of({"t": torch.ones(3), "n": 5}).to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entry = json.loads(header["__metadata__"]["ragtag"])
    assert entry["version"] == 3
    tensors = load(data)
    tensors["__numbers__"] = torch.cat([tensors["__numbers__"][:3], tensors["__numbers__"][4:]])
    assert entry["form"].pop(3) == "int"
    entry["form"] = entry["form"][:parts]
    old = save(tensors, {"ragtag": json.dumps(entry | {"version": version})})
    found, whole = Snapshot.from_bytes(old), Snapshot.from_bytes(data)
    assert (found.step, found.outer, found.before) == (whole.step, {}, 0)
    assert same(dict(found.extra), dict(whole.extra))
    with pytest.raises(ValueError, match="8 parts"):
        Snapshot.from_bytes(save(tensors, {"ragtag": json.dumps(entry)}))


def test_what_is_wrong_is_said() -> None:
    def why(data: bytes) -> str:
        with pytest.raises(ValueError) as raised:
            Snapshot.from_bytes(data)
        return str(raised.value)

    header = int.from_bytes(WHOLE[:8], "little")
    assert "cut off" in why(WHOLE[:-1])
    assert "something follows" in why(WHOLE + b"x")
    assert f"at most {HEADER_BYTES_MAX}" in why((1 << 62).to_bytes(8, "little") + b"{" * 100)
    assert "its metadata has no entry 'ragtag'" in why(save({"a": torch.zeros(2)}))
    assert "format version 4, and this ragtag reads 1 to 3" in why(forged([], version=4))
    assert "8 parts" in why(forged([]))
    assert "6 parts" in why(forged([], version=1))
    deep = '{"version":3,"schema":"' + "0" * 32 + '","form":' + "[" * 100_000 + "]" * 100_000 + "}"
    assert "its header is damaged" in why(save(load(WHOLE), {"ragtag": deep}))
    nested: Any = None
    for _ in range(DEPTH_MAX + 2):
        nested = {"list": [nested]}
    assert "nested more than" in why(forged([nested] * 8))
    assert "not those of its schema" in why(WHOLE.replace(b"model.w", b"model.v"))
    lost = WHOLE.replace(b'"extra.x.t"', b'"extra.x.s"')
    assert "tensor 'extra.x.t' is missing" in why(lost)
    assert header + 8 < layout_of(WHOLE).front_bytes < len(WHOLE)
    bad_bool = WHOLE[:-2] + b"\x02\x01"
    assert "neither true nor false" in why(bad_bool)
    more = load(WHOLE) | {"extra.y": torch.zeros(1)}
    text = json.loads(WHOLE[8 : 8 + header])["__metadata__"]["ragtag"]
    assert "tensor 'extra.y' belongs to nothing" in why(save(more, {"ragtag": text}))
    none = dict(json.loads(WHOLE[8 : 8 + header]), __metadata__={"ragtag": text}, huge={})
    none["huge"] = {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}
    body = json.dumps(none).encode()
    assert "'huge' of F32" in why(len(body).to_bytes(8, "little") + body + WHOLE[8 + header :])


def test_a_header_that_names_the_numbers_twice() -> None:
    header = int.from_bytes(WHOLE[:8], "little")
    other = b'"__numbers__":{"dtype":"F64","shape":[5],"data_offsets":[0,40]}'
    plain = WHOLE[8 : 8 + header].rstrip()
    for body in (plain[:-1] + b"," + other + b"}", b"{" + other + b"," + plain[1:]):
        read_or_refuse(len(body).to_bytes(8, "little") + body + WHOLE[8 + header :])


def test_forms_that_take_too_much_are_refused() -> None:
    with pytest.raises(ValueError, match="bits"):
        Packer().pack(1 << 20_000, "big")
    with pytest.raises(ValueError, match="no integer"):
        Unpacker([], {}).unpack({"big": "9" * 5_000})
    big = -(10**3_000)
    assert Unpacker([], {}).unpack(Packer().pack(big, "")) == big
