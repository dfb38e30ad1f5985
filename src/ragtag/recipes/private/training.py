"""Trains one net on digits in crews by each way of keeping data home, and measures cost and leakage.

Each client is a user's loop over ``simulation.transport``: the crew's optimizer, ``privacy.PrivateTraining``,
``privacy.SecureAverage``, ``privacy.SplitClient``. Payload is counted where machines send it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ragtag.core import seed as random
from ragtag.core.channels import channel_of
from ragtag.core.faults import Faults
from ragtag.core.types import Effect, Event, Machine, PeerId, Send
from ragtag.privacy.dp import PrivacyLedger, PrivateTraining
from ragtag.privacy.inversion import Inversion, gradients_of, inversion
from ragtag.privacy.meters import leakage
from ragtag.privacy.secagg import SecureAverage
from ragtag.privacy.split import (
    Cut,
    CutForm,
    SplitClient,
    SplitServer,
    federated_bytes,
    large_batch_bytes,
    split_bytes,
)
from ragtag.recipes.private.accounting import exact_epsilon, renyi_epsilon
from ragtag.recipes.private.counted import Flops, SentSecure, SentTensors, crossed
from ragtag.recipes.tasks.images import load
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.optimizer.optimizer import CrewOptimizer

CLIENTS = 4
BATCH, PRIVATE_BATCH = 16, 64
RATE, PRIVATE_RATE, MOMENTUM = 0.05, 0.5, 0.9
"""Learning rates of SGD, the second for noised steps, which have no momentum; split learning takes half of
the first at both ends. Chosen on seed 100, which is not measured."""
NOPEEK, NOPEEK_NORM = 10.0, 1.0
"""NoPeek's weight, and the norm to which gradients of the layers below the cut are clipped with it. Chosen,
with the epochs, on seeds 100 to 102, which are not measured."""
NOISE, NORM, DELTA = 1.5, 1.0, 1e-3
CLIP = 1.0
"""Of a value's change in an epoch, in secure averages."""
STEP_S, LATENCY_S, RATE_BYTES_PER_S = 0.02, 0.005, 12.5e6
DEADLINE_S = 10.0
INVERTED = 8
"""Updates that are inverted."""
DECODED = 1024
"""Leaked pairs that decoders get."""
IMAGE = (1, 8, 8)
METHODS = ("federated", "large batch", "split", "split, NoPeek", "federated, private", "federated, secure")


@dataclass(frozen=True, slots=True)
class PrivateSetup:
    """One run. method: one of ``METHODS``, or "split, U-shaped"."""

    method: str
    seed: int
    epochs: int


@dataclass(frozen=True, slots=True)
class PrivateResult:
    """The results of a run.

    accuracy: on held-out samples, mean over clients.
    counted_bytes: payload of one epoch, of all clients: theirs and what comes for them.
    formula_bytes: the same by formula.
    survey_bytes: by the survey's formula, which has all go through a server.
    flops: of a client for a sample, forward and backward.
    client_s: processor time of a client in an epoch.
    hidden: the share of samples' variance that the attacker does not get.
    ssim, blind_ssim: of what it gets, and of the mean sample.
    epsilon: at ``DELTA``, the highest of the clients'; ``None``: without noise there is none.
    least_epsilon: the lowest of the clients'.
    planned_epsilon: of the steps that were planned, by Renyi orders (``accounting.renyi_epsilon``).
    exact_epsilon: of the same, without what Renyi orders lose.
    sum_apart: how far the secure sums that were inverted are from those of the clients' updates, of their
        norm.
    parameters, samples, width: N, p and q of the formulas; in the U-shaped form q has both cuts.
    label_bytes: of one epoch, that leave clients: what they send beyond codes and gradients.
    """

    setup: PrivateSetup
    accuracy: float
    counted_bytes: float
    formula_bytes: float
    survey_bytes: float
    flops: float
    client_s: float
    hidden: float
    ssim: float
    blind_ssim: float
    epsilon: float | None
    planned_epsilon: float | None
    parameters: int
    samples: int
    width: int
    label_bytes: float = 0.0
    least_epsilon: float | None = None
    exact_epsilon: float | None = None
    sum_apart: float | None = None


COLUMNS: dict[str, Callable[[PrivateResult], float | None]] = {
    "client's kflop a sample": lambda result: result.flops / 1e3,
    "client's CPU, s an epoch": lambda result: result.client_s,
    "MB an epoch, counted": lambda result: result.counted_bytes / 1e6,
    "formula": lambda result: result.formula_bytes / 1e6,
    "survey's": lambda result: result.survey_bytes / 1e6,
    "hidden": lambda result: result.hidden,
    "SSIM": lambda result: result.ssim,
    "epsilon": lambda result: result.epsilon,
    "accuracy": lambda result: result.accuracy,
}
"""What tables show of a result."""


