"""Feature-space hijacking: what a server of split learning gets that trains the cut for its own ends.

Pasquini, Ateniese, Bernaschi, "Unleashing the Tiger: Inference Attacks on Split Learning" (CCS 2021, arXiv
2012.02670, section 4). The server has samples of its own that look like the clients'. It trains an encoder
and a decoder on these, so it can invert the encoder, and a discriminator that tells the encoder's codes from
a client's. In place of its task's gradients it sends those that make the client's codes look like the
encoder's to the discriminator (a Wasserstein critic with gradient penalty; Gulrajani et al., NeurIPS 2017,
section 4). When they do, the decoder inverts the client's layers as well. The server knows the shape of the
codes, and neither the client's layers nor any of its samples.

``Hijacker`` is an ordinary server's part, so ``SplitModel`` and ``SplitServer`` take it as they take any.
That labels stay with the client (the U-shaped form) is no protection: the server has no use for them, nor for
the gradient of outputs, in whose place it may send anything (``outputs``). A client cannot tell its gradients
from a task's by their shape; what it can see is that its loss does not fall, if it measures it itself.
``hijacking`` is a meter like those of ``privacy.meters``: the error of what the server makes of a client's
samples, beside that of the mean of its own. Where it fails a stronger attack may not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ragtag.core import seed as random
from ragtag.core.errors import NotFinite
from ragtag.privacy.correlation import distance_correlation
from ragtag.privacy.meters import codes, ssim
from ragtag.privacy.split import SplitModel

STEPS = 800
BATCH = 64
PULL = 30.0
"""The server's gradients are so many times its critic's: it may send any, and NoPeek's are the client's."""
PENALTY = 10.0
SERVER_RATE, CLIENT_RATE = 1e-3, 2e-3
SCORED_MAX = 1024
"""Private samples that are scored, at most: distance correlation takes memory by their square."""
_WIDTH, _CHANNELS, _SLOPE = 256, 32, 0.2


@dataclass(frozen=True, slots=True)
class Hijacking:
    """What a server that hijacks a cut gets of the client's samples.

    mse: of what it makes of them, mean over values.
    blind_mse: of the mean public sample.
    ssim, blind_ssim: structural similarity of both; ``None``: samples are no images.
    dcor: distance correlation of the client's samples and their codes, once hijacked.
    steps: batches that the client trained on.
    samples: of the client, that were scored.
    public: samples that the server has.
    """

    mse: float
    blind_mse: float
    ssim: float | None
    blind_ssim: float | None
    dcor: float
    steps: int
    samples: int
    public: int

    @property
    def hidden(self) -> float:
        """The share of the samples' variance that the server does not get: 0 is all told, 1 nothing."""
        return min(1.0, self.mse / self.blind_mse)


class Hijacker(nn.Module):
    """A server's part that learns to read codes, and has the client learn to make codes that it can read.

    Give it as ``middle``, with ``hijacked`` as the criterion. One call is one step of all its nets: the loss
    that it returns has the decoder's, the critic's and the client's, each with a gradient for that part
    alone. So any one optimizer of its parameters will do.

    public: samples ``[n, ...]``; images are ``[n, channels, height, width]``.
    shape: of a sample's codes. positive: whether codes are never negative, as behind a ReLU: the server sees.
    batch: public samples in a step.
    pull: see ``PULL``.
    outputs: in the U-shaped form, the shape of what a client is sent for a sample: zeros, whose gradient is
        ignored. ``None``: the plain form.
    seed: of weights and batches.

    Raises ValueError: fewer than two public samples, or ``pull`` is not above 0.
    """

    def __init__(
        self,
        public: Tensor,
        shape: Sequence[int],
        *,
        positive: bool = False,
        batch: int = BATCH,
        pull: float = PULL,
        outputs: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._outputs = None if outputs is None else tuple(outputs)
        if len(public) < 2 or not pull > 0:
            raise ValueError(
                f"hijacking: {len(public)} public samples, pull {pull}; it takes 2 and one above 0"
            )
        self._public, self._batch, self._pull = public.float(), min(batch, len(public)), pull
        self._low, self._high = float(public.min()), float(public.max())
        self._draws = random.generator(seed, "public batches of a hijacker")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random.stream_key(seed, "weights of a hijacker") % 2**63)
            self.encoder = _encoder(tuple(public.shape[1:]), tuple(shape), positive)
            self.decoder = _perceptron(math.prod(shape), tuple(public.shape[1:]))
            self.critic = _perceptron(math.prod(shape), (1,))

    def forward(self, seen: Tensor) -> Tensor:
        """A step's loss, a scalar; in the U-shaped form outputs ``[n, *outputs]`` that stand for it.

        seen: a client's codes ``[n, *shape]``.
        """
        chosen = self._draws.integers(len(self._public), size=self._batch)
        public = self._public[torch.from_numpy(chosen)].to(seen.device)
        encoded = self.encoder(public)
        read = F.mse_loss(self.decoder(encoded), public)
        fixed = {name: p.detach() for name, p in self.critic.named_parameters()}
        like = torch.func.functional_call(self.critic, fixed, (seen,)).mean()
        lost: Tensor = read + self._told_apart(encoded.detach(), seen.detach()) - self._pull * like
        if self._outputs is None:
            return lost
        shown: Tensor = _Shown.apply(lost, (len(seen), *self._outputs))  # type: ignore[no-untyped-call]
        return shown

    def _told_apart(self, own: Tensor, others: Tensor) -> Tensor:
        """The critic's loss: high on its own codes, low on others', with a slope of 1 between them."""
        n = min(len(own), len(others))
        share = torch.from_numpy(self._draws.uniform(size=(n, *[1] * (own.dim() - 1)))).to(own)
        between = (share * own[:n] + (1 - share) * others[:n]).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = PENALTY * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        lost: Tensor = self.critic(others).mean() - self.critic(own).mean() + penalty
        return lost

    @torch.no_grad()
    def rebuilt(self, seen: Tensor) -> Tensor:
        """Samples from a client's codes ``[n, ...]``, within what public samples lie in."""
        made: Tensor = self.decoder(seen).clamp(self._low, self._high)
        return made


