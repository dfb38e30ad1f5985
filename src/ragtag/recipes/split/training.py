"""Trains by split learning: beside the whole net, by clients in turn, on skewed data, and where peers die.

Clients and servers are a user's loops: ``privacy.SplitModel`` in one process, where clients hand weights on,
and ``privacy.SplitClient`` and ``SplitServer`` in crews in virtual time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.core.faults import Crash, Faults, Freeze
from ragtag.privacy.split import (
    Cut,
    ServerGone,
    SplitClient,
    SplitModel,
    SplitServer,
    hand_over,
    split_bytes,
    state_values,
)
from ragtag.recipes.private.counted import crossed
from ragtag.recipes.private.training import (
    BATCH,
    CLIENTS,
    DEADLINE_S,
    LATENCY_S,
    MOMENTUM,
    RATE,
    RATE_BYTES_PER_S,
    STEP_S,
    ClientDigits,
    CountedCrew,
    PrivateResult,
    PrivateSetup,
    accuracy_of,
    client_flops,
    cut_form,
    cut_in_three,
    cut_width,
    private_net,
    split_result,
)
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport

SKEWED_CLIENTS, CONCENTRATION = 8, 0.5
"""Labels of so many clients, by a Dirichlet distribution (Hsu et al., arXiv 1909.06335): the lower, the more
skewed."""
SAME_EPOCHS = 3
FAULT_EPOCHS = 6
FAULT_AT_S, FROZEN_S = 3.0, 1.0
"""When a peer dies or freezes in a run of some ten seconds, and for how long it is frozen."""
HANDED = ("split, handed on", "split, U-shaped, handed on")
FAULTS = ("none", "a client dies", "a client freezes", "the server dies", "it dies, no standby")


# -- The whole net's training


@dataclass(frozen=True, slots=True)
class SameResult:
    """Split training beside the same net trained whole on the same batches.

    apart: the largest difference of two weights, over the largest weight.
    loss_apart: of two losses of a batch, over the larger.
    steps: that were taken.
    moved: the largest difference of a weight to what it began as, over the largest weight.
    """

    form: str
    seed: int
    apart: float
    loss_apart: float
    steps: int
    moved: float


def same(form: str, seed: int) -> SameResult:
    """Train the net whole, and by split learning: ``form`` is "plain", "U-shaped" or "in turn"."""
    torch.set_num_threads(1)
    digits, parts = ClientDigits.drawn(seed)
    order = list(_in_turn(parts, seed, SAME_EPOCHS))
    whole = nn.Sequential(*private_net(seed))
    momentum = 0.0 if form == "in turn" else MOMENTUM  # what an optimizer keeps is not handed on
    optimizer, losses = torch.optim.SGD(whole.parameters(), RATE / 2, momentum), []
    for _, some in order:
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(digits.train_x[some]), digits.train_y[some])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    if form == "in turn":
        split, found = _turns(digits, order, seed)
    else:
        split, found = _one_client(digits, order, seed, form == "U-shaped")
    mine, theirs, first = (_flat(net) for net in (split, whole, nn.Sequential(*private_net(seed))))
    most = float(theirs.abs().max())
    pairs = zip(found, losses, strict=True)
    return SameResult(
        form,
        seed,
        apart=float((mine - theirs).abs().max()) / most,
        loss_apart=max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs),
        steps=len(order),
        moved=float((theirs - first).abs().max()) / most,
    )


def _one_client(
    digits: ClientDigits, order: list[tuple[int, Tensor]], seed: int, u_shaped: bool
) -> tuple[nn.Module, list[float]]:
    """A crew of a server and a client, which has all samples. Returns the net, and the losses."""
    layers: dict[int, list[nn.Module]] = {}
    losses: list[float] = []

    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, cut_form(u_shaped))
        below, above, back = cut_in_three(seed, u_shaped)
        if peer.me == 0:
            layers[0] = [above]
            SplitServer(cut, above, torch.optim.SGD(above.parameters(), RATE / 2, MOMENTUM)).serve(DEADLINE_S)
            return
        layers[1] = [below, *([back] if back is not None else [])]
        client = SplitClient(cut, below, back)
        optimizer = torch.optim.SGD(nn.ModuleList(layers[1]).parameters(), RATE / 2, MOMENTUM)
        for _, some in order:
            peer.compute()
            optimizer.zero_grad()
            loss = client.backward(digits.train_x[some], digits.train_y[some])
            losses.append(float("nan") if loss is None else float(loss))
            optimizer.step()
        client.finish()

    SimulatedCrew(2, _lines(), seed, cost=ComputeCost(STEP_S)).run(train)
    return nn.Sequential(layers[1][0], layers[0][0], *layers[1][1:]), losses


def _turns(digits: ClientDigits, order: list[tuple[int, Tensor]], seed: int) -> tuple[nn.Module, list[float]]:
    """``CLIENTS`` clients, each with a part of the samples, that hand weights on. Returns net and losses."""
    clients = InTurn(seed, CLIENTS, RATE / 2, u_shaped=False)
    losses = [clients.step(client, digits.train_x[some], digits.train_y[some]) for client, some in order]
    return nn.Sequential(clients.splits[clients.last].front, clients.above), losses


def _in_turn(parts: list[Tensor], seed: int, epochs: int, at: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Clients' numbers and batches, in the order in which clients in turn take them; none of one sample.

    at: of the draw, where there are several.
    """
    draw = random.generator(seed, "batches in turn", at)
    for _ in range(epochs):
        for client, part in enumerate(parts):
            for some in torch.split(part[torch.from_numpy(draw.permutation(len(part)))], BATCH):
                if len(some) > 1:
                    yield client, some


