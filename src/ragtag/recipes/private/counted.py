"""Counts what private training computes, and what it puts on its lines: where machines send it, whatever they
were told to send.

A message of a cut is a computed tensor ``[number, samples, loss, values...]`` of ``privacy.split.Cut``. One
of ``privacy.SecureAverage`` has a head of its round, its size and a time. Both are counted as often as they
leave, without their heads and what fills up their last chunk.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any, Protocol

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ragtag.codecs.dense import fp32
from ragtag.core.channels import channel_of
from ragtag.core.types import Effect, Event, Machine, PeerId, Run, Send
from ragtag.core.wire import CHUNK_BYTES
from ragtag.privacy.split import CutForm
from ragtag.protocols.publish.channel import PUSH, ROWS
from ragtag.simulation.transport import SimulatedCrew

HEAD, VALUE_BYTES = 3, 4
"""Of a message: the values of its head, and the bytes of each of its values."""
SECURE_HEAD = struct.Struct("<QQd")
"""Of a message of a secure average: its round, the bytes that follow, and a time (s)."""


class SentTensors:
    """What a crew's machines send of one name's computed tensors. Made before the crew runs.

    bytes: by the sender and the tensor's name.
    """

    def __init__(self, crew: SimulatedCrew, name: str) -> None:
        self.bytes: Counter[tuple[PeerId, str]] = Counter()
        self._crew, self._channel = crew, channel_of(f"{name}/computed")
        world = crew.world
        world.nodes = [_Watched(node, me, self) for me, node in enumerate(world.nodes)]

    def count(self, me: PeerId, run: Run) -> None:
        """A machine sends this."""
        if run.key.channel != self._channel or run.key.stage not in (ROWS, PUSH):
            return
        form = self._crew.schemas[self._channel].tensors[run.key.block]
        chunks = np.arange(run.first, run.first + len(run.payload))
        if run.mask is not None:
            chunks = chunks[run.mask]
        values = int(np.minimum(fp32.elements, form.n_values - chunks * fp32.elements).sum())
        self.bytes[me, form.name] += VALUE_BYTES * (values - HEAD * int(0 in chunks))

    def of_split(self, server: PeerId, **values: int) -> tuple[int, int]:
        """What has crossed a cut: bytes of codes, outputs and gradients both ways, and of labels.

        All that clients send beyond ``values`` counts as labels, whatever the cut says that it has.

        values: of a message from a client, by its name, what its layers make of a batch; with ``_`` for dots.
        """
        sizes = {spec.name: spec.n_values - HEAD for spec in self._crew.schemas[self._channel].tensors}
        labels = 0
        for (peer, name), sent in self.bytes.items():
            made = values.get(name.partition("/")[0].replace(".", "_"), 0)
            if peer != server and sizes[name] > made:
                labels += sent * (sizes[name] - made) // sizes[name]
        return self.bytes.total() - labels, labels


def crossed(sent: SentTensors, form: CutForm) -> tuple[int, int]:
    """What has left machines for the other side of a cut, whose server is peer 0: payload, and labels."""
    outputs = 0 if form.outputs is None else math.prod(form.outputs)
    return sent.of_split(0, codes=form.batch * math.prod(form.codes), outputs_grad=form.batch * outputs)


class SentSecure:
    """What a crew's machines send of one name's secure averages. Made before the crew runs.

    bytes: by sender.
    """

    def __init__(self, crew: SimulatedCrew, name: str) -> None:
        self.bytes: Counter[PeerId] = Counter()
        self._crew, self._channel = crew, channel_of(f"{name}/secure")
        world = crew.world
        world.nodes = [_Watched(node, me, self) for me, node in enumerate(world.nodes)]

    def count(self, me: PeerId, run: Run) -> None:
        """A machine sends this."""
        if run.key.channel != self._channel or run.key.stage not in (ROWS, PUSH):
            return
        leaves = np.ones(len(run.payload), np.bool_) if run.mask is None else run.mask
        self.bytes[me] += int(leaves.sum()) * CHUNK_BYTES
        if run.first == 0 and leaves[0]:
            size = SECURE_HEAD.unpack_from(np.ascontiguousarray(run.payload[0]).data)[1]
            rows = -(-self._crew.schemas[self._channel].tensors[run.key.block].n_values // fp32.elements)
            self.bytes[me] -= rows * CHUNK_BYTES - size


class _Counter(Protocol):
    def count(self, me: PeerId, run: Run) -> None: ...


class _Watched:
    """A node whose sends are counted."""

    def __init__(self, node: Machine, me: PeerId, sent: _Counter) -> None:
        self._node, self._me, self._sent = node, me, sent

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """The node's step."""
        effects = self._node.step(now_s, event)
        for effect in effects:
            if isinstance(effect, Send):
                self._sent.count(self._me, effect.run)
        return effects


class Flops(TorchDispatchMode):
    """Multiplications and additions of layers in one thread, whatever others compute meanwhile, by torch's
    formulas: its own counter watches the modules of all threads.

    total: so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += float(count(*args, **(kwargs or {}), out_val=found))
        return found
