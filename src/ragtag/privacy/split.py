"""Split learning: a net is cut, clients keep the first layers and the data, a server trains the rest.

Vepakomma, Gupta, Swedish, Raskar, "Split learning for health" (arXiv 1812.00564). Forward, a batch's
codes Z go up to the server; backward, their gradients come down. In the plain form labels go up with Z.
In the U-shaped form they stay: the last layers are the client's, too, so what the server makes of Z comes
down, and its gradient goes up. ``SplitModel`` does one such turn in one process: what crosses the cut is
detached from what computed it, and counted; gradients end in both parts as if the net were whole, so any
optimizers, one for each part or one for all, take the step. Several clients are several such models with
one ``middle``; they either have weights of their own below the cut, or hand them on (``hand_over``).

What an epoch sends, in values, after Singh et al., "Detailed comparison of communication efficiency of
split learning and federated learning" (arXiv 1909.09145), for K clients, N parameters, p samples in all,
cut width q and the share of parameters below the cut:

    federated averaging    2 K N          split    2 p q (+ share K N where clients hand weights on)
    large-batch SGD        2 N a client and step

Split sends less than federated averaging from K = p q / N clients on (without weights handed on).

**In a crew** a ``SplitClient`` and a ``SplitServer`` do the same over named tensors (``training.named``):
a client publishes its codes, which only the server takes, and the server the gradients, which only that
client takes. So they travel sealed like all else, rows that are lost are asked for again, and only whole
values are seen. The server takes whatever request has come, so it never waits for one client: one that is
slow, frozen or dead is passed over, and served when it comes again. A client waits for an answer as long
as recent ones took, with head-room (``core.deadline``); a batch without an answer by then is given up,
counted, and does not train the client's layers; what the server learned of it stays. Both end when they
have heard nothing for ``deadline_s``, as a crew waits for peers that pause (``ragtag.join``). Members of
a crew can ask for each other's codes: they are hidden from outside only. All peers are told of each
message's version, so of short messages in large crews the lines carry a multiple of the payload.

A server sees codes and gradients, and labels in the plain form. NoPeek lowers what codes tell by some
(``ragtag.privacy.meters``); a server that sends gradients of its own choice is stopped by nothing here
(``ragtag.privacy.hijacking`` is one). A
server learns nothing of requests whose loss or gradients are not finite; against finite nonsense from a
client it has no guard, and a label that its criterion refuses ends it with that error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ragtag.core.deadline import Deadline
from ragtag.core.errors import Error
from ragtag.privacy.correlation import distance_correlation
from ragtag.training.named import NamedTensors
from ragtag.training.transport import PublishingTransport

VALUE_BYTES = 4
NUMBERED_MAX = 1 << 24
"""Requests of a client: float32 holds their numbers exactly."""
BACKOFF_MAX = 64.0
_LOOKS = 16
"""How often an answer is looked for in the time that one takes."""
_LOOK_MIN_S = 1e-3
_LINGERS = 4.0
"""A server stays for so many of the times between its answers, so that clients can take the last one."""
_HEAD = 3
OVER, OVER_HEARD = "over", "over.heard"
"""Messages without values: a client has finished, and the server has heard."""
Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class SplitTraffic:
    """What has crossed a cut: payload, without headers.

    up_bytes, down_bytes: activations and gradients, from the client and to it.
    label_bytes: labels, from the client; 0 in the U-shaped form.
    messages: in both directions; labels go along with codes.
    """

    up_bytes: int = 0
    down_bytes: int = 0
    label_bytes: int = 0
    messages: int = 0

    @property
    def bytes(self) -> int:
        """Activations and gradients: what the formula ``2 p q`` counts."""
        return self.up_bytes + self.down_bytes


class SplitModel:
    """One client's turn with a server, in one process.

    front: the client's first layers.
    middle: the server's.
    back: the client's last layers (the U-shaped form); ``None``: the server has them, and gets the labels.
    criterion: of outputs and labels, a scalar.
    nopeek: the weight a1 of the distance correlation of a batch with its codes, which the client computes.

    Raises ValueError: ``nopeek`` is below 0.
    """

    def __init__(
        self,
        front: nn.Module,
        middle: nn.Module,
        back: nn.Module | None = None,
        *,
        criterion: Criterion = nn.functional.cross_entropy,
        nopeek: float = 0.0,
    ) -> None:
        if not nopeek >= 0:
            raise ValueError(f"SplitModel: nopeek is {nopeek}; it must be 0 or more")
        self.front, self.middle, self.back = front, middle, back
        self._criterion, self._nopeek = criterion, nopeek
        self.traffic = SplitTraffic()

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """A batch forward and backward; gradients are added to both parts' ``.grad``, as ``backward`` does.

        x: the batch ``[n, ...]``. y: its labels ``[n, ...]``.
        Returns the task's loss, a scalar, without NoPeek's term.
        """
        codes = self.front(x)
        seen = self._crosses(codes, up=True)
        made = self.middle(seen)
        if self.back is None:
            self.traffic.label_bytes += y.nbytes
            loss = self._criterion(made, y)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            given = self._crosses(made, up=False)
            loss = self._criterion(self.back(given), y)
            loss.backward()  # type: ignore[no-untyped-call]
            made.backward(self._crosses(_gradient(given), up=True))
        down = self._crosses(_gradient(seen), up=False)
        ends, gradients = [codes], [down.detach()]
        if self._nopeek:
            term = self._nopeek * distance_correlation(x, codes)
            ends, gradients = [*ends, term], [*gradients, torch.ones_like(term)]
        if any(end.requires_grad for end in ends):  # a front without parameters has nothing to learn
            torch.autograd.backward(ends, gradients)
        return loss.detach()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Outputs for a batch; what crosses is not counted."""
        made: Tensor = self.middle(self.front(x))
        return made if self.back is None else self.back(made)

    def _crosses(self, values: Tensor, *, up: bool) -> Tensor:
        """A copy that nothing but its values connects with where they come from."""
        traffic = self.traffic
        traffic.messages += 1
        if up:
            traffic.up_bytes += values.nbytes
        else:
            traffic.down_bytes += values.nbytes
        return values.detach().clone().requires_grad_()


