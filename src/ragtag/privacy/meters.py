"""Meters of what a cut's codes tell: distance correlation held out, and decoders that try.

A *cut* is what runs where the data are: its codes Z leave. All that is reported is measured on samples held
out, which the cut was not trained on: on its own training samples a cut trained with NoPeek may show a lower
dCor than a server will see. Held-out samples that also are among the training ones are left out, and counted.

The attacker has the codes of training samples with the samples (leaked pairs), trains decoders on them,
takes the one that does best on a part of the pairs that it keeps back, and is scored on the held-out
codes: a mean squared error (MSE) and, for images, structural similarity (SSIM; Wang, Bovik, Sheikh,
Simoncelli, "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE TIP 2004).
Two numbers say what these mean: dCor of codes with other samples than their own (how low it gets for
codes that tell nothing), and the error of the mean training sample (what a decoder has that sees no
code).

A decoder that fails proves nothing: a stronger one may not. What one reads is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.core import seed as random
from ragtag.core.errors import NotFinite
from ragtag.privacy.correlation import distance_correlation

PAIRS_MAX = 4096
"""Leaked pairs that decoders are trained on, at most."""
RIDGES = (1e-6, 1e-4, 1e-2, 1.0, 100.0)
"""Penalties of the linear decoder, over the mean square of its inputs; the best on pairs kept back counts."""
HIDDEN = 512
EPOCHS = 200
PATIENCE = 20
"""The network's training ends when so many epochs brought nothing better on the pairs kept back."""
BATCH = 128
RATE = 1e-3
_KEPT_BACK = 8
_FLAT = 0.01
_WINDOW, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03

Cut = Callable[[Tensor], Tensor]
Network = Callable[[int, int], nn.Module]
"""Makes a decoder for codes of so many values and samples of so many: ``[n, codes] -> [n, values]``."""


@dataclass(frozen=True, slots=True)
class Leakage:
    """What codes tell of held-out samples.

    dcor: distance correlation of held-out samples and their codes.
    independent_dcor: the same with each code beside another sample: no cut of this size gets much lower.
    mse: the attacker's error on held-out samples, mean over values.
    blind_mse: of the mean training sample.
    ssim: the attacker's, mean over held-out images; ``None``: samples are no images.
    blind_ssim: of the mean training sample.
    decoder: which decoder did best on the pairs kept back.
    mse_by: every decoder's error on held-out samples.
    held: held-out samples.
    pairs: leaked pairs.
    shared: held-out samples that were left out, as they were trained on.
    """

    dcor: float
    independent_dcor: float
    mse: float
    blind_mse: float
    ssim: float | None
    blind_ssim: float | None
    decoder: str
    mse_by: dict[str, float]
    held: int
    pairs: int
    shared: int

    @property
    def hidden(self) -> float:
        """The share of the samples' variance that the attacker does not get: 0 is all told, 1 nothing."""
        return self.mse / self.blind_mse


def leakage(
    cut: Cut, train_x: Tensor, held_x: Tensor, *, seed: int = 0, network: Network | None = None
) -> Leakage:
    """Measure a cut.

    cut: ``[n, ...]`` to codes ``[n, ...]``; a module is put into evaluation mode meanwhile.
    train_x: samples ``[n, ...]`` of which codes have leaked; images are ``[n, channels, height, width]``.
    held_x: samples ``[n, ...]`` that the cut was not trained on.
    seed: of the decoders and of the pairs that they get.
    network: another decoder in place of the built-in one (two hidden layers).

    Raises:
        ValueError: fewer than 16 samples to attack with or 2 held out, shapes that do not match, or samples
            that are all equal.
        NotFinite: NaN or infinity in samples or codes.
    """
    if train_x.shape[1:] != held_x.shape[1:] or train_x.dim() < 2:
        raise ValueError(
            f"leakage: training samples are {list(train_x.shape)}, held out {list(held_x.shape)}; both must "
            "be [n, ...] with the same values in a sample"
        )
    fresh = _fresh(train_x, held_x)
    shared = len(held_x) - len(fresh)
    if len(train_x) < 2 * _KEPT_BACK or len(fresh) < 2:
        raise ValueError(
            f"leakage: {len(train_x)} samples to attack with and {len(fresh)} held out ({shared} more were "
            f"trained on); it takes {2 * _KEPT_BACK} and 2"
        )
    some = random.generator(seed, "leaked pairs").permutation(len(train_x))[:PAIRS_MAX]
    train_x, held_x = train_x[torch.from_numpy(some)], held_x[fresh]
    train_z, held_z = codes(cut, train_x), codes(cut, held_x)
    train, held = (x.flatten(1).float() for x in (train_x, held_x))
    for name, values in (("samples", train), ("samples", held), ("codes", train_z), ("codes", held_z)):
        if not values.isfinite().all():
            raise NotFinite(f"leakage: NaN or infinity in {name}")
    order = torch.from_numpy(random.generator(seed, "shuffled codes").permutation(len(held)))
    guesses, best = attack(train_z, train, held_z, seed=seed, network=network)
    errors = {name: float(F.mse_loss(guess, held)) for name, guess in guesses.items()}
    blind = train.mean(0).expand_as(held)
    span = float(train.max() - train.min())
    blind_mse = float(F.mse_loss(blind, held))
    if not blind_mse or not span:
        raise ValueError("leakage: all samples are equal, so there is nothing to tell")

    def likeness(guess: Tensor) -> float | None:
        return float(ssim(guess.view_as(held_x), held_x.float(), span).mean()) if held_x.dim() == 4 else None

    return Leakage(
        dcor=float(distance_correlation(held.double(), held_z)),
        independent_dcor=float(distance_correlation(held.double(), held_z[order])),
        mse=errors[best],
        blind_mse=blind_mse,
        ssim=likeness(guesses[best]),
        blind_ssim=likeness(blind),
        decoder=best,
        mse_by=errors,
        held=len(held),
        pairs=len(train),
        shared=shared,
    )


