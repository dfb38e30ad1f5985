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

**A standby** takes the place of a server that dies or freezes. It asks the server for a copy of its layers,
and then stands still for some times as long as the copy took, so copies take a known share of the line. A
copy that does not come for the sum of two budgets, measured from earlier ones, is the sign: the standby goes
on from its newest copy, for good. Clients do nothing about it: they ask under one name, of which only one
server takes requests, and go by the standby's answers from its first one on; a server that comes back hears
of it, and ends. What costs: the steps since the newest copy, the requests that clients give up meanwhile, and
the state of the server's optimizer, which is not copied.

**Several standbys** stand in a row behind the server, so that one server after the other may die. Each has
its copies from the one before it, which hands on its own, so the server makes no more of them. It passes over
one that brings none, and takes over once nobody before it is left. Of those that serve, the last in the row
counts: for clients, and for those before it, which end. So no two go on for long, whoever was only frozen.

**Several servers** (``server=(0, 1)``) share the clients among them, in turn. Each trains layers of its own,
and publishes them once it has answered as many requests as it has clients. Each mixes what comes from
another with its own, as in gossip averaging (Boyd et al., 2006), so nobody waits. In the end all take the
mean of what those that have clients ended with. A client that goes without an answer twice in a row turns to
the next server, for good.