def of_method(results: Sequence[PrivateResult], method: str) -> list[PrivateResult]:
    """A way's runs, by seed."""
    return [result for result in results if result.setup.method == method]


@dataclass(frozen=True, slots=True)
class ClientDigits:
    """Images ``[n, 1, 8, 8]`` and labels; clients' parts are equal, of whole batches, and drawn by chance."""

    train_x: Tensor
    train_y: Tensor
    held_x: Tensor
    held_y: Tensor

    @staticmethod
    def drawn(seed: int, clients: int = CLIENTS) -> tuple[ClientDigits, list[Tensor]]:
        """All, and each client's indices."""
        task = load(None)
        order = torch.from_numpy(random.generator(seed, "clients' digits").permutation(len(task.train_y)))
        size = len(order) // (clients * BATCH) * BATCH
        parts = [order[at * size : (at + 1) * size] for at in range(clients)]
        return ClientDigits(task.train_x, task.train_y, task.test_x, task.test_y), parts


def private_net(seed: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Below and above the cut; group normalisation, since it mixes no samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.stream_key(seed, "weights of a private net") % 2**63)
        below = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        above = nn.Sequential(nn.Flatten(), nn.Linear(256, 96), nn.ReLU(), nn.Linear(96, 10))
    return below, above


class _Counting:
    """A node, and the payload that it sends on one channel."""

    def __init__(self, node: Machine, channel: int, sent: Counter[int], me: int) -> None:
        self._node, self._channel, self._sent, self._me = node, channel, sent, me

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """The node's step."""
        effects = self._node.step(now_s, event)
        for effect in effects:
            if isinstance(effect, Send) and effect.run.key.channel == self._channel:
                self._sent[self._me] += effect.run.payload.nbytes
        return effects


class CountedCrew:
    """A crew whose payload under one name is counted, and its clients' processor time.

    sent: of averages, by sender. tensors: of computed tensors, such as what crosses a cut. secure: of secure
        averages.
    """

    def __init__(self, n: int, name: str, seed: int) -> None:
        lines = Faults(latency_s=LATENCY_S, rate_bytes_per_s=RATE_BYTES_PER_S)
        self.crew = SimulatedCrew(n, lines, seed, cost=ComputeCost(STEP_S))
        self.sent: Counter[int] = Counter()
        self.spent_s: list[float] = []
        world = self.crew.world
        world.nodes = [
            _Counting(node, channel_of(name), self.sent, me) for me, node in enumerate(world.nodes)
        ]
        self.tensors = SentTensors(self.crew, name)
        self.secure = SentSecure(self.crew, name)

    def run(self, train: Callable[[SimulatedTransport], None]) -> None:
        """Run ``train`` for each peer."""

        def timed(peer: SimulatedTransport) -> None:
            begin_s = time.thread_time()
            train(peer)
            self.spent_s.append(time.thread_time() - begin_s)

        self.crew.run(timed)


def averaged_payload(clients: int, seed: int) -> int:
    """Bytes that all clients send when they average the net once, counted."""
    crew = CountedCrew(clients, "model", seed)

    def train(peer: SimulatedTransport) -> None:
        model = nn.Sequential(*private_net(seed))
        optimizer = CrewOptimizer(
            torch.optim.SGD(model.parameters(), RATE), peer, method="allreduce", model=model, align=False
        )
        optimizer.average()

    crew.run(train)
    return crew.sent.total()


def direct_bytes(clients: int, parameters: int) -> int:
    """Of one average in which each client owns a part and sends the others theirs: 2 (K - 1) N values."""
    return federated_bytes(clients - 1, parameters)


def secure_bytes(clients: int, parameters: int, blocks: int) -> float:
    """Of one secure average: as ``direct_bytes``, and masked sums to one peer, which owns a block itself."""
    return direct_bytes(clients, parameters) + 4 * parameters * (1 - 1 / blocks)


def train_by(setup: PrivateSetup) -> PrivateResult:
    """Train in a crew of ``CLIENTS``, and measure."""
    torch.set_num_threads(1)
    digits, parts = ClientDigits.drawn(setup.seed)
    how = _split if setup.method.startswith("split") else _federated
    return how(setup, digits, parts)