def _flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


# -- Clients in turn, which hand weights on


class InTurn:
    """Clients that train one after the other with a server, each from the weights of the one before.

    splits: each client's. above: the server's layers. last: the client that trained last.
    handed_bytes: what went from client to client.
    """

    def __init__(self, seed: int, clients: int, rate: float, *, u_shaped: bool) -> None:
        below, self.above, back = cut_in_three(seed, u_shaped)
        self.splits = [
            SplitModel(copy.deepcopy(below), self.above, copy.deepcopy(back)) for _ in range(clients)
        ]
        self._server = torch.optim.SGD(self.above.parameters(), rate)
        self._own = [torch.optim.SGD(self._ends(client).parameters(), rate) for client in range(clients)]
        self.last, self.handed_bytes = 0, 0

    def step(self, client: int, x: Tensor, y: Tensor) -> float:
        """A client takes a batch. Returns its loss."""
        self.hand_to(client)
        self._server.zero_grad()
        self._own[client].zero_grad()
        loss = self.splits[client].backward(x, y)
        self._server.step()
        self._own[client].step()
        return float(loss)

    def hand_to(self, client: int) -> None:
        """It is this client's turn."""
        if client != self.last:
            self.handed_bytes += hand_over(self._ends(self.last), self._ends(client))
            self.last = client

    def _ends(self, client: int) -> nn.ModuleList:
        """A client's layers."""
        split = self.splits[client]
        return nn.ModuleList([split.front, *([split.back] if split.back is not None else [])])


def in_turn(setup: PrivateSetup) -> PrivateResult:
    """Train by one of ``HANDED``: four clients in turn, which hand weights on once an epoch, and measure."""
    torch.set_num_threads(1)
    u_shaped = "U-shaped" in setup.method
    digits, parts = ClientDigits.drawn(setup.seed)
    clients, spent_s = InTurn(setup.seed, CLIENTS, RATE, u_shaped=u_shaped), 0.0
    begin_s = time.thread_time()
    for client, some in _in_turn(parts, setup.seed, setup.epochs):
        clients.step(client, digits.train_x[some], digits.train_y[some])
    clients.hand_to(0)  # the next epoch's first
    spent_s = time.thread_time() - begin_s
    split = clients.splits[0]
    traffics = [each.traffic for each in clients.splits]
    ends = nn.ModuleList([split.front, *([split.back] if split.back is not None else [])])
    size, total = len(_flat(ends)), len(_flat(ends)) + len(_flat(clients.above))
    samples = sum(len(part) for part in parts)
    width = cut_width(cut_form(u_shaped))
    formula = split_bytes(samples, width, clients=CLIENTS, parameters=total, share=size / total)
    return split_result(
        setup,
        digits,
        clients.above,
        [(split.front, split.back)],
        (sum(traffic.bytes for traffic in traffics) + clients.handed_bytes) / setup.epochs,
        formula,
        samples,
        sum(traffic.label_bytes for traffic in traffics) / setup.epochs,
        [spent_s / CLIENTS],  # with the server's part, which runs in the same thread
        client_flops(split.front, clients.above, split.back, digits.train_x[:BATCH]),
    )


# -- Skewed data


@dataclass(frozen=True, slots=True)
class SkewResult:
    """Accuracies held out, after training on clients' parts that are skewed.

    whole: the net trained whole on all samples.
    handed: clients in turn, which hand weights on once an epoch.
    each_batch: clients that hand weights on after each batch, in random order.
    own: clients with layers of their own, in random order; mean over clients.
    smallest, largest: parts, in samples.
    labels: how many of a client's samples have its most frequent label, mean over clients.
    """

    seed: int
    whole: float
    handed: float
    each_batch: float
    own: float
    smallest: int
    largest: int
    labels: float