@dataclass(frozen=True, slots=True)
class CutForm:
    """What crosses a cut in a crew, on all its peers the same.

    batch: samples in a request, at most.
    codes: a sample's codes, as a shape.
    outputs: of the server's part for a sample, as a shape, in the U-shaped form; ``None``: the plain one.
    labels: a sample's labels, as a shape; they go up in the plain form.
    label_dtype: as the criterion takes them. They travel as float32, so whole numbers stay below 2^24.

    Raises ValueError: a size is below 1.
    """

    batch: int
    codes: tuple[int, ...]
    outputs: tuple[int, ...] | None = None
    labels: tuple[int, ...] = ()
    label_dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        if min((self.batch, *self.codes, *(self.outputs or ()), *self.labels)) < 1:
            raise ValueError(f"{self}: all sizes must be 1 or more")

    @property
    def label_width(self) -> int:
        """Values of a sample's label that go up: none in the U-shaped form."""
        return math.prod(self.labels) if self.outputs is None else 0

    @property
    def ways(self) -> dict[str, tuple[int, ...]]:
        """The messages between a client and the server, by name: what a sample has of each, as a shape."""
        label = math.prod(self.labels) if self.outputs is None else 0
        ways: dict[str, tuple[int, ...]] = {
            "codes": (math.prod(self.codes) + label,),
            "codes.grad": self.codes,
        }
        if self.outputs is not None:
            ways |= {"outputs": self.outputs, "outputs.grad": self.outputs}
        return ways


class ServerGone(Error, RuntimeError):
    """A client of split learning has had no answer for as long as it was told to wait."""


