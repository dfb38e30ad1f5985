"""Text and small language models for recipes: bytes in, the next byte out.

Every machine has one text: the source of Python's own standard library. Models are pure functions of a list
of float32 tensors (as in ``images``), so that replicas stack under ``torch.func.vmap``. ``CharLSTM`` and
``CharTransformer`` are the same as modules.
"""

from __future__ import annotations

import math
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.recipes.tasks.images import Forward, Parameter, Task, TaskModel

SYMBOLS = 256
"""Models read and predict bytes."""
LIBRARY_BYTES = 2_000_000
"""How much of the standard library makes the text."""
TEXT_BYTES_MAX = 1 << 28
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__", "encodings", "pydoc_data"}
)
"""Folders of third parties, of tests, and of tables."""

# -- Text


def load_text(data: Path | None = None) -> bytes:
    """A text: the file ``data``, the one ``.txt`` file of the folder ``data``, or 2 MB of library source.

    The library is that of the running Python (``describe_text`` says which). Its modules are in an order that
    depends on their names alone, cut after ``LIBRARY_BYTES``.

    Raises:
        FileNotFoundError: there is no such file, or no library source on this machine.
        ValueError: a folder has no text or several; a text is too short or too long.
    """
    if data is None:
        return _library()
    path = _text_file(data)
    size = path.stat().st_size
    if not 10_000 <= size <= TEXT_BYTES_MAX:
        raise ValueError(f"{path} has {size:,} bytes; a text to train on has 10,000 to {TEXT_BYTES_MAX:,}")
    return path.read_bytes()


def describe_text(data: Path | None = None) -> str:
    """The name of the text that ``load_text`` gives."""
    return f"source of Python {platform.python_version()}" if data is None else _text_file(data).name


def split_text(text: bytes, held: float = 0.1) -> tuple[bytes, bytes]:
    """The text to train on, and its last share ``held``, which is held out."""
    cut = len(text) - int(held * len(text))
    return text[:cut], text[cut:]


def windows(text: bytes, length: int) -> tuple[Tensor, Tensor]:
    """Consecutive windows, uint8 ``[N, length]``, and the byte that follows each of their bytes, int64."""
    count = (len(text) - 1) // length
    if count < 1:
        raise ValueError(f"a text of {len(text)} bytes for windows of {length}")
    codes = np.frombuffer(text, np.uint8)[: count * length + 1]
    x, y = codes[:-1].reshape(count, length).copy(), codes[1:].reshape(count, length).astype(np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)