A server sees codes and gradients, and labels in the plain form. NoPeek lowers what codes tell by some
(``ragtag.privacy.meters``); a server that sends gradients of its own choice is stopped by nothing here
(``ragtag.privacy.hijacking`` is one). A
server learns nothing of requests whose loss or gradients are not finite; against finite nonsense from a
client it has no guard, and a label that its criterion refuses ends it with that error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
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
_TRIED = 2
"""Samples by which layers are tried before any are trained."""
_LOOKS = 16
"""How often an answer is looked for in the time that one takes."""
_LOOK_MIN_S = 1e-3
_LINGERS = 4.0
"""A server stays for so many of the times between its answers, so that clients can take the last one."""
_HEAD = 3
OVER, OVER_HEARD = "over", "over.heard"
"""Messages without values: a client has finished, and the server has heard."""
COPY, COPY_ASKED, TAKEN_OVER = "copy", "copy.asked", "taken.over"
"""Between a server and its standby: the state of its layers, a question for it, and that the server has been
replaced; the last two have no values. A question has the place of the one that is asked where others have the
loss, and an answer whether it is the last copy."""
LAYERS, SETTLED, TURNED = "layers", "settled", "turned"
"""With several servers: the state of one's layers, and for the loss whether it is how it ended; that a server
has what all others ended with; that a client turns to another server, its place for the loss. The last two
have no values."""
_COUNTS, _SERVED_NOBODY = 1.0, 2.0
"""How one of several servers ended: what it has without clients is out of date."""
COPIES_SHARE = 0.1
"""Of the time, how much a standby spends on copies at most."""
STANDBY = "standby"
_MISSES = 2
"""Budgets in a row without a copy, or an answer, after which a server counts as dead."""
Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class SplitTraffic:
    """What has crossed a cut: payload, without headers.

    up_bytes, down_bytes: activations and gradients, from the client and to it.
    label_bytes: labels, from the client; 0 in the U-shaped form.
    copy_bytes: the server's layers, to its standby.
    messages: in both directions; labels go along with codes.
    """

    up_bytes: int = 0
    down_bytes: int = 0
    label_bytes: int = 0
    copy_bytes: int = 0
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
        Raises ValueError: NoPeek has a weight, and the batch is one sample.
        """
        _require_pairs("SplitModel", self._nopeek, len(x))
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
    server_values: ``state_values`` of the server's layers, where there are several servers or a standby;
        else 0.

    Raises ValueError: a size is below 1, or the U-shaped form has labels, which stay with the client.
    """

    batch: int
    codes: tuple[int, ...]
    outputs: tuple[int, ...] | None = None
    labels: tuple[int, ...] = ()
    label_dtype: torch.dtype = torch.int64
    server_values: int = 0

    def __post_init__(self) -> None:
        if min((self.batch, *self.codes, *(self.outputs or ()), *self.labels)) < 1 or self.server_values < 0:
            raise ValueError(f"{self}: all sizes must be 1 or more")
        if self.outputs is not None and self.labels:
            raise ValueError(
                f"{self}: with outputs (the U-shaped form) labels stay with clients: leave labels out"
            )

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
    form: what crosses.
    server: the peer that is the server, or several, among which clients are dealt.
    standby: the peer that takes over from it, or several in their order; ``None``: none does. All others that
        are there now are clients.
    name: of this cut. on_publish: called after each message.

    Raises:
        ValueError: there is no such server or standby, or nobody else; the form says otherwise of a standby.
        ragtag.SchemaMismatch: another peer has another form, server or standby.
    """

    def __init__(
        self,
        transport: PublishingTransport,
        form: CutForm,
        *,
        server: int | Sequence[int] = 0,
        standby: int | Sequence[int] | None = None,
        name: str = "split",
        on_publish: Callable[[], None] = lambda: None,
    ) -> None:
        standbys = (standby,) if isinstance(standby, int) else tuple(standby or ())
        heads = (server,) if isinstance(server, int) else tuple(server)
        odd = [peer for peer in heads if not 0 <= peer < transport.n]
        if odd or not heads or len(set(heads)) < len(heads) or transport.n <= len(heads):
            raise ValueError(
                f"split learning: server {server} of {transport.n} peers; it takes a client and a server"
            )
        if len(heads) > 1 and standbys:
            raise ValueError(
                f"split learning: standby {standby} beside servers {heads}: several servers have "
                "each other's layers, and take each other's clients: leave the standby out"
            )
        odd = [peer for peer in standbys if not 0 <= peer < transport.n]
        if odd or len({*heads, *standbys}) <= len(standbys) or len(heads + standbys) >= transport.n:
            raise ValueError(
                f"split learning: standby {standby} of {transport.n} peers beside server {server}; it takes "
                "a client, a server and other peers as standbys"
            )
        if (len(heads + standbys) > 1) != bool(form.server_values):
            raise ValueError(
                f"split learning: server {server} and standby {standby} with server_values="
                f"{form.server_values}: give state_values(layers of the server) where there are several of "
                "them, else leave it out"
            )
        self.transport, self.form = transport, form
        self.servers, self.several = (*heads, *standbys), len(heads) > 1
        """In their order; whether all of them serve, or the first, with standbys behind it."""
        self.clients = [peer for peer in range(transport.n) if peer not in self.servers]
        begin_s = transport.now_s()
        names = [f"{way}/{client}" for client in self.clients for way in [*form.ways, OVER, OVER_HEARD]]
        for place in range(1, len(self.servers)):
            names += [_down(way, client, place) for client in self.clients for way in self._downs]
            names += [f"{way}/{place}" for way in (COPY, COPY_ASKED, TAKEN_OVER) if not self.several]
        if self.several:
            names += [f"{way}/{at}" for way in (LAYERS, SETTLED) for at in range(len(heads))]
            names += [f"{TURNED}/{client}" for client in self.clients]
        shapes = {name: (_HEAD + self._size(name.partition("/")[0]),) for name in names}
        self.tensors = NamedTensors(
            transport,
            name,
            computed=shapes,
            pushed=True,
            settings="server "
            + " and ".join(map(str, heads))
            + "".join(f", standby {peer}" for peer in standbys)
            + f", peers 0 to {transport.n - 1} alone",  # one that comes later has no part, and is told so
            on_publish=on_publish,
        )
        self.opened_s = max(_LOOK_MIN_S, transport.now_s() - begin_s)
        """How long it took to meet: the first guess of what an answer takes."""
        self.traffic = SplitTraffic()

    @property
    def _downs(self) -> list[str]:
        """The messages to a client, by name."""
        return [way for way in self.form.ways if way in ("codes.grad", "outputs")] + [OVER_HEARD]

    def downs(self, client: int) -> list[str]:
        """What a client takes: what any server sends it."""
        places = range(len(self.servers))
        return [_down(way, client, place) for way in self._downs for place in places]

    def ups(self, clients: Collection[int]) -> list[str]:
        """What a peer takes that is their server now."""
        ways = [way for way in self.form.ways if way in ("codes", "outputs.grad")]
        return [f"{way}/{client}" for client in clients for way in (*ways, OVER)]

    def place(self, server: int, client: int) -> int:
        """Of a server for a client: 0 is the first one that serves it."""
        first = self.clients.index(client) if self.several else 0
        return (self.servers.index(server) - first) % len(self.servers)

    def _size(self, way: str) -> int:
        """Values in a message, head apart."""
        if way in (COPY, LAYERS):
            return self.form.server_values
        shape = self.form.ways.get(way)
        return 0 if shape is None else self.form.batch * math.prod(shape)

    def send(
        self, way: str, client: int, number: int, values: Tensor | None = None, loss: float = 0.0
    ) -> None:
        """Publish a message between a client and this server, or the other way round.

        client: from or to which it is.
        values: ``[samples, ...]``; ``None`` where the message has none.
        """
        me, traffic = self.transport.me, self.traffic
        name, size = f"{way}/{client}", self._size(way)
        if me in self.servers:
            name = _down(way, client, self.place(me, client))
            traffic.down_bytes += self._publish(name, size, number, values, loss)
        else:
            sent = self._publish(name, size, number, values, loss)
            codes = self.form.batch * math.prod(self.form.codes) * VALUE_BYTES
            labels = max(0, sent - codes) if way == "codes" else 0
            traffic.up_bytes += sent - labels
            traffic.label_bytes += labels

    def send_between(
        self, way: str, place: int, number: int, values: Tensor | None = None, loss: float = 0.0
    ) -> None:
        """Publish a message between servers.

        place: of the standby that asks, is answered, or has taken over; of several servers its own.
        """
        sent = self._publish(f"{way}/{place}", self._size(way), number, values, loss)
        self.traffic.copy_bytes += sent

    def _publish(self, name: str, size: int, number: int, values: Tensor | None, loss: float) -> int:
        """Returns the bytes of what was handed on, head apart."""
        values = torch.zeros(0, device="cpu") if values is None else values
        if values.numel() > size:
            raise ValueError(
                f"split learning: {list(values.shape)} for {name}; {self.form} has no room for that"
            )
        flat = torch.zeros(_HEAD + size, device="cpu")
        flat[:_HEAD] = torch.tensor([number, len(values), loss], device="cpu")
        flat[_HEAD : _HEAD + values.numel()] = values.detach().reshape(-1).to("cpu", torch.float32)
        self.tensors.publish({name: flat})
        self.traffic.messages += 1
        return flat[_HEAD:].nbytes

    def newest(self, way: str, of: int) -> _Message | None:
        """The newest message; ``None``: there is none. Its values are a copy.

        of: the client; between servers the place, as in ``send_between``. Once a server has answered a
            client, its answers count, and none of servers before it.
        """
        names = [f"{way}/{of}"]
        if way in self._downs:
            names = [_down(way, of, place) for place in reversed(range(len(self.servers)))]
        found = next((one for one in map(self.tensors.newest, names) if one is not None), None)
        if found is None:
            return None
        number, samples, loss = found.tensor[:_HEAD].tolist()
        if way not in self.form.ways:
            return _Message(int(number), found.tensor[_HEAD:].clone(), loss)
        values = found.tensor[_HEAD:].reshape(self.form.batch, *self.form.ways[way])
        if not 0 <= samples <= self.form.batch:
            return None  # no client of this form says so
        return _Message(int(number), values[: int(samples)].clone(), loss)


def _down(way: str, client: int, place: int) -> str:
    """What a server sends a client, by its place."""
    return f"{way}/{client}" + (f"/{STANDBY} {place}" if place else "")


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

    Raises ValueError: the form and ``back`` do not go together, ``back`` learns nothing (it hides no label
    then), or this peer is a server.
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
        if not nopeek >= 0:
            raise ValueError(f"SplitClient: nopeek is {nopeek}; it must be 0 or more")
        if cut.transport.me in cut.servers:
            what = "standby" if cut.transport.me in cut.servers[1:] and not cut.several else "server"
            raise ValueError(f"SplitClient: peer {cut.transport.me} is the {what}")
        if back is not None and cut.form.outputs is not None:
            if not any(p.requires_grad for p in back.parameters()):
                raise ValueError(
                    "SplitClient: back has no weights that it learns, so the gradient of what it is given "
                    "tells the labels: give the client a last layer of its own, or take the plain form"
                )
            _tried(back, cut.form.outputs, "SplitClient: back", "outputs")
        self.front, self.back = front, back
        self._criterion, self._nopeek, self._deadline_s = criterion, nopeek, deadline_s
        self._cut, self._me = cut, cut.transport.me
        self._turns = Deadline(cut.opened_s, headroom=2.0, backoff=2.0, backoff_max=BACKOFF_MAX)
        cut.tensors.only(cut.downs(self._me))
        self._number = 0
        self._heard_s = cut.transport.now_s()
        self._given_up: dict[int, float] = {}
        self._answers = self._place = self._unanswered = 0
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
            ValueError: the batch, its codes or labels do not fit the form, or NoPeek has one sample only;
                nothing has left.
            ragtag.NotFinite: codes are NaN or infinite.
        """
        _require_pairs("SplitClient", self._nopeek, len(x))
        number = self._next()
        codes = self.front(x)
        self._require_fit(codes, x, y)
        if self.back is None:
            labels = y.reshape(len(x), -1).to("cpu", torch.float32)
            sent = torch.cat([codes.detach().reshape(len(x), -1).to("cpu", torch.float32), labels], 1)
            down = self._ask("codes", sent, "codes.grad", number)
            loss = None if down is None else torch.tensor(down.loss, device="cpu")
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

    def _require_fit(self, codes: Tensor, x: Tensor, y: Tensor) -> None:
        """Before anything leaves: what the server takes for a sample's codes and labels is that."""
        form = self._cut.form
        if not 1 <= len(x) <= form.batch:
            raise ValueError(f"SplitClient: a batch of {len(x)} samples; {form} has no room for that")
        if codes.shape != (len(x), *form.codes):
            raise ValueError(
                f"SplitClient: front makes codes {list(codes.shape)} of {len(x)} samples; the form says "
                f"{[len(x), *form.codes]}: give CutForm codes={tuple(codes.shape[1:])} on all peers, or "
                "another front"
            )
        if len(y) != len(x):
            raise ValueError(f"SplitClient: {len(y)} labels for {len(x)} samples")
        if self.back is not None:
            return
        if tuple(y.shape[1:]) != form.labels:
            raise ValueError(
                f"SplitClient: labels {list(y.shape)}; the form says {[len(x), *form.labels]}: give CutForm "
                f"labels={tuple(y.shape[1:])} on all peers"
            )
        if y.is_floating_point() != form.label_dtype.is_floating_point:
            raise ValueError(f"SplitClient: labels are {y.dtype}; the form says {form.label_dtype}")
        if not y.is_floating_point() and int(y.abs().max()) > NUMBERED_MAX:
            raise ValueError(
                f"SplitClient: a label beyond {NUMBERED_MAX:,}, which float32 does not hold exactly"
            )

    def _through_back(self, codes: Tensor, y: Tensor, number: int) -> tuple[_Message | None, Tensor | None]:
        """The U-shaped form: outputs come, their gradient goes, and the codes' comes."""
        made = self._ask("codes", codes, "outputs", number)
        if made is None or self.back is None:
            return None, None
        given = made.values.to(codes.device).requires_grad_()
        loss = self._criterion(self.back(given), y)
        learned = [p for p in self.back.parameters() if p.requires_grad]
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
            if not self._cut.transport.live.intersection(self._cut.servers):
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
                self._heard_s, self._given_up, self._unanswered = now_s, {}, 0
                self._answers += 1
                return found
            if now_s >= until_s:
                turns.missed()
                self._turn_away()
                self.missed += values is not None
                self._given_up = {number: begin_s}
                if now_s - self._heard_s >= self._deadline_s:
                    by = " nor ".join(f"peer {peer}" for peer in self._cut.servers)
                    raise ServerGone(
                        f"split learning: {'neither ' * (len(self._cut.servers) - 1)}{by} has answered "
                        f"nothing for {now_s - self._heard_s:.3g} s ({self.missed} requests)"
                    )
                return None
            transport.pause(min(max(_LOOK_MIN_S, turns.typical_s() / _LOOKS), until_s - now_s))

    def _turn_away(self) -> None:
        """A request has no answer: where there are several servers, the next one may have to do."""
        cut = self._cut
        self._unanswered += 1
        if cut.several and self._unanswered >= _MISSES and self._place < len(cut.servers) - 1:
            self._place, self._unanswered = self._place + 1, 0
            cut.send(TURNED, self._me, self._next(), loss=self._place)