class _Shown(torch.autograd.Function):
    """Zeros, for which any gradient is that of a loss alone."""

    @staticmethod
    def forward(ctx: Any, lost: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, device=lost.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ones((), device=grad.device), None


def hijacked(loss: Tensor, labels: Tensor) -> Tensor:
    """The criterion of a server with a ``Hijacker``: it has no use for labels."""
    return loss


def hijacking(
    front: nn.Module,
    private_x: Tensor,
    public_x: Tensor,
    *,
    nopeek: float = 0.0,
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer] | None = None,
    steps: int = STEPS,
    batch: int = BATCH,
    pull: float = PULL,
    seed: int = 0,
) -> Hijacking:
    """Measure what a server gets of a client that trains with it as ``SplitModel`` does.

    front: the client's layers, fresh or trained; a copy of them is trained.
    private_x: the client's samples ``[n, ...]``. public_x: the server's ``[n, ...]``.
    nopeek: the weight a1 of the distance correlation that the client adds.
    optimizer: of the client's parameters; ``None``: Adam with ``CLIENT_RATE``.
    steps: batches of ``batch`` samples.
    pull, seed: see ``Hijacker``.

    Raises:
        ValueError: shapes do not match, fewer than two samples on a side, a front without parameters,
            or private samples that are all equal.
        NotFinite: samples, or what is made of them, are NaN or infinite.
    """
    if (
        private_x.shape[1:] != public_x.shape[1:]
        or private_x.dim() < 2
        or min(len(private_x), len(public_x)) < 2
    ):
        raise ValueError(
            f"hijacking: private samples are {list(private_x.shape)}, public {list(public_x.shape)}; both "
            "must be [n, ...], two or more, with the same values in a sample"
        )
    if not any(p.requires_grad for p in front.parameters()):
        raise ValueError("hijacking: the client's layers have no parameters that learn, so none are hijacked")
    front, private_x, public_x = copy.deepcopy(front).train(), private_x.float(), public_x.float()
    scored = private_x[:SCORED_MAX]
    if not bool(private_x.isfinite().all() and public_x.isfinite().all()):
        raise NotFinite("hijacking: NaN or infinity in samples")
    blind = public_x.mean(0).expand_as(scored)
    blind_mse = float(F.mse_loss(blind, scored))
    span = float(private_x.max() - private_x.min())
    if not span or not blind_mse:
        raise ValueError("hijacking: all samples are equal, so there is nothing to tell")
    with torch.no_grad():
        first = copy.deepcopy(front)(private_x[:BATCH])
    server = Hijacker(
        public_x, first.shape[1:], positive=bool(first.min() >= 0), batch=batch, pull=pull, seed=seed
    ).to(first.device)
    model = SplitModel(front, server, criterion=hijacked, nopeek=nopeek)
    client = (optimizer or _adam)(front.parameters())
    own = torch.optim.Adam(server.parameters(), SERVER_RATE, betas=(0.5, 0.9))
    draws = random.generator(seed, "batches of a hijacked client")
    labels = torch.zeros(0, device="cpu")
    for _ in range(steps):
        some = torch.from_numpy(draws.permutation(len(private_x))[:batch])
        for each in (client, own):
            each.zero_grad()
        model.backward(private_x[some], labels)
        for each in (client, own):
            each.step()
    seen = codes(front, scored)
    made = server.rebuilt(seen)
    if not bool(made.isfinite().all()):
        raise NotFinite("hijacking: NaN or infinity in codes")
    images = scored.dim() == 4
    return Hijacking(
        mse=float(F.mse_loss(made, scored)),
        blind_mse=blind_mse,
        ssim=float(ssim(made, scored, span).mean()) if images else None,
        blind_ssim=float(ssim(blind, scored, span).mean()) if images else None,
        dcor=float(distance_correlation(scored.flatten(1).double(), seen)),
        steps=steps,
        samples=len(scored),
        public=len(public_x),
    )


def _adam(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, CLIENT_RATE)


def _encoder(sample: tuple[int, ...], shape: tuple[int, ...], positive: bool) -> nn.Module:
    """From samples to codes; convolutional from images to maps, as a client's layers are there."""
    end = [nn.ReLU()] if positive else []
    if len(sample) == len(shape) == 3:
        return nn.Sequential(
            nn.Conv2d(sample[0], _CHANNELS, 3, padding=1), nn.LeakyReLU(_SLOPE),
            nn.Conv2d(_CHANNELS, shape[0], 3, padding=1), *end, nn.AdaptiveAvgPool2d(shape[1:]),
        )  # fmt: skip
    return nn.Sequential(*_perceptron(math.prod(sample), shape), *end)


def _perceptron(values: int, shape: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(values, _WIDTH), nn.LeakyReLU(_SLOPE), nn.Linear(_WIDTH, _WIDTH),
        nn.LeakyReLU(_SLOPE), nn.Linear(_WIDTH, math.prod(shape)), nn.Unflatten(1, shape),
    )  # fmt: skip
