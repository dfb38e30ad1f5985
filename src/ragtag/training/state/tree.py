"""Nested Python values with tensors in them: copied, and taken apart into what peers share and what not.

``pack`` turns a tree into three things: its *form* (JSON: kinds, keys, strings), its *numbers* (64 bits each,
in the order in which the form meets them) and its *tensors* (by name). Peers whose objects are alike have the
same form, however their numbers differ; so nothing moves when a counter gains a digit.

A form is: ``null`` (None), ``"bool"``, ``"int"``, ``"float"`` (the next number), or an object with one key:
``{"str": s}``, ``{"big": decimal}`` (an int beyond 64 bits), ``{"tensor": name}``, ``{"list": [form, ...]}``,
``{"tuple": [...]}``, ``{"dict": [[key, form], ...]}``, and so ``"ordered"`` and ``"counter"``; a key is a str
or an int.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

DEPTH_MAX = 32
"""How deep a tree may be nested."""
DIGITS_MAX = 4_000
"""How many digits an integer may have (Python itself reads no more than 4,300)."""

_INT64 = range(-(1 << 63), 1 << 63)
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAME_OF: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""What tensors may consist of, by the safetensors format's names."""
_STORED = frozenset(DTYPES.values())


def copy_tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    """A copy on the host, row by row. Raises TypeError, naming ``where``, for what no snapshot can hold."""
    plain = value.detach()
    if type(value.data) is not torch.Tensor or plain.layout != torch.strided:
        kind = type(value.data).__name__
        raise TypeError(f"{where} is a {kind} ({plain.layout}); a snapshot holds whole, dense, plain tensors")
    if plain.is_meta:
        raise TypeError(f"{where} is on the meta device and has no values yet")
    if plain.dtype not in _STORED:
        raise TypeError(f"{where} is {plain.dtype}, which the safetensors format does not have")
    host = plain.resolve_conj().resolve_neg()
    return host.to("cpu", copy=True, memory_format=torch.contiguous_format)


def copy_tree(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a tree, its tensors on the host.

    where: what the tree is called in messages. Raises TypeError, naming the place, for anything but None,
    bools, numbers, strings, tensors, and lists, tuples and dicts (by str or int) of these.
    """
    if depth > DEPTH_MAX:
        raise TypeError(f"{where} is nested more than {DEPTH_MAX} deep (or holds itself)")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return copy_tensor(value, where)
    kind = _NAME_OF.get(type(value))
    if kind in _SEQUENCES:
        items = (copy_tree(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value))
        return _SEQUENCES[kind](items)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](
            {key: copy_tree(v, f"{where}[{key!r}]", depth + 1) for key, v in _items(value, where)}
        )
    raise TypeError(
        f"{where} is a {type(value).__qualname__}; a snapshot holds None, bools, numbers, strings, tensors, "
        "and lists, tuples and dicts of these, as nothing is pickled: leave it out, or write it so"
    )


def _items(value: Mapping[Any, Any], where: str) -> Iterator[tuple[str | int, Any]]:
    for key, item in value.items():
        if type(key) not in (str, int):
            raise TypeError(f"{where} has the key {key!r} ({type(key).__qualname__}); keys are str or int")
        yield key, item


class Packer:
    """Takes trees apart; ``numbers`` and ``tensors`` collect what their forms refer to."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def pack(self, value: Any, name: str) -> Any:
        """The form of a tree that ``copy_tree`` made. name: what its tensors' names begin with."""
        kind = type(value)
        if value is None:
            return None
        if kind is str:
            return {"str": value}
        if kind is int and value not in _INT64:
            return {"big": _decimal(value, name)}
        if kind in (bool, int, float):
            self.numbers.append(_bits(value))
            return kind.__name__
        if kind is torch.Tensor:
            return {"tensor": self._add(value, name)}
        tag = _NAME_OF[kind]
        if tag in _SEQUENCES:
            return {tag: [self.pack(item, f"{name}.{at}") for at, item in enumerate(value)]}
        return {tag: [[key, self.pack(item, f"{name}.{key}")] for key, item in value.items()]}

    def _add(self, tensor: torch.Tensor, name: str) -> str:
        unique, again = name, 2
        while unique in self.tensors:  # {"a.b": x} beside {"a": {"b": y}}, or the key 1 beside "1"
            unique, again = f"{name}#{again}", again + 1
        self.tensors[unique] = tensor
        return unique


class Unpacker:
    """Puts trees together again.

    numbers: all of them.
    tensors: by name.
    """

    def __init__(self, numbers: list[int], tensors: Mapping[str, torch.Tensor]) -> None:
        self._numbers = iter(numbers)
        self._left = dict(tensors)

    def unpack(self, form: Any, depth: int = 0) -> Any:
        """The tree of a form. Raises ValueError where the form is none, or refers to what is not there."""
        if depth > DEPTH_MAX:
            raise ValueError(f"nested more than {DEPTH_MAX} deep")
        if form is None:
            return None
        if isinstance(form, str):
            return self._number(form)
        if not isinstance(form, dict) or len(form) != 1:
            raise ValueError(f"{_short(form)} is no form")
        ((tag, body),) = form.items()
        if tag in _SEQUENCES and isinstance(body, list):
            return _SEQUENCES[tag]([self.unpack(item, depth + 1) for item in body])
        if tag in _MAPPINGS and isinstance(body, list):
            return _MAPPINGS[tag]({key: self.unpack(item, depth + 1) for key, item in map(_pair, body)})
        if not isinstance(body, str):
            raise ValueError(f"{_short(form)} is no form")
        if tag == "str":
            return body
        if tag == "big":
            return _from_decimal(body)
        if tag == "tensor":
            return self._tensor(body)
        raise ValueError(f"{_short(form)} is no form")

    def end(self) -> None:
        """Raise ValueError, naming the first, when there are tensors or numbers that no form refers to."""
        if self._left:
            raise ValueError(f"tensor {min(self._left)!r} belongs to nothing")
        if next(self._numbers, None) is not None:
            raise ValueError("there are more numbers than places for them")

    def _number(self, kind: str) -> bool | int | float:
        bits = next(self._numbers, None)
        if bits is None:
            raise ValueError("there are fewer numbers than places for them")
        if kind == "float":
            return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
        number = int(struct.unpack("<q", struct.pack("<Q", bits))[0])
        if kind == "int":
            return number
        if kind == "bool" and number in (0, 1):
            return bool(number)
        raise ValueError(f"{_short(kind)} of {number} is no form")

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ValueError(f"tensor {_short(name)} is missing, or was asked for twice")
        return tensor


def _bits(value: bool | int | float) -> int:
    packed = struct.pack("<d", value) if isinstance(value, float) else struct.pack("<q", value)
    return int.from_bytes(packed, "little")


def _decimal(value: int, name: str) -> str:
    if value.bit_length() > 3 * DIGITS_MAX:
        raise ValueError(
            f"{name} is an integer of {value.bit_length()} bits; at most {3 * DIGITS_MAX} are kept"
        )
    return str(value)


def _from_decimal(text: str) -> int:
    digits = text.removeprefix("-")
    if len(digits) > DIGITS_MAX or not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{_short(text)} is no integer")
    return int(text)


def _pair(item: Any) -> tuple[str | int, Any]:
    if isinstance(item, list) and len(item) == 2 and type(item[0]) in (str, int):
        return item[0], item[1]
    raise ValueError(f"{_short(item)} is no key with its form")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