class _Open(NamedTuple):
    """A turn of the U-shaped form that waits for its outputs' gradient.

    weights: those of ``middle`` that learn, as they were: other clients' turns change them meanwhile.
    """

    number: int
    codes: Tensor
    made: Tensor
    weights: dict[str, Tensor]


@dataclass(slots=True)
class _Copied:
    """What a standby behind has had from here.

    asked_s: when it asked last. asked: the number of that question. here: whether its newest is for this one.
    last: the question that brought it the last copy.
    """

    asked_s: float
    asked: int = 0
    here: bool = False
    last: int | None = None

    @property
    def taken(self) -> bool:
        """Whether it has the last copy, since it has asked again."""
        return self.last is not None and self.asked > self.last


@dataclass(slots=True)
class Served:
    """What a server did for one client.

    requests: answered ones.
    refused: requests of which outputs, loss or a gradient is NaN or infinite, or of one sample where layers
        take no fewer than two (batch norm): nothing was learned of these.
    finished: it has said that no more comes.
    lost: it was this server's, and has left, or was silent for too long.
    """

    requests: int = 0
    refused: int = 0
    finished: bool = False
    lost: bool = False


class SplitServer:
    """The server in a crew, or a standby of it: the layers above the cut.

    cut: of the crew (``crew.cut``); this peer is its server or a standby.
    middle, criterion: as in ``SplitModel``.
    optimizer: of ``middle``; it takes a step for each request.
    served: what was done for each client.
    took_over_s: this is a standby, and since this time its layers are the ones that clients train with;
        ``None``: it has not taken over.
    replaced: a standby behind this peer took over: the layers here are out of date.

    Raises ValueError: this peer is a client, or ``middle`` is not as the form says.
    """

    def __init__(
        self,
        cut: Cut,
        middle: nn.Module,
        optimizer: Optimizer,
        *,
        criterion: Criterion = nn.functional.cross_entropy,
    ) -> None:
        if cut.transport.me not in cut.servers:
            raise ValueError(f"SplitServer: peer {cut.servers[0]} is the server, not peer {cut.transport.me}")
        self.middle, self._optimizer, self._criterion = middle, optimizer, criterion
        self._cut = cut
        self.took_over_s: float | None = None
        self.replaced = False
        self._require_fit()
        self._at = cut.servers.index(cut.transport.me)
        self._place = 0 if cut.several else self._at
        self._behind = range(0) if cut.several else range(self._place + 1, len(cut.servers))
        self._mine = {client for client in cut.clients if cut.place(cut.transport.me, client) == 0}
        self._mixed = dict.fromkeys(range(len(cut.servers)), 0)
        self._mixed_s = dict.fromkeys(self._mixed, cut.transport.now_s())
        self._unmixed = 0
        self._end: tuple[float, Tensor] | None = None
        self._take(serves=self._place == 0)
        self._turns = Deadline(cut.opened_s, headroom=_LINGERS)
        self._copies = Deadline(cut.opened_s, headroom=2.0, backoff=2.0, backoff_max=BACKOFF_MAX)
        self._seen = dict.fromkeys(cut.clients, 0)
        self._open: dict[int, _Open] = {}
        self._heard_s = dict.fromkeys(cut.clients, cut.transport.now_s())
        self._copied = {place: _Copied(cut.transport.now_s()) for place in self._behind}
        self._has_copy = self._place == 0
        self.served = {client: Served() for client in cut.clients}

    @property
    def traffic(self) -> SplitTraffic:
        """What this server has sent (``down_bytes``), full batches whatever was in them."""
        return self._cut.traffic

    @property
    def copy_s(self) -> float:
        """At a standby: how long a copy of the server's layers takes."""
        return self._copies.typical_s()

    def serve(self, deadline_s: float = 120.0) -> dict[int, Served]:
        """Answer requests until each client has finished, has left, or has asked nothing for ``deadline_s``.

        A standby first keeps a copy of the server's layers, until the server has finished, or is gone; the
        first copy is waited for ``deadline_s``.

        Returns what was done for each.
        """
        transport = self._cut.transport
        if self._place and not self._stand_by(deadline_s):
            return self.served
        quiet_s = transport.now_s()
        while not self._is_replaced():
            self._adopt()
            answered = sum(self._answer(client) for client in sorted(self._mine))
            self._mix(answered)
            now_s, live = transport.now_s(), transport.live
            for client, served in self.served.items():
                silent = now_s - self._heard_s[client] >= deadline_s
                gone = client not in live or silent  # another server's clients end with that
                served.lost = client in self._mine and not served.finished and gone
            if answered:
                self._turns.completed(now_s - quiet_s)
                quiet_s = now_s
            over = all(self.served[client].finished or self.served[client].lost for client in self._mine)
            alone = self._copy(over, deadline_s) and self._all_end(over, deadline_s)
            if over and alone and now_s - quiet_s >= self._turns.budget_s():  # the last answer has been taken
                self._settle(deadline_s)
                return self.served
            if not answered:
                transport.pause(max(_LOOK_MIN_S, self._turns.typical_s() / _LOOKS))
        return self.served

    def _require_fit(self) -> None:
        """Before a client sends anything: these layers take what the form says, and make what it says."""
        form, has = self._cut.form, state_values(self.middle)
        if form.server_values and has != form.server_values:
            raise ValueError(
                f"SplitServer: middle has {has:,} values of weights and buffers; the form says "
                f"server_values={form.server_values}"
            )
        made = _tried(self.middle, form.codes, "SplitServer: middle", "codes")
        if form.outputs is not None:
            if tuple(made.shape[1:]) != form.outputs:
                raise ValueError(
                    f"SplitServer: middle makes outputs {list(made.shape[1:])} of a sample; the form says "
                    f"{list(form.outputs)}"
                )
            return
        labels = torch.zeros(_TRIED, *form.labels, dtype=form.label_dtype, device=made.device)
        try:
            loss = self._criterion(made, labels)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ValueError(
                f"SplitServer: the criterion does not take outputs {list(made.shape)} with labels "
                f"{list(labels.shape)} {labels.dtype}, which the form says: {error}"
            ) from error
        if loss.numel() != 1:
            raise ValueError(f"SplitServer: the criterion makes {list(loss.shape)}; it must make a scalar")

    # -- A server and its standbys

    def _take(self, serves: bool) -> None:
        """Take the messages that are for this server or standby, and of clients only if it serves."""
        cut, places = self._cut, range(1, len(self._cut.servers))
        if cut.several:
            names = [f"{way}/{at}" for way in (LAYERS, SETTLED) for at in self._others]
            names += [f"{TURNED}/{client}" for client in cut.clients]
            cut.tensors.only(names + cut.ups(sorted(self._mine)))
            return
        names = [f"{COPY_ASKED}/{place}" for place in self._behind]
        names += [f"{TAKEN_OVER}/{place}" for place in places if place != self._place]
        names += [f"{COPY}/{self._place}"] if self._place and not serves else []
        cut.tensors.only(names + (cut.ups(sorted(self._mine)) if serves else []))

    def _copy(self, over: bool, deadline_s: float) -> bool:
        """Send copies to those that ask this one.

        over: no client needs anything any more, so these copies are the last ones.
        Returns whether nobody behind needs more: who asks here, and the next one that lives, has the last
        copy, is gone, or has not asked for ``deadline_s``.
        """
        cut, now_s, live = self._cut, self._cut.transport.now_s(), self._cut.transport.live
        for place, copied in self._copied.items():
            asked = cut.newest(COPY_ASKED, place)
            if asked is None or asked.number <= copied.asked:
                continue
            copied.here = asked.loss == self._place
            if not copied.here or not self._has_copy:
                continue
            copied.asked, copied.asked_s = asked.number, now_s
            if copied.last is None:
                cut.send_between(COPY, place, asked.number, _state(self.middle), float(over))
                copied.last = asked.number if over else None
        there = [place for place in self._behind if cut.servers[place] in live]
        return all(
            copied.taken or now_s - copied.asked_s >= deadline_s
            for place, copied in self._copied.items()
            if place in there and (copied.here or place == there[0])
        )

    def _serving(self) -> int:
        """The place of the server now, as far as is known here."""
        places = () if self._cut.several else range(len(self._cut.servers) - 1, 0, -1)
        mine = self._place if self.took_over_s is not None else 0
        return next((p for p in places if p > mine and self._cut.newest(TAKEN_OVER, p) is not None), mine)

    def _is_replaced(self) -> bool:
        """Whether one behind this one serves the clients now."""
        self.replaced = self._serving() > self._place
        return self.replaced

    def _stand_by(self, deadline_s: float) -> bool:
        """Keep a copy of the server's layers. Returns whether to serve: nobody before this one is left."""
        cut, transport, budgets = self._cut, self._cut.transport, self._copies
        gone: set[int] = set()
        number, serving = 0, 0
        while not self._is_replaced():
            if self._serving() > serving:
                serving = self._serving()
                gone.discard(serving)
            before = [place for place in range(serving, self._place) if place not in gone]
            if not before:
                break
            number, begin_s, source = number + 1, transport.now_s(), before[-1]
            cut.send_between(COPY_ASKED, self._place, number, loss=source)
            found = self._next_copy(source, number, deadline_s)
            if found is None:
                gone.add(source)
                continue
            budgets.completed(transport.now_s() - begin_s)
            _take_state(self.middle, found.values)
            self._has_copy = True
            if found.loss:
                cut.send_between(COPY_ASKED, self._place, number + 1, loss=source)
                while not self._copy(True, deadline_s):
                    transport.pause(max(_LOOK_MIN_S, budgets.typical_s() / _LOOKS))
                return False
            self._wait(source, budgets.typical_s() * (1 / COPIES_SHARE - 1), deadline_s)
        if self.replaced:
            return False
        self.took_over_s = transport.now_s()
        self._has_copy = True
        self._mine = set(cut.clients)
        self._take(serves=True)
        cut.send_between(TAKEN_OVER, self._place, 1)
        self._heard_s = dict.fromkeys(cut.clients, self.took_over_s)
        return True

    def _next_copy(self, source: int, number: int, deadline_s: float) -> _Message | None:
        """Wait for a copy from the one at that place; ``None``: it is gone, or another one serves now."""
        budgets = self._copies
        for _ in range(_MISSES if self._has_copy else 1):
            for_s = budgets.budget_s() if self._has_copy else deadline_s
            if not self._wait(source, for_s, deadline_s, number):
                return None
            found = self._cut.newest(COPY, self._place)
            if found is not None and found.number >= number:
                return found
            budgets.missed()
        return None

    def _wait(self, source: int, for_s: float, deadline_s: float, number: int = NUMBERED_MAX) -> bool:
        """Stand still, and hand copies on, until a copy of that number is here, or for so long.

        Returns False at once where the one that is asked has left, or one after it serves.
        """
        cut, transport, begin_s = self._cut, self._cut.transport, self._cut.transport.now_s()
        look_s = min(for_s, max(_LOOK_MIN_S, self._copies.typical_s() / _LOOKS))
        while (left_s := begin_s + for_s - transport.now_s()) > 0:
            found = cut.newest(COPY, self._place)
            if found is not None and found.number >= number:
                return True
            if cut.servers[source] not in transport.live or self._serving() > source:
                return False
            self._copy(False, deadline_s)
            transport.pause(min(look_s, left_s))
        return True

    # -- Several servers

    @property
    def _others(self) -> list[int]:
        """The other servers' numbers in their order."""
        return [at for at in range(len(self._cut.servers)) if at != self._at]

    def _adopt(self) -> None:
        """Serve clients that have turned to this server, and no more those that have turned away."""
        cut, me = self._cut, self._cut.transport.me
        if not cut.several:
            return
        now = {client for client in cut.clients if cut.place(me, client) == self._turned(client)}
        if now != self._mine:
            self._heard_s |= dict.fromkeys(now - self._mine, cut.transport.now_s())
            self._mine = now
            self._take(serves=True)

    def _turned(self, client: int) -> int:
        """The place of the server that a client asks."""
        found = self._cut.newest(TURNED, client)
        return 0 if found is None else int(found.loss)

    def _mix(self, answered: int) -> None:
        """Publish these layers once each client has been answered, and mix what others have published."""
        cut = self._cut
        if not cut.several:
            return
        self._unmixed += answered
        if self._unmixed >= max(1, len(self._mine)):
            self._unmixed = 0
            self._tell_layers()
        for at in self._others:
            found = cut.newest(LAYERS, at)
            if found is not None and found.number > self._mixed[at]:
                self._mixed[at], self._mixed_s[at] = found.number, cut.transport.now_s()
                share = 1 / len(cut.servers)
                _take_state(self.middle, torch.lerp(_state(self.middle), found.values, share))

    def _tell_layers(self, end: float = 0.0) -> None:
        """Publish them. end: 0, or, in the end, ``_COUNTS`` or ``_SERVED_NOBODY``."""
        self._mixed[self._at] += 1
        self._end = (end, _state(self.middle)) if end else None
        self._cut.send_between(LAYERS, self._at, self._mixed[self._at], _state(self.middle), end)

    def _end_of(self, at: int) -> tuple[float, Tensor] | None:
        """How a server ended, and with what; ``None``: it goes on."""
        if at == self._at:
            return self._end
        found = self._cut.newest(LAYERS, at)
        return None if found is None or not found.loss else (found.loss, found.values)

    def _all_end(self, over: bool, deadline_s: float) -> bool:
        """Of several servers: tell others when this one ends; whether all do, or are gone.

        One that has clients publishes, or gives them up after ``deadline_s``; so one that did neither for
        twice as long is gone.
        """
        cut, now_s = self._cut, self._cut.transport.now_s()
        if over and cut.several and self._end is None:
            self._tell_layers(_COUNTS if self._mine else _SERVED_NOBODY)
        return all(
            self._end_of(at) is not None
            or cut.servers[at] not in cut.transport.live
            or now_s - self._mixed_s[at] >= 2 * deadline_s
            for at in (self._others if cut.several else ())
        )

    def _settle(self, deadline_s: float) -> None:
        """Several servers that end take the mean, and stay until the others have all it takes for that."""
        cut, transport, begin_s = self._cut, self._cut.transport, self._cut.transport.now_s()
        if not cut.several:
            return
        ends = {at: end for at in range(len(cut.servers)) if (end := self._end_of(at)) is not None}
        cut.send_between(SETTLED, self._at, 1)
        counted = [values for how, values in ends.values() if how == _COUNTS]
        if counted:
            _take_state(self.middle, torch.stack(counted).mean(0))
        there = ends.keys() - {self._at}
        while transport.now_s() - begin_s < deadline_s and any(
            cut.servers[at] in transport.live and cut.newest(SETTLED, at) is None for at in there
        ):
            transport.pause(max(_LOOK_MIN_S, self._turns.typical_s() / _LOOKS))

    # -- Requests

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
            named = [*self.middle.named_parameters(), *self.middle.named_buffers()]
            state = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in named}
            made = self._made(codes, state)
            if made is None or not bool(made.isfinite().all()):
                self.served[client].refused += 1
                return True
            with torch.no_grad():
                for name, buffer in self.middle.named_buffers():
                    buffer.copy_(state[name])
            weights = {name: value for name, value in state.items() if value.requires_grad}
            self._open[client] = _Open(number, codes, made, weights)
            self._cut.send("outputs", client, number, made)
            return True
        labels = values[:, width:].reshape(-1, *form.labels).to(self._device, form.label_dtype)
        made = self._made(codes)
        if made is None:
            self.served[client].refused += 1
            return True
        loss = self._criterion(made, labels)
        self._forget_gradients()
        loss.backward()  # type: ignore[no-untyped-call]
        self._learn(client, number, _gradient(codes), float(loss.detach()))
        return True

    def _made(self, codes: Tensor, state: dict[str, Tensor] | None = None) -> Tensor | None:
        """What the layers make of codes; ``None``: they take no sample alone.

        Batch norm has no statistics of one, and a loader's last batch may be one: no server ends by that.

        state: weights and buffers in the place of the layers' own.
        """
        try:
            return torch.func.functional_call(self.middle, state or {}, codes)  # type: ignore[no-any-return]
        except ValueError:
            if len(codes) > 1:
                raise
            return None

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
        for name, gradient in zip(turn.weights, gradients, strict=True):
            self.middle.get_parameter(name).grad = gradient
        self._learn(client, turn.number, _or_zeros(down, turn.codes))
        return True

    def _learn(self, client: int, number: int, down: Tensor, loss: float = 0.0) -> None:
        """Gradients are there: take the step, and send the codes' to the client, if all are finite."""
        gradients = [down, *(p.grad for p in self.middle.parameters() if p.grad is not None)]
        if not math.isfinite(loss) or not all(bool(g.isfinite().all()) for g in gradients):
            self._forget_gradients()
            self.served[client].refused += 1
            return
        self._optimizer.step()
        self.served[client].requests += 1
        self._cut.send("codes.grad", client, number, down, loss)

    def _forget_gradients(self) -> None:
        """Those of layers that the optimizer does not step, too: they count when gradients must be finite."""
        self._optimizer.zero_grad()
        self.middle.zero_grad()

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


