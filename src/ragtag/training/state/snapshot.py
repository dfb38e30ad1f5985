"""A peer's training state as a value, and as bytes.

The bytes are a safetensors file (https://huggingface.co/docs/safetensors/index#format), nothing pickled:

    8 bytes     length of the header, little-endian
    header      JSON: each tensor's dtype, shape and place; ``__metadata__`` has one entry, ``ragtag``: JSON
                with the format's version, the schema's hash, and the form of all that is no tensor (``tree``)
    numbers     tensor ``__numbers__``, uint64: step, round, steps since the last average, rounds before
                this run, then every bool, int and float of the modules' extra state, the optimizer,
                ``extra``, ``outer``, 64 bits each
    tensors     ``model.NAME``, ``modules.NAME...``, ``optimizer.state.I.KEY``, ``extra.NAME...``,
                ``outer.anchor.NAME``, ``outer.momentum.NAME``; by the size of the dtype, then by name

What differs between two peers at the same stage of one training is in the numbers and the tensors, which are
of fixed width: their files have one length and one header, to the bit. So a newcomer may take any range of
bytes from any donor; cut at multiples of 8 (the data begins at one), and no number is torn. ``layout_of``
says whether two files are alike, and where the numbers end: what lies before is best taken from one donor, so
that a scheduler's counters fit each other. Files differ in form where the objects do: an optimizer that has
taken no step, a parameter that never had a gradient, a list that grows, None where others have a number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ragtag.core.schema import TENSORS_MAX, VALUES_MAX, Schema, TensorSpec
from ragtag.training.state.tree import DTYPES, Packer, Unpacker

T = TypeVar("T")
VERSION = 3
"""Of the bytes' format."""
READ = (1, 2, 3)
"""Versions that are read; others are refused. 1 had no outer momentum, and no form of it; up to 2 there were
no rounds before this run.
"""
_PARTS = {1: 6, 2: 7, 3: 8}
HEADER_BYTES_MAX = 64 << 20
_NUMBERS, _MODEL = "__numbers__", "model."
_ENTRY = "ragtag"
_HEX = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class _Version(msgspec.Struct):
    version: int


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """The header's one entry."""

    version: int
    schema: _HEX
    form: Any


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=VALUES_MAX)]], msgspec.Meta(max_length=64)]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


class Progress(NamedTuple):
    """How far a training has come; the greater, the further, on any peer and over any restarts.

    rounds: of the whole training: a run that resumes counts on.
    step: this peer's.
    """

    rounds: int
    step: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a snapshot's bytes are laid out; files of one layout may be mixed (see the module).

    n_bytes: the file's length.
    front_bytes: header and numbers.
    digest: of the header, 16 bytes.
    """

    n_bytes: int
    front_bytes: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Copies, on the host, of all that a peer's training consists of.

    step: how many steps the peer has taken.
    since: those since its last average.
    round: its channel's, which every run counts from 0.
    before: rounds of the training before this run.
    model: parameters and buffers by name.
    modules: extra state of modules that have any (get_extra_state).
    optimizer: the inner optimizer's ``class``, ``defaults``, ``names`` (of the parameters, by group),
        ``param_groups`` and ``state``.
    extra: state_dicts by name.
    outer: anchor and momentum of outer steps (see ``ragtag.training.exchange.outer``; empty: there were
        none).
    """

    step: int
    round: int
    since: int
    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    modules: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    before: int = 0

    @property
    def progress(self) -> Progress:
        """How far the training has come."""
        return Progress(self.before + self.round, self.step)

    def __repr__(self) -> str:
        n_bytes = sum(tensor.nbytes for tensor in self.model.values())
        more = "".join(f", {name}" for name in self.extra)
        where = f"step={self.step}, round={self.round}"
        return f"Snapshot({where}, model of {len(self.model)} tensors, {n_bytes:,} bytes{more})"

    @cached_property
    def schema(self) -> Schema:
        """The model's tensors by name; no codec or method, since a snapshot outlives both."""
        specs = (_spec(name, self.model[name]) for name in sorted(self.model))
        return Schema(tuple(specs), codec="", method="", content="snapshot")

    @cached_property
    def schema_hash(self) -> str:
        """Of the schema's encoding, 128 bits in hex (whole models with frozen parts have more tensors than
        ``Schema.encode`` lets peers send).
        """
        return hashlib.blake2b(msgspec.json.encode(self.schema), digest_size=16).hexdigest()

    def to_bytes(self) -> bytes:
        """As the module says. Raises ValueError for more tensors or a longer header than would be read."""
        packer = Packer()
        form = [packer.pack(count, "") for count in (self.step, self.round, self.since, self.before)]
        trees = {
            "modules": self.modules,
            "optimizer": self.optimizer,
            "extra": self.extra,
            "outer": self.outer,
        }
        form += [packer.pack(dict(tree), name) for name, tree in trees.items()]
        entry = msgspec.json.encode(_Entry(VERSION, self.schema_hash, form)).decode()
        tensors = {_MODEL + name: tensor for name, tensor in self.model.items()} | packer.tensors
        if len(tensors) > TENSORS_MAX:
            raise ValueError(f"a snapshot of {len(tensors)} tensors; at most {TENSORS_MAX} are kept")
        tensors[_NUMBERS] = torch.from_numpy(np.array(packer.numbers, dtype=np.uint64))
        data = save(tensors, {_ENTRY: entry})
        layout_of(data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Snapshot:
        """Read what ``to_bytes`` wrote. Raises ValueError, saying what is wrong, on anything else; takes no
        more memory than a few times the data's length.
        """
        try:
            entry = _read_entry(data)
            return cls._assemble(entry, dict(sorted(load(bytes(data)).items())))
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"no snapshot: {error}") from error

    @classmethod
    def _assemble(cls, entry: _Entry, tensors: dict[str, torch.Tensor]) -> Snapshot:
        numbers = tensors.pop(_NUMBERS).tolist()
        model = {name.removeprefix(_MODEL): t for name, t in tensors.items() if name.startswith(_MODEL)}
        unpacker = Unpacker(numbers, {name: t for name, t in tensors.items() if not name.startswith(_MODEL)})
        parts = _PARTS[entry.version]
        if not isinstance(entry.form, list) or len(entry.form) != parts:
            raise ValueError(f"its form does not have {parts} parts")
        step, round, since, *rest = [unpacker.unpack(form) for form in entry.form]
        before, *trees = rest if entry.version > 2 else [0, *rest]
        counts, (modules, optimizer, extra, outer) = (step, round, since, before), [*trees, {}][:4]
        unpacker.end()
        bad = next((n for n, t in tensors.items() if t.dtype == torch.bool and _has_no_bools(t)), None)
        if bad is not None:
            raise ValueError(f"tensor {bad!r} has bools that are neither true nor false")
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"step, round, steps since the average and rounds before are {list(counts)}")
        if any(type(part) is not dict for part in (modules, optimizer, extra, outer)):
            raise ValueError("its form has something else where dicts belong")
        require_optimizer(optimizer)
        snapshot = cls(step, round, since, model, optimizer, modules, extra, outer, before)
        if snapshot.schema_hash != entry.schema:
            raise ValueError("the tensors are not those of its schema")
        return snapshot