class Cut:
    """What both ends of a cut send each other in a crew: made by ``crew.cut``, on all peers alike.

    Each message is ``[number, samples, loss, values...]``, padded to the form's batch.

    transport: the crew's.
    form: what crosses. server: the peer that is the server; all others that are there now are clients.
    name: of this cut. on_publish: called after each message.

    Raises:
        ValueError: there is no such server, or nobody else.
        ragtag.SchemaMismatch: another peer has another form or server.
    """

    def __init__(
        self,
        transport: PublishingTransport,
        form: CutForm,
        *,
        server: int = 0,
        name: str = "split",
        on_publish: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0 <= server < transport.n or transport.n < 2:
            raise ValueError(
                f"split learning: server {server} of {transport.n} peers; it takes a client and a server"
            )
        self.transport, self.form, self.server = transport, form, server
        self.clients = [peer for peer in range(transport.n) if peer != server]
        begin_s = transport.now_s()
        ways = [*form.ways, OVER, OVER_HEARD]
        shapes = {f"{way}/{client}": (_HEAD + self._size(way),) for client in self.clients for way in ways}
        self.tensors = NamedTensors(
            transport, name, computed=shapes, settings=f"server {server}", on_publish=on_publish
        )
        self.opened_s = max(_LOOK_MIN_S, transport.now_s() - begin_s)
        """How long it took to meet: the first guess of what an answer takes."""
        self.traffic = SplitTraffic()

    def _size(self, way: str) -> int:
        """Values in a message, head apart."""
        shape = self.form.ways.get(way)
        return 0 if shape is None else self.form.batch * math.prod(shape)

    def send(
        self, way: str, client: int, number: int, values: Tensor | None = None, loss: float = 0.0
    ) -> None:
        """Publish a message. values: ``[samples, ...]``; ``None`` where the message has none."""
        size = self._size(way)
        values = torch.zeros(0) if values is None else values
        if values.numel() > size:
            raise ValueError(
                f"split learning: {list(values.shape)} for {way}; {self.form} has no room for that"
            )
        flat = torch.zeros(_HEAD + size)
        flat[:_HEAD] = torch.tensor([number, len(values), loss])
        flat[_HEAD : _HEAD + values.numel()] = values.detach().reshape(-1).to("cpu", torch.float32)
        self.tensors.publish({f"{way}/{client}": flat})
        traffic = self.traffic
        traffic.messages += 1
        if self.transport.me == self.server:
            traffic.down_bytes += VALUE_BYTES * size
        else:
            labels = self.form.batch * self.form.label_width if way == "codes" else 0
            traffic.up_bytes += VALUE_BYTES * (size - labels)
            traffic.label_bytes += VALUE_BYTES * labels

    def newest(self, way: str, client: int) -> _Message | None:
        """The newest message; ``None``: there is none. Its values are a copy."""
        found = self.tensors.newest(f"{way}/{client}")
        if found is None:
            return None
        number, samples, loss = found.tensor[:_HEAD].tolist()
        if way not in self.form.ways:
            return _Message(int(number), found.tensor[_HEAD:], loss)
        values = found.tensor[_HEAD:].reshape(self.form.batch, *self.form.ways[way])
        if not 0 <= samples <= self.form.batch:
            return None  # no client of this form says so
        return _Message(int(number), values[: int(samples)].clone(), loss)


class _Message(NamedTuple):
    """values: ``[samples, ...]``. loss: of the task, where the server knows it."""

    number: int
    values: Tensor
    loss: float


class SplitClient:
    """A client in a crew: its layers, its data, and a server elsewhere.

    cut: of the crew (``crew.cut``).
    front, back, nopeek, criterion: as in ``SplitModel``; ``back`` exactly where the form has ``outputs``.
    deadline_s: without any answer for so long, the server counts as gone; the first answer is waited for as
        long.
    answered, missed: requests with an answer in time, and without.

    Raises ValueError: the form and ``back`` do not go together, or this peer is the server.
    """

    def __init__(
        self,
        cut: Cut,
        front: nn.Module,
        back: nn.Module | None = None,
        *,
        criterion: Criterion = nn.functional.cross_entropy,
        nopeek: float = 0.0,
        deadline_s: float = 120.0,
    ) -> None:
        if (back is None) != (cut.form.outputs is None):
            raise ValueError("SplitClient: the U-shaped form has both, a back and the form's outputs")
        if cut.transport.me == cut.server:
            raise ValueError(f"SplitClient: peer {cut.server} is the server")
        self.front, self.back = front, back
        self._criterion, self._nopeek, self._deadline_s = criterion, nopeek, deadline_s
        self._cut, self._me = cut, cut.transport.me
        self._turns = Deadline(cut.opened_s, headroom=2.0, backoff=2.0, backoff_max=BACKOFF_MAX)
        down = [way for way in cut.form.ways if way in ("codes.grad", "outputs")]
        cut.tensors.only([f"{way}/{self._me}" for way in (*down, OVER_HEARD)])
        self._number = 0
        self._heard_s = cut.transport.now_s()
        self._given_up: dict[int, float] = {}
        self._answers = 0
        self.answered = self.missed = 0

    @property
    def traffic(self) -> SplitTraffic:
        """What this client has sent (``up_bytes``, ``label_bytes``), full batches whatever was in them."""
        return self._cut.traffic

    def backward(self, x: Tensor, y: Tensor) -> Tensor | None:
        """A batch through both halves; gradients are added to the client's ``.grad``.

        x: ``[n, ...]``, n at most the form's batch. y: its labels ``[n, ...]``.
        Returns the task's loss, a scalar, without NoPeek's term. ``None``: no answer came in time, and no
        gradient was added.

        Raises:
            ServerGone: nothing has come for ``deadline_s``.
            ValueError: the batch has no room in the form.
            ragtag.NotFinite: codes are NaN or infinite.
        """
        number = self._next()
        codes = self.front(x)
        if self.back is None:
            labels = y.reshape(len(x), -1).to("cpu", torch.float32)
            sent = torch.cat([codes.detach().reshape(len(x), -1).to("cpu", torch.float32), labels], 1)
            down = self._ask("codes", sent, "codes.grad", number)
            loss = None if down is None else torch.tensor(down.loss)
        else:
            down, loss = self._through_back(codes, y, number)
        if down is None:
            return None
        ends, gradients = [codes], [down.values.reshape(codes.shape).to(codes)]
        if self._nopeek:
            term = self._nopeek * distance_correlation(x, codes)
            ends, gradients = [*ends, term], [*gradients, torch.ones_like(term)]
        if any(end.requires_grad for end in ends):
            torch.autograd.backward(ends, gradients)
        self.answered += 1
        return loss

    def _through_back(self, codes: Tensor, y: Tensor, number: int) -> tuple[_Message | None, Tensor | None]:
        """The U-shaped form: outputs come, their gradient goes, and the codes' comes."""
        made = self._ask("codes", codes, "outputs", number)
        if made is None or self.back is None:
            return None, None
        given = made.values.to(codes.device).requires_grad_()
        loss = self._criterion(self.back(given), y)
        learned = list(self.back.parameters())
        gradients = torch.autograd.grad(loss, [given, *learned], allow_unused=True)
        down = self._ask("outputs.grad", _or_zeros(gradients[0], given), "codes.grad", number)
        if down is not None:
            for p, gradient in zip(learned, gradients[1:], strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad + gradient
        return down, loss.detach()

    def finish(self) -> None:
        """Tell the server that no more comes from here, until it says that it has heard, or has ended."""
        begin_s = self._cut.transport.now_s()
        while self._cut.transport.now_s() - begin_s < self._deadline_s:
            if self._ask(OVER, None, OVER_HEARD, self._next()) is not None:
                return
            if self._cut.server not in self._cut.transport.live:
                return

    def _next(self) -> int:
        self._number += 1
        if self._number >= NUMBERED_MAX:
            raise RuntimeError(
                f"a client of split learning has made {NUMBERED_MAX:,} requests: begin a new name"
            )
        return self._number

    def _ask(self, way: str, values: Tensor | None, back: str, number: int) -> _Message | None:
        """Send a message, and wait for what answers it. ``None``: it did not come in time."""
        transport, turns = self._cut.transport, self._turns
        self._cut.send(way, self._me, number, values)
        begin_s = transport.now_s()
        until_s = begin_s + (turns.budget_s() if self._answers else self._deadline_s)
        while True:
            found = self._cut.newest(back, self._me)
            now_s = transport.now_s()
            if found is not None and found.number in self._given_up:
                turns.late(now_s - self._given_up.pop(found.number))
                self._heard_s = now_s
            if found is not None and found.number == number:
                turns.completed(now_s - begin_s)
                self._heard_s, self._given_up = now_s, {}
                self._answers += 1
                return found
            if now_s >= until_s:
                turns.missed()
                self.missed += values is not None
                self._given_up = {number: begin_s}
                if now_s - self._heard_s >= self._deadline_s:
                    raise ServerGone(
                        f"split learning: peer {self._cut.server} has answered nothing for "
                        f"{now_s - self._heard_s:.3g} s ({self.missed} requests)"
                    )
                return None
            transport.pause(min(max(_LOOK_MIN_S, turns.typical_s() / _LOOKS), until_s - now_s))


class _Open(NamedTuple):
    """A turn of the U-shaped form that waits for its outputs' gradient.

    weights: of ``middle`` as they were: other clients' turns change them meanwhile.
    """

    number: int
    codes: Tensor
    made: Tensor
    weights: dict[str, Tensor]


@dataclass(slots=True)
class Served:
    """What a server did for one client.

    requests: answered ones.
    refused: requests of which the loss or a gradient is NaN or infinite: nothing was learned of these.
    finished: it has said that no more comes.
    lost: it has left, or was silent for too long.
    """

    requests: int = 0
    refused: int = 0
    finished: bool = False
    lost: bool = False


class SplitServer:
    """The server in a crew: the layers above the cut.

    cut: of the crew (``crew.cut``); this peer is its server.
    middle, criterion: as in ``SplitModel``.
    optimizer: of ``middle``; it takes a step for each request.

    Raises ValueError: this peer is a client.
    """

    def __init__(
        self,
        cut: Cut,
        middle: nn.Module,
        optimizer: Optimizer,
        *,
        criterion: Criterion = nn.functional.cross_entropy,
    ) -> None:
        if cut.transport.me != cut.server:
            raise ValueError(f"SplitServer: peer {cut.server} is the server, not peer {cut.transport.me}")
        self.middle, self._optimizer, self._criterion = middle, optimizer, criterion
        self._cut = cut
        ups = [way for way in cut.form.ways if way in ("codes", "outputs.grad")]
        cut.tensors.only([f"{way}/{client}" for way in (*ups, OVER) for client in cut.clients])
        self._turns = Deadline(cut.opened_s, headroom=_LINGERS)
        self._seen = dict.fromkeys(cut.clients, 0)
        self._open: dict[int, _Open] = {}
        self._heard_s = dict.fromkeys(cut.clients, cut.transport.now_s())
        self.served = {client: Served() for client in cut.clients}

    @property
    def traffic(self) -> SplitTraffic:
        """What this server has sent (``down_bytes``), full batches whatever was in them."""
        return self._cut.traffic

    def serve(self, deadline_s: float = 120.0) -> dict[int, Served]:
        """Answer requests until each client has finished, has left, or has asked nothing for ``deadline_s``.

        Returns what was done for each.
        """
        transport, quiet_s = self._cut.transport, self._cut.transport.now_s()
        while True:
            answered = sum(self._answer(client) for client in self._cut.clients)
            now_s, live = transport.now_s(), transport.live
            for client, served in self.served.items():
                silent = now_s - self._heard_s[client] >= deadline_s
                served.lost = not served.finished and (client not in live or silent)
            if answered:
                self._turns.completed(now_s - quiet_s)
                quiet_s = now_s
            over = all(served.finished or served.lost for served in self.served.values())
            if over and now_s - quiet_s >= self._turns.budget_s():  # by now the last answer has been taken
                return self.served
            if not answered:
                transport.pause(max(_LOOK_MIN_S, self._turns.typical_s() / _LOOKS))

    def _answer(self, client: int) -> bool:
        """Take a client's newest request, if it is new; whether there was one."""
        return self._first(client) or self._second(client) or self._over(client)

    def _over(self, client: int) -> bool:
        """A client says that no more comes, perhaps again: it is told that this was heard."""
        found = self._cut.newest(OVER, client)
        if found is None or found.number <= self._seen[client]:
            return False
        self._seen[client], self.served[client].finished = found.number, True
        self._heard_s[client] = self._cut.transport.now_s()
        self._cut.send(OVER_HEARD, client, found.number)
        return True

    def _first(self, client: int) -> bool:
        found = self._cut.newest("codes", client)
        if found is None or found.number <= self._seen[client]:
            return False
        number, values, _ = found
        self._seen[client], self._heard_s[client] = number, self._cut.transport.now_s()
        form = self._cut.form
        width = math.prod(form.codes)
        codes = values[:, :width].reshape(-1, *form.codes).to(self._device).requires_grad_()
        if form.outputs is not None:
            weights = {name: p.detach().clone() for name, p in self.middle.named_parameters()}
            made = torch.func.functional_call(
                self.middle, {n: w.requires_grad_() for n, w in weights.items()}, codes
            )
            self._open[client] = _Open(number, codes, made, weights)
            self._cut.send("outputs", client, number, made)
            return True
        labels = values[:, width:].reshape(-1, *form.labels).to(self._device, form.label_dtype)
        loss = self._criterion(self.middle(codes), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._learn(client, number, _gradient(codes), float(loss.detach()))
        return True

    def _second(self, client: int) -> bool:
        """In the U-shaped form: the gradient of outputs that the client was sent."""
        if client not in self._open:
            return False
        turn = self._open[client]
        found = self._cut.newest("outputs.grad", client)
        if found is None or found.number != turn.number:
            return False
        del self._open[client]
        self._heard_s[client] = self._cut.transport.now_s()
        given = found.values.to(turn.made)
        wanted = [turn.codes, *turn.weights.values()]
        down, *gradients = torch.autograd.grad(turn.made, wanted, given, allow_unused=True)
        for p, gradient in zip(self.middle.parameters(), gradients, strict=True):
            p.grad = gradient
        self._learn(client, turn.number, _or_zeros(down, turn.codes))
        return True

    def _learn(self, client: int, number: int, down: Tensor, loss: float = 0.0) -> None:
        """Gradients are there: take the step, and send the codes' to the client, if all are finite."""
        gradients = [down, *(p.grad for p in self.middle.parameters() if p.grad is not None)]
        if not math.isfinite(loss) or not all(bool(g.isfinite().all()) for g in gradients):
            self._optimizer.zero_grad()
            self.served[client].refused += 1
            return
        self._optimizer.step()
        self.served[client].requests += 1
        self._cut.send("codes.grad", client, number, down, loss)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.middle.parameters()), torch.device("cpu"))


def hand_over(giver: nn.Module, taker: nn.Module) -> int:
    """The next client begins with the weights below the cut of the one before it, and with its buffers.

    Returns what that sends: the bytes of parameters and buffers.
    Raises RuntimeError: the modules differ.
    """
    state = giver.state_dict()
    taker.load_state_dict(state)
    return sum(value.nbytes for value in state.values())


def federated_bytes(clients: int, parameters: int) -> int:
    """Of an epoch of federated averaging, one average in it: each client's model up, the mean down."""
    return 2 * clients * parameters * VALUE_BYTES


def split_bytes(
    samples: int, width: int, *, clients: int = 0, parameters: int = 0, share: float = 0.0
) -> float:
    """Of an epoch of split learning: codes up and gradients down, and weights from client to client.

    samples: of all clients together.
    width: values of a sample's code.
    share: of ``parameters``, how many lie below the cut; 0: clients do not hand weights on.
    """
    return (2 * samples * width + share * clients * parameters) * VALUE_BYTES


def large_batch_bytes(steps: int, parameters: int) -> int:
    """Of one client in so many steps of synchronous SGD: its gradient up, the new model down."""
    return 2 * steps * parameters * VALUE_BYTES


def crossover_clients(samples: int, width: int, parameters: int) -> float:
    """From so many clients on an epoch of split learning sends less than one of federated averaging."""
    return samples * width / parameters


def _gradient(values: Tensor) -> Tensor:
    return _or_zeros(values.grad, values)


def _or_zeros(gradient: Tensor | None, values: Tensor) -> Tensor:
    return torch.zeros_like(values) if gradient is None else gradient