def state_values(module: nn.Module) -> int:
    """How many values the weights and buffers of a server's layers have, for ``CutForm.server_values``."""
    return sum(value.numel() for value in module.state_dict().values())


def _state(module: nn.Module) -> Tensor:
    """Weights and buffers, float32 ``[state_values]``."""
    parts = [value.detach().reshape(-1).to("cpu", torch.float32) for value in module.state_dict().values()]
    return torch.cat(parts)


@torch.no_grad()
def _take_state(module: nn.Module, values: Tensor) -> None:
    """The other way: float32 ``[state_values]`` into weights and buffers."""
    state = module.state_dict()
    sizes = [value.numel() for value in state.values()]
    for value, part in zip(state.values(), torch.split(values, sizes), strict=True):
        value.copy_(part.reshape(value.shape))


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


def _require_pairs(what: str, nopeek: float, samples: int) -> None:
    if nopeek and samples < 2:
        raise ValueError(
            f"{what}: NoPeek's distances take 2 samples or more, and this batch has {samples}: give the "
            "loader drop_last=True, or larger batches"
        )


def _tried(module: nn.Module, shape: tuple[int, ...], what: str, given: str) -> Tensor:
    """What layers make of zeros ``[_TRIED, *shape]``, in evaluation mode, so that none keeps any of it.

    Raises ValueError: they do not take that.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        made: Tensor = module(torch.zeros(_TRIED, *shape, device=device)).detach()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{what} does not take the form's {given} {list(shape)}: {error}") from error
    finally:
        for part, mode in modes:
            part.training = mode
    return made


def _gradient(values: Tensor) -> Tensor:
    return _or_zeros(values.grad, values)


def _or_zeros(gradient: Tensor | None, values: Tensor) -> Tensor:
    return torch.zeros_like(values) if gradient is None else gradient