def batches(
    text: bytes, *, batch: int, length: int, seed: int, peer: int = 0, peers: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of one peer's part of the text: x and y, int64 ``[batch, length]``.

    Peer p has the p-th of ``peers`` equal consecutive parts. Each window begins at a random place in it.

    Raises:
        ValueError: the part is shorter than a window.
    """
    size = len(text) // peers
    part = np.frombuffer(text, np.uint8)[peer * size : (peer + 1) * size].astype(np.int64)
    if size <= length:
        raise ValueError(f"{len(text)} bytes among {peers} peers are too few for windows of {length}")
    rng = random.generator(seed, "text batches", peer)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            at = rng.integers(0, size - length, batch)[:, None] + np.arange(length)
            yield torch.from_numpy(part[at]), torch.from_numpy(part[at + 1])

    return endless()


def _text_file(data: Path) -> Path:
    if data.is_file():
        return data
    found = sorted(data.glob("*.txt")) if data.is_dir() else []
    if not data.exists():
        raise FileNotFoundError(f"there is no text {data}")
    if len(found) != 1:
        raise ValueError(f"{data} has {len(found)} .txt files; give the text's own path")
    return found[0]


def _library() -> bytes:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = [name for name in files if not _LEFT_OUT.intersection(name.split("/"))]
    # shuffled, so that the modules held out at the end are like those to train on
    order = sorted(files, key=lambda name: random.stream_key(0, f"library/{name}"))
    parts, size = [], 0
    for name in order:
        parts.append((root / name).read_bytes())
        size += len(parts[-1])
        if size >= LIBRARY_BYTES:
            return b"".join(parts)[:LIBRARY_BYTES]
    raise FileNotFoundError(
        f"{root} has {size:,} bytes of Python source, {LIBRARY_BYTES:,} are needed: give a text by --data"
    )


# -- Models


def _matrix(out: int, into: int) -> Parameter:
    return Parameter((out, into), into)


def lstm_parameters(embedding: int = 32, hidden: int = 96) -> tuple[Parameter, ...]:
    """Parameters of ``lstm``: embedding, input and recurrent weights, their bias, output weights and bias."""
    return (
        Parameter((SYMBOLS, embedding), 1),
        Parameter((4 * hidden, embedding), hidden),
        Parameter((4 * hidden, hidden), hidden),
        Parameter((4 * hidden,), hidden),
        _matrix(SYMBOLS, hidden),
        Parameter((SYMBOLS,), -1),
    )


def lstm(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """Scores ``[B, 256, L]`` of the byte after each of ``x`` (integers ``[B, L]``), by one LSTM layer.

    Hochreiter, Schmidhuber 1997, with forget gates (Gers et al. 2000). It starts from zeros in each window.
    """
    size = w[2].shape[1]
    inputs = F.linear(F.embedding(x.long(), w[0]), w[1], w[3])
    h = c = torch.zeros_like(inputs[:, 0, :size])
    outputs = []
    for gates in inputs.unbind(1):
        into, forget, out, new = (gates + F.linear(h, w[2])).chunk(4, -1)
        c = torch.sigmoid(forget) * c + torch.sigmoid(into) * torch.tanh(new)
        h = torch.sigmoid(out) * torch.tanh(c)
        outputs.append(h)
    return F.linear(torch.stack(outputs, 1), w[4], w[5]).transpose(1, 2)


def stacked_lstm(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """``lstm`` of many models: weights ``[P, ...]``, integers ``[P, B, L]``, scores ``[P, B, 256, L]``.

    It computes what ``vmap`` would in half the time: the recurrence is many small calls, which cost less
    here.
    """
    many, batch, length = x.shape
    embedding, size = w[0].shape[-1], w[2].shape[-1]
    own = x.long() + SYMBOLS * torch.arange(many)[:, None, None]
    read = F.embedding(own, w[0].reshape(-1, embedding)).view(many, -1, embedding)
    inputs = torch.baddbmm(w[3][:, None], read, w[1].mT).view(many, batch, length, 4 * size)
    recurrent = w[2].mT
    h = c = torch.zeros_like(inputs[:, :, 0, :size])
    outputs = []
    for gates in inputs.unbind(2):
        gates = torch.baddbmm(gates, h, recurrent)
        into, forget, out = torch.sigmoid(gates[..., : 3 * size]).chunk(3, -1)
        c = forget * c + into * torch.tanh(gates[..., 3 * size :])
        h = out * torch.tanh(c)
        outputs.append(h)
    scores = torch.baddbmm(w[5][:, None], torch.stack(outputs, 2).view(many, -1, size), w[4].mT)
    return scores.view(many, batch, length, SYMBOLS).transpose(2, 3)


_HEADS, _BLOCK = 4, 8  # tensors of a block


def transformer_parameters(width: int = 64, layers: int = 2, length: int = 64) -> tuple[Parameter, ...]:
    """Parameters of ``transformer``: bytes, places, per block two norms and four matrices, norm, output."""

    def norm() -> tuple[Parameter, Parameter]:
        return Parameter((width,), 0), Parameter((width,), -1)

    found = [Parameter((SYMBOLS, width), 10), Parameter((length, width), 100)]
    for _ in range(layers):
        found += [*norm(), _matrix(3 * width, width), _matrix(width, width)]
        found += [*norm(), _matrix(4 * width, width), _matrix(width, 4 * width)]
    return (*found, *norm(), _matrix(SYMBOLS, width))


def transformer(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """Scores ``[B, 256, L]`` of the byte after each of ``x`` (integers ``[B, L]``).

    A decoder with norms before its parts (Radford et al. 2019), four heads, GELU. Attention is written out so
    that it runs under ``vmap``.
    """
    length, width = x.shape[-1], w[0].shape[-1]
    mask = torch.full((length, length), -math.inf, device=x.device).triu(1)
    hidden = F.embedding(x.long(), w[0]) + w[1][:length]
    for at in range(2, len(w) - 3, _BLOCK):
        scale, shift, qkv, out, scale2, shift2, up, down = w[at : at + _BLOCK]
        parts = F.linear(F.layer_norm(hidden, (width,), scale, shift), qkv)
        q, k, v = parts.reshape(-1, length, 3, _HEADS, width // _HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // _HEADS) + mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(mixed, out)
        normed = F.layer_norm(hidden, (width,), scale2, shift2)
        hidden = hidden + F.linear(F.gelu(F.linear(normed, up)), down)
    return F.linear(F.layer_norm(hidden, (width,), w[-3], w[-2]), w[-1]).transpose(1, 2)


def stacked_transformer(w: Sequence[Tensor], x: Tensor) -> Tensor:
    """``transformer`` of many models, as ``stacked_lstm`` is of ``lstm``, in two thirds of the time."""
    many, batch, length = x.shape
    width = w[0].shape[-1]

    def norm(hidden: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(shift[:, None], F.layer_norm(hidden, (width,)), scale[:, None])

    own = x.long() + SYMBOLS * torch.arange(many)[:, None, None]
    places = w[1][:, None, :length]
    hidden = (F.embedding(own, w[0].reshape(-1, width)) + places).view(many, -1, width)
    for at in range(2, len(w) - 3, _BLOCK):
        scale, shift, qkv, out, scale2, shift2, up, down = w[at : at + _BLOCK]
        parts = torch.bmm(norm(hidden, scale, shift), qkv.mT)
        parts = parts.view(many * batch, length, 3, _HEADS, width // _HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.baddbmm(hidden, mixed.transpose(1, 2).reshape(hidden.shape), out.mT)
        normed = norm(hidden, scale2, shift2)
        hidden = torch.baddbmm(hidden, F.gelu(torch.bmm(normed, up.mT)), down.mT)
    scores = torch.bmm(norm(hidden, w[-3], w[-2]), w[-1].mT)
    return scores.view(many, batch, length, SYMBOLS).transpose(2, 3)


class CharLSTM(TaskModel):
    """``lstm`` as a module: 82,560 values by default."""

    def __init__(self, embedding: int = 32, hidden: int = 96, seed: int = 0) -> None:
        super().__init__(lstm, lstm_parameters(embedding, hidden), seed)


class CharTransformer(TaskModel):
    """``transformer`` as a module, for windows of up to ``length``: 135,808 values by default."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 64, seed: int = 0) -> None:
        if width % _HEADS:
            raise ValueError(f"a width of {width} does not divide among {_HEADS} heads")
        super().__init__(transformer, transformer_parameters(width, layers, length), seed)


def text_task(model: str, data: Path | None = None, length: int = 32, batch: int = 4) -> Task:
    """A text cut into windows and a model ("LSTM" or "transformer"), to train as any other task.

    Raises: see ``load_text``; ValueError for another model.
    """
    train, test = split_text(load_text(data))
    known: dict[str, tuple[Forward, tuple[Parameter, ...], float]] = {
        "LSTM": (lstm, lstm_parameters(), 2.0),
        "transformer": (transformer, transformer_parameters(length=length), 0.3),
    }
    if model not in known:
        raise ValueError(f"no model is called {model!r}; there are: {', '.join(known)}")
    forward, parameters, rate = known[model]
    (x, y), (held_x, held_y) = windows(train, length), windows(test, length)
    # shuffled, since evaluations use a first part of the windows
    order, held = (
        list(random.permutation(random.stream_key(0, "windows"), len(part))) for part in (x, held_x)
    )
    x, y, held_x, held_y = x[order], y[order], held_x[held], held_y[held]
    return Task(model, x, y, held_x, held_y, parameters, forward, batch, rate, 600)