def _federated(setup: PrivateSetup, digits: ClientDigits, parts: list[Tensor]) -> PrivateResult:
    method, epochs = setup.method, setup.epochs
    private, secure, gradients = (what in method for what in ("private", "secure", "large batch"))
    crew = CountedCrew(CLIENTS, "model", setup.seed)
    models: list[nn.Sequential] = []
    epsilons: list[float] = []
    blocks: list[int] = []
    steps = math.ceil(len(parts[0]) / (PRIVATE_BATCH if private else BATCH))
    rate = PRIVATE_RATE if private else RATE

    def train(peer: SimulatedTransport) -> None:
        mine = TensorDataset(digits.train_x[parts[peer.me]], digits.train_y[parts[peer.me]])
        model = nn.Sequential(*private_net(setup.seed))
        models.append(model)
        inner = torch.optim.SGD(model.parameters(), rate, 0.0 if private else MOMENTUM)
        optimizer: torch.optim.Optimizer = inner
        if not secure:
            optimizer = CrewOptimizer(
                inner,
                peer,
                method="allreduce",
                average="gradients" if gradients else "models",
                every=1 if gradients else steps,
                model=model,
                align=False,
            )
        batches = batches_of(setup.seed, peer.me, mine)
        noised = _private(model, optimizer, mine, setup.seed * CLIENTS + peer.me) if private else None
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        averages = _secure(peer, weights, CLIP, setup.seed) if secure else None
        for _ in range(epochs):
            start = [p.detach().clone() for p in model.parameters()]
            for x, y in batches() if noised is None else noised:
                peer.compute()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if averages is not None:
                names = [name for name, _ in model.named_parameters()]
                moved = {n: p.detach() - s for n, p, s in zip(names, model.parameters(), start, strict=True)}
                mean = averages.average(moved)
                with torch.no_grad():
                    for name, p, old in zip(names, model.parameters(), start, strict=True):
                        p.copy_(old + mean[name])
        if noised is not None:
            epsilons.append(noised.epsilon)
        if averages is not None:
            blocks.append(averages.setting.blocks)
            _stay(peer, blocks)

    crew.run(train)
    size = sum(p.numel() for p in models[0].parameters())
    rounds = epochs * steps if gradients else epochs
    counted, formula = crew.sent.total() / epochs, direct_bytes(CLIENTS, size) * rounds / epochs
    if secure:
        counted, formula = crew.secure.bytes.total() / epochs, secure_bytes(CLIENTS, size, blocks[0])
    survey = large_batch_bytes(steps, size) * CLIENTS if gradients else federated_bytes(CLIENTS, size)
    told, sum_apart = _inverted(setup, digits)
    # what was meant, and not what the product says that it did
    planned = (NOISE, min(1.0, PRIVATE_BATCH / len(parts[0])), epochs * steps, DELTA)
    return PrivateResult(
        setup=setup,
        accuracy=accuracy_of(models, digits),
        counted_bytes=counted,
        formula_bytes=formula,
        survey_bytes=survey,
        flops=_flops(nn.Sequential(*private_net(0)), digits.train_x[:BATCH]),
        client_s=sum(crew.spent_s) / len(crew.spent_s) / epochs,
        hidden=told.hidden,
        ssim=told.ssim or 0.0,
        blind_ssim=told.blind_ssim or 0.0,
        epsilon=max(epsilons, default=None),
        planned_epsilon=renyi_epsilon(*planned) if private else None,
        parameters=size,
        samples=len(parts[0]) * CLIENTS,
        width=0,
        least_epsilon=min(epsilons, default=None),
        exact_epsilon=exact_epsilon(*planned) if private else None,
        sum_apart=sum_apart,
    )


def _split(setup: PrivateSetup, digits: ClientDigits, parts: list[Tensor]) -> PrivateResult:
    """Clients are peers 1 to ``CLIENTS``, peer 0 is the server; each client has its own layers."""
    u_shaped = "U-shaped" in setup.method
    form = cut_form(u_shaped)
    crew = CountedCrew(CLIENTS + 1, "split", setup.seed)
    above = cut_in_three(setup.seed, u_shaped)[1]
    ends: list[tuple[nn.Module, nn.Module | None]] = []
    clients_s: list[float] = []
    flops: list[float] = []

    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, form)
        if peer.me == 0:
            inner = torch.optim.SGD(above.parameters(), RATE / 2, MOMENTUM)
            server = SplitServer(cut, above, inner)
            server.serve(DEADLINE_S)
            return
        begin_s = time.thread_time()
        below, _, back = cut_in_three(setup.seed, u_shaped)
        ends.append((below, back))
        nopeek = "NoPeek" in setup.method
        client = SplitClient(cut, below, back, nopeek=NOPEEK if nopeek else 0.0)
        own = [*below.parameters(), *(back.parameters() if back is not None else ())]
        optimizer = torch.optim.SGD(own, RATE / 2, MOMENTUM)
        mine = TensorDataset(digits.train_x[parts[peer.me - 1]], digits.train_y[parts[peer.me - 1]])
        batches = batches_of(setup.seed, peer.me - 1, mine)
        for _ in range(setup.epochs):
            for x, y in batches():
                peer.compute()
                optimizer.zero_grad()
                with Flops() if not flops else nullcontext() as first:
                    answered = client.backward(x, y) is not None
                if first is not None:
                    flops.append(first.total / len(x))
                if answered:
                    if nopeek:
                        nn.utils.clip_grad_norm_(own, NOPEEK_NORM)
                    optimizer.step()
        client.finish()
        clients_s.append(time.thread_time() - begin_s)

    crew.run(train)
    samples = len(parts[0]) * CLIENTS
    counted, label_bytes = (sent / setup.epochs for sent in crossed(crew.tensors, form))
    return split_result(
        setup,
        digits,
        above,
        ends,
        counted,
        split_bytes(samples, cut_width(form)),
        samples,
        label_bytes,
        clients_s,
        flops[0],
    )