@torch.no_grad()
def codes(cut: Cut, x: Tensor, batch: int = 256) -> Tensor:
    """The codes of samples, flat: float32 ``[n, values]``. A module's mode is put back as it was."""
    modes = [(part, part.training) for part in cut.modules()] if isinstance(cut, nn.Module) else []
    try:
        for part, _ in modes:
            part.training = False
        found = [cut(x[at : at + batch]).flatten(1).float() for at in range(0, len(x), batch)]
    finally:
        for part, mode in modes:
            part.training = mode
    return torch.cat(found)


def attack(
    train_z: Tensor, train_x: Tensor, held_z: Tensor, *, seed: int = 0, network: Network | None = None
) -> tuple[dict[str, Tensor], str]:
    """Train decoders on pairs of codes and samples; what each makes of held-out codes, and the best's name.

    A sample's values are guessed within what they are in the pairs. The best decoder is so on an eighth of
    the pairs, on which none was trained; held-out samples have no part in it.

    train_z, train_x, held_z: float32, flat: ``[n, values]``.

    Raises NotFinite: no decoder came to finite guesses.
    """
    low, high = train_x.amin(0), train_x.amax(0)
    order = torch.from_numpy(random.generator(seed, "pairs kept back").permutation(len(train_z)))
    back, used = order[: len(order) // _KEPT_BACK], order[len(order) // _KEPT_BACK :]
    pairs, kept = (train_z[used], train_x[used]), (train_z[back], train_x[back])
    guesses, errors = {}, {}
    for name, decoder in (
        ("linear", _linear(*pairs, *kept)),
        ("network", _trained(*pairs, *kept, seed, network or _perceptron)),
    ):
        error = float(F.mse_loss(decoder(kept[0]).clamp(low, high), kept[1]))
        guess = decoder(held_z).clamp(low, high)
        if math.isfinite(error) and guess.isfinite().all():
            guesses[name], errors[name] = guess, error
    if not errors:
        raise NotFinite("leakage: no decoder came to finite guesses")
    return guesses, min(errors, key=errors.__getitem__)


def ssim(x: Tensor, y: Tensor, data_range: float) -> Tensor:
    """Structural similarity of images (Wang et al. 2004, equations 13 and 17): float64 ``[n]``.

    Windows are Gaussian, 11 x 11 of 1.5 pixels, inside the image only; of images smaller than that, the
    largest odd square that fits. Constants are the paper's, .01 and .03 of the range. Channels count alike.

    x, y: ``[n, channels, height, width]``.
    data_range: the largest value less the smallest that images can have.

    Raises ValueError: other shapes, or a range that is not above 0.
    """
    if x.shape != y.shape or x.dim() != 4 or not x.numel():
        raise ValueError(
            f"ssim: {list(x.shape)} and {list(y.shape)}; both must be [n, channels, height, width]"
        )
    if not data_range > 0:
        raise ValueError(f"ssim: data_range is {data_range}; it must be above 0")
    n, channels, height, width = x.shape
    side = min(_WINDOW, height, width)
    side -= 1 - side % 2
    at = torch.arange(side, dtype=torch.float64, device=x.device) - side // 2
    bell = torch.exp(-at.square() / (2 * _SIGMA**2))
    window = torch.outer(bell, bell)[None, None] / bell.sum() ** 2
    u, v = (images.double().reshape(n * channels, 1, height, width) for images in (x, y))

    def local(values: Tensor) -> Tensor:
        return F.conv2d(values, window)

    mean_u, mean_v = local(u), local(v)
    var_u, var_v = local(u * u) - mean_u * mean_u, local(v * v) - mean_v * mean_v
    covariance = local(u * v) - mean_u * mean_v
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    alike = (2 * mean_u * mean_v + c1) * (2 * covariance + c2)
    alike /= (mean_u * mean_u + mean_v * mean_v + c1) * (var_u + var_v + c2)
    return alike.reshape(n, -1).mean(1)


def _fresh(train_x: Tensor, held_x: Tensor) -> Tensor:
    """Which held-out samples are not among the training ones, byte for byte."""

    def keys(x: Tensor) -> list[bytes]:
        table = np.ascontiguousarray(x.detach().flatten(1).to("cpu", torch.float32).numpy())
        return [row.tobytes() for row in table]

    known = set(keys(train_x))
    return torch.tensor(
        [i for i, key in enumerate(keys(held_x)) if key not in known], dtype=torch.int64, device="cpu"
    )


def _linear(z: Tensor, x: Tensor, kept_z: Tensor, kept_x: Tensor) -> Cut:
    """Ridge regression from codes, in the form (of codes or of pairs) that solves the smaller system."""
    middle, target = z.double().mean(0), x.double().mean(0)
    inputs, outputs = z.double() - middle, x.double() - target
    wide = inputs.shape[1] > len(inputs)
    system = inputs @ inputs.T if wide else inputs.T @ inputs
    size = float(system.diagonal().mean()) or 1.0  # codes that are all equal tell nothing, by any ridge
    right = outputs if wide else inputs.T @ outputs
    found: list[tuple[float, Tensor]] = []
    for ridge in RIDGES:
        penalty = ridge * size * torch.eye(len(system), dtype=torch.float64, device=system.device)
        solved = torch.linalg.solve(system + penalty, right)
        weight = inputs.T @ solved if wide else solved
        guess = (kept_z.double() - middle) @ weight + target
        found.append((float(F.mse_loss(guess, kept_x.double())), weight))
    weight = min(found, key=lambda pair: pair[0])[1]
    return lambda codes: ((codes.double() - middle) @ weight + target).float()


def _perceptron(codes: int, values: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(codes, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, values)
    )


def _trained(z: Tensor, x: Tensor, kept_z: Tensor, kept_x: Tensor, seed: int, network: Network) -> Cut:
    """A network from codes, as it was when it did best on the pairs kept back.

    It sees asinh of codes over their median size, standardised: some samples' codes may lie far out.
    """
    some = z[z != 0].abs()
    scale = some.median() if some.numel() else torch.ones((), device=z.device)
    tame = (z / scale).asinh()
    middle, spread = tame.mean(0), tame.std(0)
    spread = spread.clamp_min(max(_FLAT * float(spread.max()), torch.finfo(torch.float32).tiny))
    target = x.mean(0)

    def seen(codes: Tensor) -> Tensor:
        return ((codes / scale).asinh() - middle) / spread

    with torch.random.fork_rng(devices=[z.device] if z.device.type == "cuda" else []):
        torch.manual_seed(random.stream_key(seed, "decoder") % 2**63)
        decoder = network(z.shape[1], x.shape[1]).to(z.device)
    optimizer = torch.optim.Adam(decoder.parameters(), RATE)
    draw = random.generator(seed, "decoder's batches")
    inputs, outputs, kept = seen(z), x - target, seen(kept_z)
    best, since = math.inf, 0
    state = {name: value.clone() for name, value in decoder.state_dict().items()}
    with torch.enable_grad():
        for _ in range(EPOCHS):
            for some in torch.split(torch.from_numpy(draw.permutation(len(z))), BATCH):
                optimizer.zero_grad()
                F.mse_loss(decoder(inputs[some]), outputs[some]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                error = float(F.mse_loss(decoder(kept) + target, kept_x))
            since += 1
            if error < best:
                best, since = error, 0
                state = {name: value.clone() for name, value in decoder.state_dict().items()}
            if since >= PATIENCE:
                break
    decoder.load_state_dict(state)
    decoder.eval()

    def guess(codes: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = decoder(seen(codes)) + target
        return found

    return guess
