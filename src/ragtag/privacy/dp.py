"""Differential privacy for the steps that a peer takes on samples of its own (DP-SGD), under any crew.

private = crew.private(model, optimizer, loader, noise_multiplier=1.1, max_grad_norm=1.0, delta=1e-5,
                       ledger=PrivacyLedger("hospital A", "privacy.json"))
for inputs, targets in private:                  # an epoch of random batches; some are small, or empty
    optimizer.zero_grad()
    criterion(model(inputs), targets).backward()
    optimizer.step()
private.epsilon

Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016): each sample joins each batch by a coin of
its own (Poisson sampling), each sample's gradient is clipped to ``max_grad_norm``, their sum gets Gaussian
noise of ``noise_multiplier`` times that norm, and is divided by the expected batch size. Opacus
(``pip install ragtag[private]``) computes and clips gradients by sample, checks layers, and accounts by
Renyi orders (Mironov, Talwar, Zhang, arXiv 1908.10530). A hook of the crew's optimizer puts the noised
gradient in place before anything is averaged or stepped. So ``average="gradients"`` is as private as
``average="models"``: what leaves is noised by each peer for itself, and needs no trust in the others.

**What holds.** Whatever leaves this peer by its optimizer is (epsilon, delta)-private for each sample of
``loader``, where neighbours differ in that one sample is there or not. Others' samples do not count: each
peer has a budget of its own. It takes a loss that is the mean or the sum of the samples' own losses, each of
one sample alone. In a loss that sets samples against each other (contrastive ones, distance correlation) one
sample moves the gradients of all, and clipping them bounds nothing. A model that ``NoPeek`` watches is
refused; other such losses are not seen. **What does not.** Losses, accuracies and sizes of batches that a
script logs are not noised. Nor is what other optimizers send that learn from the same samples.

**Epsilon is for what was drawn.** A step counts when its batch is handed out, before it is computed. No
credit is given for a batch that was not used, for a round that was lost, or for noise that others add.
``PrivacyLedger`` keeps the count in a file beside the samples, written before the batch is handed out. A
restart, a rollback to an older checkpoint, and a crash find it there, so epsilon never falls. Snapshots and
checkpoints have it, too; ``crew.resume`` takes the most that any checkpoint of the folder says.

Noise and batches come from the operating system's randomness; with ``seed``, for simulations and tests, from
named seeded streams, which protect nothing (``privacy.noise``).
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from ragtag.core.errors import Error, NotFinite
from ragtag.privacy.noise import NoiseStream
from ragtag.privacy.nopeek import watched_layer
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.optimizer.weight import BySamples
from ragtag.training.samples.loader import Order, indices_of, plain, rebuilt, size_of
from ragtag.training.state.atomic import write_whole
from ragtag.training.tensors.modules import parameters_of

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 72, 96, 128, 192, 256, 384, 512, 1024)
"""Renyi orders that epsilon is the smallest over: within 1 % of finer ones."""
_HOLDER_CHARS_MAX = 200


class NotPrivate(Error, RuntimeError):
    """A step was refused, since what it would send is not private; the model is as it was."""


class NoOpacus(Error, ImportError):
    """Opacus is not installed; the message says how to get it."""


def epsilon_of(spent: Mapping[tuple[float, float], int], delta: float) -> float:
    """What steps of the sampled Gaussian mechanism come to together: (epsilon, ``delta``).

    spent: steps by noise multiplier and sampling rate (1: every sample in each).

    Raises NoOpacus; ValueError: ``delta`` is not between 0 and 1.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must be above 0 and below 1")
    accountant = _opacus().RDPAccountant()
    accountant.history = [(noise, rate, steps) for (noise, rate), steps in spent.items() if steps]
    if not accountant.history:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that the best order is the last: epsilon is above the best bound then
        return float(accountant.get_epsilon(delta, alphas=list(ORDERS)))