def split_result(
    setup: PrivateSetup,
    digits: ClientDigits,
    above: nn.Module,
    ends: list[tuple[nn.Module, nn.Module | None]],
    counted: float,
    formula: float,
    samples: int,
    label_bytes: float,
    clients_s: list[float],
    flops: float,
) -> PrivateResult:
    """Measure what a split run has come to.

    above: the server's layers. ends: each client's, below the cut and behind the server's.
    counted, formula, label_bytes: bytes of an epoch. samples: of all clients.
    clients_s: processor time of clients, in all epochs. flops: of a client for a sample.
    """
    whole = [nn.Sequential(below, above, back or nn.Identity()) for below, back in ends]
    below, back = ends[0]
    told = leakage(below, digits.train_x[:DECODED], digits.held_x, seed=setup.seed)
    return PrivateResult(
        setup=setup,
        accuracy=accuracy_of(whole, digits),
        counted_bytes=counted,
        formula_bytes=formula,
        survey_bytes=formula,
        flops=flops,
        client_s=sum(clients_s) / len(clients_s) / setup.epochs,
        hidden=told.hidden,
        ssim=told.ssim or 0.0,
        blind_ssim=told.blind_ssim or 0.0,
        epsilon=None,
        planned_epsilon=None,
        parameters=sum(p.numel() for p in whole[0].parameters()),
        samples=samples,
        width=cut_width(cut_form(back is not None)),
        label_bytes=label_bytes,
    )


def cut_in_three(seed: int, u_shaped: bool) -> tuple[nn.Sequential, nn.Sequential, nn.Sequential | None]:
    """The net's layers below the cut, the server's, and a client's last one in the U-shaped form."""
    below, above = private_net(seed)
    if not u_shaped:
        return below, above, None
    layers = list(above)
    return below, nn.Sequential(*layers[:-1]), nn.Sequential(layers[-1])


def cut_form(u_shaped: bool) -> CutForm:
    """What crosses this net's cut, in batches of ``BATCH``."""
    below, above, _ = cut_in_three(0, u_shaped)
    with torch.no_grad():
        codes = below(torch.zeros(2, *IMAGE))
        outputs = tuple(above(codes).shape[1:]) if u_shaped else None
    return CutForm(BATCH, tuple(codes.shape[1:]), outputs)


def cut_width(form: CutForm) -> int:
    """Values of a sample that cross, each way: q of the formulas."""
    return math.prod(form.codes) + (math.prod(form.outputs) if form.outputs is not None else 0)


def client_flops(below: nn.Module, above: nn.Module, back: nn.Module | None, x: Tensor) -> float:
    """What a client of split learning computes for a sample, where the server's part runs in its process."""
    found = _flops(below, x)
    if back is not None:
        with torch.no_grad():
            given = above(below(x))
        found += _flops(back, given.requires_grad_())
    return found


def batches_of(seed: int, me: int, mine: TensorDataset) -> Callable[[], DataLoader[tuple[Tensor, ...]]]:
    """An epoch's batches, each time in another order."""
    order = torch.Generator().manual_seed(random.stream_key(seed, "client's batches", me) % 2**63)
    loader = DataLoader(mine, batch_size=BATCH, shuffle=True, generator=order)
    return lambda: loader


def _private(
    model: nn.Module, optimizer: torch.optim.Optimizer, mine: TensorDataset, seed: int
) -> PrivateTraining:
    return PrivateTraining(
        model,
        optimizer,
        DataLoader(mine, batch_size=min(PRIVATE_BATCH, len(mine))),
        noise_multiplier=NOISE,
        max_grad_norm=NORM,
        delta=DELTA,
        ledger=PrivacyLedger("a client"),
        seed=seed,
    )