def skewed_parts(labels: Tensor, clients: int, seed: int) -> list[Tensor]:
    """Each client's indices: each label's samples are dealt out by a draw from a Dirichlet distribution."""
    draw, y = random.generator(seed, "skewed clients"), labels.numpy()
    found: list[list[int]] = [[] for _ in range(clients)]
    for label in range(int(y.max()) + 1):
        mine = draw.permutation(np.flatnonzero(y == label))
        shares = draw.dirichlet([CONCENTRATION] * clients)
        for client, part in enumerate(np.split(mine, (np.cumsum(shares)[:-1] * len(mine)).astype(int))):
            found[client].extend(part.tolist())
    return [torch.tensor(draw.permutation(part)) for part in found]


def skewed(seed: int, epochs: int) -> SkewResult:
    """Train the net whole, by clients that hand weights on, and by clients with layers of their own."""
    torch.set_num_threads(1)
    digits, _ = ClientDigits.drawn(seed)
    parts = skewed_parts(digits.train_y, SKEWED_CLIENTS, seed)
    accuracies = {}
    for way in ("whole", "handed", "each_batch", "own"):
        clients = InTurn(seed, SKEWED_CLIENTS, RATE, u_shaped=False)
        if way == "whole":
            for _, some in _in_turn([torch.cat(parts)], seed, epochs):
                clients.step(0, digits.train_x[some], digits.train_y[some])
        elif way == "handed":
            for client, some in _in_turn(parts, seed, epochs):
                clients.step(client, digits.train_x[some], digits.train_y[some])
        else:
            _at_once(clients, digits, parts, seed, epochs, hand_on=way == "each_batch")
        fronts = clients.splits if way == "own" else [clients.splits[clients.last]]
        accuracies[way] = accuracy_of([nn.Sequential(each.front, clients.above) for each in fronts], digits)
    sizes = [len(part) for part in parts]
    most = [float(torch.bincount(digits.train_y[part]).max()) / len(part) for part in parts if len(part)]
    return SkewResult(
        seed, **accuracies, smallest=min(sizes), largest=max(sizes), labels=float(np.mean(most))
    )


def _at_once(
    clients: InTurn, digits: ClientDigits, parts: list[Tensor], seed: int, epochs: int, *, hand_on: bool
) -> None:
    """All clients' batches in random order, as from clients at once."""
    draw = random.generator(seed, "batches of all clients")
    for epoch in range(epochs):
        todo = list(_in_turn(parts, seed, 1, epoch))
        for at in draw.permutation(len(todo)):
            client, some = todo[at]
            if not hand_on:
                clients.last = client
            clients.step(client, digits.train_x[some], digits.train_y[some])


# -- Peers that die


@dataclass(frozen=True, slots=True)
class FaultResult:
    """A crew of a server, ``CLIENTS`` clients and a standby (without one in the last of ``FAULTS``).

    accuracy: of the clients that lived, with the server's layers at the end; mean.
    planned, answered, missed: batches of the clients that lived (and were not frozen), in all.
    victim_missed: of a client that was frozen.
    gone: clients that ended with ``ServerGone``.
    lasted_s: until the last of them had finished, in virtual time.
    taken_s: from the fault until the standby served, in virtual time; ``None``: it did not.
    copy_s: how long a copy of the server's layers took.
    copy_bytes: of all copies. payload_bytes: of all codes and gradients.
    after: the share of requests that were answered of those made since the standby served.
    """

    fault: str
    seed: int
    accuracy: float
    planned: int
    answered: int
    missed: int
    victim_missed: int
    gone: int
    lasted_s: float
    taken_s: float | None
    copy_s: float
    copy_bytes: int
    payload_bytes: int
    after: float


def faulted(fault: str, seed: int) -> FaultResult:
    """Train in a crew in which one of ``FAULTS`` happens."""
    torch.set_num_threads(1)
    return _Faulted(fault, seed).result()