class PrivacyLedger:
    """How much of the privacy of one holder's samples is spent: steps by noise and rate. It only grows.

    holder: whose samples these are, the same in each run: what was kept elsewhere is found by it.
    path: a file that is written before each batch; one process at a time has it, and all that it makes of
        this path are one ledger (a notebook's cell that is run again goes on counting). ``None``: no file, so
        that a run that resumes knows what this holder's last checkpoint says, and not what came after it.

    Raises:
        ValueError: the file is another holder's, or damaged.
        BlockingIOError: another process has it.
        OSError: it cannot be read or written.
    """

    def __init__(self, holder: str, path: Path | str | None = None) -> None:
        if not holder or len(holder) > _HOLDER_CHARS_MAX:
            raise ValueError(f"the holder is {holder[:40]!r}; name whose samples these are")
        self.holder = holder
        self._counts = _Counts(None) if path is None else _counts_of(Path(path), holder)
        self._counts.users.add(self)

    @property
    def spent(self) -> dict[tuple[float, float], int]:
        """Steps by noise multiplier and sampling rate; a copy."""
        return dict(self._counts.spent)

    @property
    def steps(self) -> int:
        """All steps."""
        return sum(self._counts.spent.values())

    def spend(self, noise_multiplier: float, rate: float) -> None:
        """Count a step; it is in the file when this returns. Raises OSError: nothing was counted."""
        with self._open().one_at_a_time:
            self._take({(noise_multiplier, rate): self._counts.spent.get((noise_multiplier, rate), 0) + 1})

    def epsilon(self, delta: float) -> float:
        """What all steps come to. Raises as ``epsilon_of``."""
        return epsilon_of(self.spent, delta)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"holder": self.holder, "spent": [[*key, steps] for key, steps in self.spent.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what is more than is known here; another holder's says nothing of these samples."""
        if state["holder"] == self.holder:
            with self._open().one_at_a_time:
                self._take({(noise, rate): steps for noise, rate, steps in state["spent"]})

    def close(self) -> None:
        """Let another process have the file, unless another ledger here counts in it."""
        self._counts.users.discard(self)
        if not self._counts.users:
            self._counts.close()

    def _open(self) -> _Counts:
        """Who writes has the file, and knows all that is in it: one that was closed opens it again."""
        if self._counts.path is not None and self not in self._counts.users:
            self._counts = _counts_of(self._counts.path, self.holder)
            self._counts.users.add(self)
        return self._counts

    def _take(self, found: Mapping[tuple[float, float], int]) -> None:
        """Of each kind of step the larger number counts."""
        counts = self._counts
        grown = {key: steps for key, steps in found.items() if steps > counts.spent.get(key, 0)}
        if not grown:
            return
        new = counts.spent | grown
        if counts.path is not None:
            entries = [[*key, steps] for key, steps in new.items()]
            text = json.dumps({"holder": self.holder, "spent": entries}, indent=1)
            write_whole(counts.path, [text.encode()], mode=0o600)
        counts.spent = new


class _Counts:
    """What was spent, and its file (``None``: none), which this process has: its ledgers of it count here.

    Raises ValueError: the file is damaged; BlockingIOError: another process has it; OSError.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.process = path, os.getpid()
        self.holder: str | None = None
        """As the file says; ``None``: there was none."""
        self.spent: dict[tuple[float, float], int] = {}
        self.users: WeakSet[PrivacyLedger] = WeakSet()
        self.one_at_a_time = Lock()
        self._lock: int | None = None
        if path is not None:
            self._open(path)

    def close(self) -> None:
        """Let another process have the file."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self.path is not None and _here.get(self.path) is self:
            del _here[self.path]

    def _open(self, path: Path) -> None:
        self._lock = os.open(
            path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                self._read(path)
        except BlockingIOError:
            self.close()
            raise BlockingIOError(
                f"{path}: another process counts in this ledger: end it, if these are the same samples; give "
                "each holder of samples its own"
            ) from None
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_bytes())
            spent = {(float(noise), float(rate)): int(steps) for noise, rate, steps in found["spent"]}
            self.holder = found["holder"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no ledger ({error!r}); bring it back from a copy: without it, what was spent of "
                "these samples is not known"
            ) from None
        self.spent = spent


_here: dict[Path, _Counts] = {}
"""Of files that this process has."""


def _counts_of(path: Path, holder: str) -> _Counts:
    path = Path(os.path.realpath(path))
    counts = _here.get(path)
    if counts is None or counts.process != os.getpid():  # a child has its parent's memory, and not its file
        counts = _Counts(path)
        counts.holder = counts.holder or holder
    if counts.holder != holder:
        if not counts.users:
            counts.close()
        raise ValueError(f"{path} is the ledger of {counts.holder!r}, and these samples are {holder!r}'s")
    _here[path] = counts
    return counts


class PrivateTraining:
    """Batches of this peer's own samples, and an optimizer that learns of them privately.

    Iterating goes through an epoch: as many batches as the loader has, each sample in each by chance. Every
    batch is used for one step; an empty one (tensors ``[0, ...]``) takes a step of noise alone.

    model: whose parameters the optimizer has. It is not wrapped: hooks watch it.
    optimizer: the crew's (or a plain one).
    loader: of this peer's samples, which no other peer has: its batch size is the expected one.
    noise_multiplier: the noise's standard deviation over ``max_grad_norm``.
    max_grad_norm: to which each sample's gradient is clipped.
    delta: below 1 over the number of samples.
    ledger: what was spent of these samples.
    reduction: of the loss over a batch, "mean" or "sum" of the samples' own losses.
    seed: of noise and batches, for simulations and tests; ``None``: nobody can compute them again.
    on_spent: called after each step that is counted.

    Raises:
        ValueError: what cannot be private, with what to do; nothing has changed then.
        TypeError: something else stands in the ledger's place.
        NoOpacus: it is not installed.
    """

    only_grows = True
    """Loading a state adds what is not known here, and takes nothing back: ``crew.resume`` loads all."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        delta: float,
        ledger: PrivacyLedger,
        reduction: str = "mean",
        seed: int | None = None,
        on_spent: Callable[[], None] = lambda: None,
    ) -> None:
        opacus = _opacus()
        loader = _own_loader(loader)
        samples, size = size_of(loader), loader.batch_size or 0
        _require_figures(noise_multiplier, max_grad_norm, delta, samples)
        if not isinstance(ledger, PrivacyLedger):
            raise TypeError(
                f'private training: ledger is {ledger!r}; write ledger=PrivacyLedger("hospital A", '
                '"privacy.json"), by the name of whose samples these are'
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f"private training: reduction is {reduction!r}; it is 'mean' or 'sum'")
        if not 1 <= size <= samples:
            raise ValueError(f"private training: batches of {size} from {samples} samples")
        _require_layers(opacus, model)
        if said := _coupled(model):
            raise ValueError(said)
        _require_parameters(model, optimizer)
        if isinstance(optimizer, CrewOptimizer) and optimizer.samples is not None:
            raise ValueError(
                "private training: a target batch is counted by the sizes of batches, which no noise hides: "
                "average every so many steps (every=...)"
            )
        if isinstance(optimizer, CrewOptimizer) and isinstance(optimizer._averaged.weight, BySamples):
            raise ValueError(
                'private training: weight="samples" tells the exact sizes of batches, which no noise hides: '
                "leave weight= out, or give a number"
            )
        self.noise_multiplier, self.max_grad_norm, self.delta = noise_multiplier, max_grad_norm, delta
        self.rate, self.batch_size, self.ledger = size / samples, size, ledger
        """``rate``: the chance of each sample to be in a batch; ``batch_size``: the expected one."""
        self._model, self._optimizer, self._on_spent = model, optimizer, on_spent
        self._noise, self._draws = (
            NoiseStream.fresh() if seed is None else NoiseStream.of(seed, f"private training, {what}")
            for what in ("noise", "batches")
        )
        self._loader, self._samples = loader, samples
        self._drawn: int | None = None  # samples of the batch that was handed out and not stepped with
        self._versions: dict[str, int] = {}
        # Opacus asks for gradients of outputs alone, which are right also where a layer's inputs need none
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        self._hooks = opacus.GradSampleHooks(model, loss_reduction=reduction, strict=False)
        inner = optimizer.inner if isinstance(optimizer, CrewOptimizer) else optimizer
        self._clipper = opacus.DPOptimizer(
            inner,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=size,
        )
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]

    def __len__(self) -> int:
        """Batches in an epoch."""
        return max(1, round(1 / self.rate))

    def __iter__(self) -> Iterator[Any]:
        """An epoch's batches, each collated by the loader's own function."""
        sizes: list[int] = []
        collate = _Collate(self._loader.collate_fn, self._loader.dataset)
        loader = rebuilt(self._loader, Order(lambda _: self._indices(sizes)))
        loader.collate_fn = collate
        for number, batch in enumerate(loader):
            self.ledger.spend(self.noise_multiplier, self.rate)
            self._drawn = sizes[number]
            self._on_spent()
            yield batch

    @property
    def epsilon(self) -> float:
        """What was spent of the samples so far, at ``delta``: over all runs that the ledger knows of."""
        return self.ledger.epsilon(self.delta)

    def state_dict(self) -> dict[str, Any]:
        """The ledger's."""
        return self.ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``PrivacyLedger.load_state_dict``."""
        self.ledger.load_state_dict(state)

    def close(self) -> None:
        """Take the hooks off, and let the ledger go: steps are plain ones again."""
        for handle in self._handles:
            handle.remove()
        self._hooks.cleanup()
        self.ledger.close()

    # -- Drawing

    def _indices(self, sizes: list[int]) -> Iterator[list[int]]:
        for _ in range(len(self)):
            chosen = np.flatnonzero(self._draws.uniforms(self._samples) < self.rate)
            sizes.append(len(chosen))
            yield chosen.tolist()

    # -- The model

    def _before_forward(self, _: nn.Module, inputs: object) -> None:
        self._versions = {name: buffer._version for name, buffer in self._model.named_buffers()}

    def _after_forward(self, _: nn.Module, inputs: object, made: object) -> None:
        if not (self._model.training and torch.is_grad_enabled()):
            return
        for name, buffer in self._model.named_buffers():
            if self._versions.get(name) != buffer._version:
                raise NotPrivate(
                    f"private training: the buffer {name!r} learns from samples, without noise: use a layer "
                    "without such statistics (GroupNorm, LayerNorm), or put that one in evaluation mode"
                )

    # -- The step

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put clipped, noised gradients where raw ones are; they are all that the optimizer sees."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            raise NotPrivate(
                "private training: a closure would compute gradients behind the noise: call backward, then "
                "optimizer.step() without one"
            )
        if self._optimizer.__dict__.get("found_inf") is not None:
            raise NotPrivate("private training: a GradScaler changes gradients' norms; train without one")
        if self._drawn is None:
            raise NotPrivate(
                "private training: a step without a batch that was drawn for it: take batches from the "
                "private training itself, one step with each"
            )
        try:
            self._require_gradients(self._drawn)
            self._privatise()
        finally:
            self._drawn = None
            for parameter in self._clipper.params:
                parameter.grad_sample = parameter.summed_grad = None

    def _require_gradients(self, drawn: int) -> None:
        """All that has a gradient has one for each sample that was drawn, and of no other."""
        _require_parameters(self._model, self._optimizer)
        if said := _coupled(self._model):
            raise NotPrivate(said)
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            found = getattr(parameter, "grad_sample", None)
            if found is None and parameter.grad is not None:
                raise NotPrivate(
                    f"private training: {name!r} has a gradient, and none for each sample: is the model in "
                    "training mode, and each parameter used by the layer that has it?"
                )
            if found is None:
                none = parameter.new_zeros((drawn, *parameter.shape))
                parameter.grad_sample = none  # type: ignore[attr-defined]
            elif not isinstance(found, Tensor):
                raise NotPrivate(
                    f"private training: {name!r} has gradients of {len(found)} backward passes; take a step "
                    "after each"
                )
            elif len(found) != drawn:
                raise NotPrivate(
                    f"private training: {name!r} has gradients of {len(found)} samples, {drawn} were drawn: "
                    "use the batch whole, and nothing else"
                )

    @torch.no_grad()
    def _privatise(self) -> None:
        self._clipper.clip_and_accumulate()
        deviation = self.noise_multiplier * self.max_grad_norm
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            total: Tensor = parameter.summed_grad  # type: ignore[attr-defined]
            if not bool(total.isfinite().all()):
                raise NotFinite(f"the gradient of {name!r} for some sample")
            noise = torch.from_numpy(self._noise.normals(total.numel()) * deviation)
            parameter.grad = (total + noise.to(total).view_as(total)) / self.batch_size


class _Collate:
    """A loader's collation, for empty batches too: these are like one of a sample, without it."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self._collate(samples)
        return tree_map_only(Tensor, lambda tensor: tensor[:0], self._collate([self._dataset[0]]))


@dataclass(frozen=True, slots=True)
class _Opacus:
    """What is used of it."""

    GradSampleHooks: Any
    DPOptimizer: Any
    ModuleValidator: Any
    RDPAccountant: Any


def _opacus() -> _Opacus:
    handlers = logging.root.handlers[:]
    try:
        from opacus.accountants.rdp import RDPAccountant
        from opacus.grad_sample import GradSampleHooks
        from opacus.optimizers import DPOptimizer
        from opacus.validators import ModuleValidator
    except ImportError as error:
        raise NoOpacus(f"private training needs Opacus: pip install 'ragtag[private]' ({error})") from error
    finally:  # its import gives the root logger one more, and a script's logging.basicConfig would do nothing
        logging.root.handlers[:] = handlers
    return _Opacus(GradSampleHooks, DPOptimizer, ModuleValidator, RDPAccountant)


def _own_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"private training takes the DataLoader of this peer's own samples, and this is a "
            f"{type(loader).__name__} (a crew's split shares samples among peers, so that chance does not "
            "decide who draws which)"
        )
    loader = plain(loader)
    whole = None if isinstance(loader.dataset, IterableDataset) else indices_of(loader)
    if whole is None or len(whole) != size_of(loader) or loader.batch_size is None:
        raise ValueError(
            "private training draws each sample by chance: give a loader that makes batches of a whole data "
            "set, without a sampler of its own (torch.utils.data.Subset makes a data set of a part)"
        )
    return loader