def layout_of(data: bytes) -> Layout:
    """How a snapshot's bytes are laid out. Their beginning is enough, as far as the header goes.

    Raises ValueError when it is none.
    """
    entries, _, begin = _read_header(data)
    return Layout(
        begin + max(tensor.data_offsets[1] for tensor in entries.values()),
        begin + entries[_NUMBERS].data_offsets[1],
        hashlib.blake2b(data[:begin], digest_size=16).digest(),
    )


def _read_header(data: bytes) -> tuple[dict[str, _Tensor], str, int]:
    """The tensors' places, the metadata's entry, and where the data begins."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are less than the length of a header takes")
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_BYTES_MAX:
        raise ValueError(f"a header of {length} bytes; at most {HEADER_BYTES_MAX} are read")
    if 8 + length > len(data):
        raise ValueError(f"cut off: {len(data)} bytes, and the header ends at {8 + length}")
    raw = _decode(data[8 : 8 + length], dict[str, msgspec.Raw])
    metadata = _decode(raw.pop("__metadata__", b"{}"), dict[str, str])
    if len(raw) > TENSORS_MAX + 1:
        raise ValueError(f"{len(raw)} tensors; at most {TENSORS_MAX} are read")
    entries = {name: _decode(body, _Tensor) for name, body in raw.items()}
    if _ENTRY not in metadata:
        raise ValueError("a safetensors file of something else (its metadata has no entry 'ragtag')")
    _require_numbers_first(entries)
    return entries, metadata[_ENTRY], 8 + length


def _require_numbers_first(entries: Mapping[str, _Tensor]) -> None:
    numbers = entries.get(_NUMBERS)
    if numbers is None or numbers.dtype != "U64" or len(numbers.shape) != 1 or numbers.data_offsets[0] != 0:
        raise ValueError("its numbers are missing, or not where they belong")


def _read_entry(data: bytes) -> _Entry:
    entries, text, begin = _read_header(data)
    end = begin + max(tensor.data_offsets[1] for tensor in entries.values())
    if end != len(data):
        what = "cut off" if end > len(data) else "something follows it"
        raise ValueError(f"{what}: {len(data)} bytes, and its tensors end at {end}")
    for name, tensor in entries.items():
        if tensor.dtype not in DTYPES or prod(size or 1 for size in tensor.shape) > VALUES_MAX:
            raise ValueError(f"tensor {name!r} of {tensor.dtype} {tensor.shape} is none that is read")
    version = _decode(text, _Version).version
    if version not in READ:
        raise ValueError(f"it has format version {version}, and this ragtag reads {READ[0]} to {READ[-1]}")
    return _decode(text, _Entry)


def _decode(data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from error


def require_optimizer(saved: Mapping[str, Any]) -> None:
    """What is said of an inner optimizer has the parts that it must have. Raises ValueError."""
    kinds = {"class": str, "defaults": list, "names": list, "param_groups": list, "state": dict}
    for key, kind in kinds.items():
        if type(saved.get(key)) is not kind:
            raise ValueError(f"its optimizer's {key!r} is missing, or no {kind.__name__}")
    groups, names = saved["param_groups"], saved["names"]
    if any(type(group) is not dict for group in groups) or any(type(own) is not list for own in names):
        raise ValueError("its optimizer's groups are no dicts, or their parameters' names no lists")
    if len(groups) != len(names):
        raise ValueError(f"{len(groups)} groups of parameters, and names for {len(names)}")
    if any(type(name) is not str for own in [*names, saved["defaults"]] for name in own):
        raise ValueError("a name in its optimizer is no string")
    if any(type(state) is not dict for key, state in saved["state"].items() if type(key) is int):
        raise ValueError("the state of a parameter is no dict")


def _has_no_bools(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(torch.uint8) > 1).any())


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