class _Faulted:
    """The run. Peer 0 is the server, the last one the standby, peer 1 the client that dies or freezes."""

    def __init__(self, fault: str, seed: int) -> None:
        self.fault, self.seed = fault, seed
        self.digits, self.parts = ClientDigits.drawn(seed)
        self.standby = None if fault.endswith("no standby") else CLIENTS + 1
        victim = {"a client dies": 1, "the server dies": 0, "it dies, no standby": 0}.get(fault)
        crashes = () if victim is None else (Crash(victim, FAULT_AT_S),)
        freezes = (Freeze(1, FAULT_AT_S, FROZEN_S),) if fault == "a client freezes" else ()
        self.servers: dict[int, SplitServer] = {}
        self.clients: dict[int, SplitClient] = {}
        self.fronts: dict[int, nn.Module] = {}
        self.asked: dict[int, list[tuple[float, bool]]] = {}
        self.ends_s: dict[int, float] = {}
        self.gone = 0
        lines = replace(_lines(), crashes=crashes, freezes=freezes)
        n = CLIENTS + 1 + (self.standby is not None)
        self.crew = SimulatedCrew(n, lines, seed, cost=ComputeCost(STEP_S))
        self.crew.run(self._train)

    def _train(self, peer: SimulatedTransport) -> None:
        below, above, _ = cut_in_three(self.seed, False)
        values = 0 if self.standby is None else state_values(above)
        cut = Cut(peer, replace(cut_form(False), server_values=values), standby=self.standby)
        if peer.me in (0, self.standby):
            inner = torch.optim.SGD(above.parameters(), RATE / 2, MOMENTUM)
            self.servers[peer.me] = SplitServer(cut, above, inner)
            self.servers[peer.me].serve(DEADLINE_S)
            return
        client = self.clients[peer.me] = SplitClient(cut, below, deadline_s=DEADLINE_S)
        self.fronts[peer.me] = below
        optimizer = torch.optim.SGD(below.parameters(), RATE / 2, MOMENTUM)
        asked = self.asked[peer.me] = []
        try:
            for _, some in _in_turn([self.parts[peer.me - 1]], self.seed, FAULT_EPOCHS, peer.me):
                peer.compute()
                optimizer.zero_grad()
                begin_s = peer.now_s()
                loss = client.backward(self.digits.train_x[some], self.digits.train_y[some])
                asked.append((begin_s, loss is not None))
                if loss is not None:
                    optimizer.step()
            self.ends_s[peer.me] = peer.now_s()
            client.finish()
        except ServerGone:
            self.gone += 1
            self.ends_s[peer.me] = peer.now_s()

    def result(self) -> FaultResult:
        """What came of it."""
        victims = {1} if "client" in self.fault else set()
        whole = [peer for peer in self.clients if peer not in victims]
        standby = self.servers.get(CLIENTS + 1)
        traffics = [each.traffic for each in self.servers.values()]
        traffics += [each.traffic for each in self.clients.values()]
        taken_s = None if standby is None else standby.took_over_s
        serving = self.servers[0] if taken_s is None else standby
        assert serving is not None
        nets = [nn.Sequential(self.fronts[peer], serving.middle) for peer in whole]
        begins_s = 0.0 if taken_s is None else taken_s
        after = [answered for peer in whole for begin_s, answered in self.asked[peer] if begin_s >= begins_s]
        return FaultResult(
            self.fault,
            self.seed,
            accuracy_of(nets, self.digits),
            planned=len(whole) * FAULT_EPOCHS * (len(self.parts[0]) // BATCH),
            answered=sum(self.clients[peer].answered for peer in whole),
            missed=sum(self.clients[peer].missed for peer in whole),
            victim_missed=self.clients[1].missed if self.fault == "a client freezes" else 0,
            gone=self.gone,
            lasted_s=max(self.ends_s[peer] for peer in whole),
            taken_s=None if taken_s is None else taken_s - FAULT_AT_S,
            copy_s=0.0 if standby is None else standby.copy_s,
            copy_bytes=sum(server.traffic.copy_bytes for server in self.servers.values()),
            payload_bytes=sum(traffic.bytes for traffic in traffics),
            after=sum(after) / max(1, len(after)),
        )


# -- Bytes by the number of clients


def split_payload(clients: int, seed: int) -> tuple[int, int]:
    """Payload of an epoch's codes and gradients in a crew, and of how many samples.

    The samples are the same ones however many clients there are, but for what fills no batch.
    """
    torch.set_num_threads(1)
    digits, parts = ClientDigits.drawn(seed, clients)
    crew = CountedCrew(clients + 1, "split", seed)
    above = cut_in_three(seed, False)[1]

    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, cut_form(False))
        if peer.me == 0:
            server = SplitServer(cut, above, torch.optim.SGD(above.parameters(), RATE / 2))
            server.serve(DEADLINE_S)
            return
        client = SplitClient(cut, cut_in_three(seed, False)[0])
        for _, some in _in_turn([parts[peer.me - 1]], seed, 1):
            peer.compute()
            client.backward(digits.train_x[some], digits.train_y[some])
        client.finish()

    crew.run(train)
    return crossed(crew.tensors, cut_form(False))[0], sum(len(part) for part in parts)


def _lines() -> Faults:
    return Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE_BYTES_PER_S)