def _require_figures(noise_multiplier: float, max_grad_norm: float, delta: float, samples: int) -> None:
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(
            f"private training: noise_multiplier is {noise_multiplier}; without noise nothing is private"
        )
    if not 0 < max_grad_norm < math.inf:
        raise ValueError(f"private training: max_grad_norm is {max_grad_norm}; it must be above 0")
    if not 0 < delta < 1 / samples:
        raise ValueError(
            f"private training: delta is {delta:g} with {samples:,} samples; below 1/{samples:,}, as "
            f"{0.1 / samples:.1g}: a larger one would allow to tell all of some samples"
        )


def _require_layers(opacus: _Opacus, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"private training: {name!r} is a {type(module).__name__}, which mixes a batch's samples: "
                "put GroupNorm in its place, opacus.validators.ModuleValidator.fix(model) does, before the "
                "optimizer is made"
            )
    if getattr(model, "autograd_grad_sample_hooks", None) is not None:
        raise ValueError("private training: this model is trained privately already")
    errors = [str(error) for error in opacus.ModuleValidator.validate(model)]
    errors += [str(error) for error in opacus.GradSampleHooks.validate(model, strict=False)]
    if errors:
        raise ValueError(f"private training: {'; '.join(errors)}")


def _coupled(model: nn.Module) -> str | None:
    """Why a loss of this model would not be a sum of samples' own; ``None``: as far as is seen it is one."""
    layer = watched_layer(model)
    if layer is None:
        return None
    return (
        f"private training: NoPeek watches {layer!r}, and its distances are between samples, so that one "
        "moves the gradients of all: call nopeek.remove(), and use a mean or sum of the samples' own losses"
    )


def _require_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """What the optimizer learns is what the model's hooks see."""
    watched = {id(parameter) for parameter in model.parameters()}
    learned = {
        id(parameter) for parameter in parameters_of(optimizer.param_groups) if parameter.requires_grad
    }
    if learned - watched:
        raise ValueError(
            f"private training: {len(learned - watched)} of the optimizer's parameters are not in the model, "
            "so that their gradients would leave without noise: give the whole model, or freeze them"
        )
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if own - learned:
        raise ValueError(
            f"private training: {len(own - learned)} of the model's parameters are not the optimizer's: give "
            "them to it, or freeze them (requires_grad_(False))"
        )