def _secure(peer: SimulatedTransport, values: Mapping[str, Tensor], clip: float, seed: int) -> SecureAverage:
    return SecureAverage(
        peer,
        values,
        clip=clip,
        dropouts=0,
        name="model",
        deadline_s=DEADLINE_S,
        seed=seed,
        random=random.generator(seed, "keys of a simulated client", peer.me).bytes,
    )


def _stay(peer: SimulatedTransport, through: Sequence[object]) -> None:
    """Wait until all clients are through: they still fetch this one's block of the last sum."""
    while len(through) < CLIENTS:
        peer.pause(1e-3)


def accuracy_of(models: list[nn.Sequential], digits: ClientDigits) -> float:
    """On samples held out, mean over models."""
    with torch.no_grad():
        right = [(model(digits.held_x).argmax(1) == digits.held_y).float().mean() for model in models]
    return float(torch.stack(right).mean())


def _flops(layers: nn.Module, x: Tensor) -> float:
    """Of a sample, forward and backward, as torch counts multiplications and additions."""
    with Flops() as counted:
        layers(x).sum().backward()
    total: float = counted.total
    return total / len(x)


# -- What updates tell


def _inverted(setup: PrivateSetup, digits: ClientDigits) -> tuple[Inversion, float | None]:
    """What updates of one sample each tell, of the net that training begins with: where least hides it.

    What leaves in secure averages is a sum over clients, each with one sample, of other classes. How far it
    is from the sum of their updates is the second that is returned.
    """
    model = nn.Sequential(*private_net(setup.seed))
    batch = CLIENTS if "secure" in setup.method else 1
    x, y = _apart(digits, batch)
    updates, apart = None, None
    if "private" in setup.method:
        updates = _noised_updates(model, x, y, setup.seed)
    elif batch > 1:
        alone = gradients_of(model, x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None])
        each = {name: g.reshape(*y.shape, *g.shape[1:]) for name, g in alone.items()}
        updates = _secure_sums(each, setup.seed)
        own = torch.cat([g.sum(1).flatten() for g in each.values()])
        apart = float((torch.cat([g.flatten() for g in updates.values()]) - own).norm() / own.norm())
    return inversion(model, x, y, updates, blind=digits.train_x.mean(0), seed=setup.seed), apart


def _secure_sums(each: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """What leaves clients by secure averages, by parameter ``[rounds, ...]``.

    each: their updates, by parameter ``[rounds, clients, ...]``.
    """
    clip = max(float(g.abs().max()) for g in each.values())
    rounds = len(next(iter(each.values())))
    sums: dict[str, list[Tensor]] = {name: [] for name in each}
    through: list[PeerId] = []

    def train(peer: SimulatedTransport) -> None:
        averages = _secure(peer, {name: g[0, 0] for name, g in each.items()}, clip, seed)
        for at in range(rounds):
            mean = averages.average({name: g[at, peer.me] for name, g in each.items()})
            for name, found in sums.items():
                if peer.me == 0:
                    found.append(mean[name] * len(mean.clients))
        through.append(peer.me)
        _stay(peer, through)

    CountedCrew(CLIENTS, "model", seed).run(train)
    return {name: torch.stack(found) for name, found in sums.items()}


def _apart(digits: ClientDigits, batch: int) -> tuple[Tensor, Tensor]:
    """``INVERTED`` samples in batches, all of one of different classes."""
    found: list[int] = []
    for at in range(INVERTED):
        taken = {int(digits.train_y[i]) for i in found[at - at % batch :]}
        free = (i for i in range(len(digits.train_y)) if i not in found)
        found.append(next(i for i in free if int(digits.train_y[i]) not in taken))
    chosen = torch.tensor(found).view(-1, batch)
    return digits.train_x[chosen], digits.train_y[chosen]


def _noised_updates(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> dict[str, Tensor]:
    """What private training sends of one sample alone, without the others that a batch would have."""
    sent: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for at in range(len(x)):
        trained = nn.Sequential(*private_net(seed))
        optimizer = torch.optim.SGD(trained.parameters(), 1.0)
        private = _private(trained, optimizer, TensorDataset(x[at], y[at]), seed * INVERTED + at)
        for image, label in private:
            optimizer.zero_grad()
            F.cross_entropy(trained(image), label).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for (name, old), new in zip(model.named_parameters(), trained.parameters(), strict=True):
            sent[name].append(old.detach() - new.detach())
    return {name: torch.stack(values) for name, values in sent.items()}
