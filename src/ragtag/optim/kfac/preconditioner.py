"""K-FAC as a preconditioner: it changes the gradients, and any optimizer takes the step.

kfac = KFAC(model, optimizer)
loss.backward()
kfac.step()
optimizer.step()

A step goes: new passes come into the factors, whose average over peers begins; decompositions that are ready
are published, and new ones begin where it is time; each gradient is preconditioned by the newest bases that
there are; all are scaled so that the step keeps to its bound (the KL clip). Nothing waits for another peer's
bases, and an average is waited for only when its factors are needed.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ragtag.optim.kfac.communicator import Basis, Communicator, FactorRound, Needs, OneProcess
from ragtag.optim.kfac.layers import (
    KfacLayer,
    PassGate,
    Scaling,
    decomposed,
    fold,
    preconditioned,
    too_little_damping,
    undecomposed,
    why_not,
)
from ragtag.optim.kfac.placement import SIDES, DecompositionForm, Side
from ragtag.optim.names import plain_name

_NOT_MADE = "its factor cannot be decomposed, and it goes on with older bases"
UNSEEN_STEPS = 10
"""After so many steps of a layer with a gradient and without a pass that is odd."""
STEPS_COMPARED = (0, 10, 100, 1000)
"""At which values of settings by step are compared with other peers'."""
ByStep = Callable[[int], float]
EveryByStep = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class _Made:
    """Decompositions, how long each took, and what is odd: of those that failed, or are of little use."""

    bases: dict[str, Tensor]
    took_s: dict[str, float]
    odd: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Block:
    """What is decomposed at once: a diagonal block of a factor, mostly the whole of it."""

    layer: KfacLayer
    side: Side
    at: int

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The block, and the layer's other factor."""
        return self.layer.block(self.side, self.at), self.layer.factors["G" if self.side == "A" else "A"]


@dataclass(frozen=True, slots=True)
class _Job:
    """Decompositions under way in the thread: of factors as they were after so many averages."""

    future: Future[_Made]
    rounds: int


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step has to do beside preconditioning.

    at: its number. opened: it takes passes in. samples: how much its factors count; ``None``: by the passes.
    """

    at: int
    opened: bool
    decay: float
    damping: float
    samples: float | None

    def with_more(self, samples: float | None) -> _Work:
        """One more batch has gone into it."""
        more = None if samples is None or self.samples is None else self.samples + samples
        return replace(self, samples=more)


@dataclass(frozen=True, slots=True, eq=False)
class _Watcher:
    """One that has a layer. optimizer: in whose steps it preconditions; ``None``: in its own."""

    end: weakref.finalize[..., KFAC]
    optimizer: weakref.ref[torch.optim.Optimizer] | None

    def goes_with(self, optimizer: torch.optim.Optimizer | None) -> bool:
        if self.optimizer is None:
            return optimizer is None
        return optimizer is not None and self.optimizer() is optimizer


_watchers = weakref.WeakKeyDictionary[nn.Module, list[_Watcher]]()
"""Of each module, the oldest first."""


class KFAC:
    """Preconditions the gradients of a model's ``Linear`` and ``Conv2d`` layers in place.

    optimizer: preconditions as this one takes its step, so after a crew has averaged the gradients, and has
    the KL clip's ``lr`` from it; where the step has a closure, after each call of that, which may call
    ``step``. Layers of which it has no parameter are left alone, also where it gets them later. Without an
    optimizer ``step`` preconditions at once.
    lr: the optimizer's, or its value at a step (0, 1, ...), for the KL clip.
    damping: above 0, or by step; an inverse keeps the one that it was made with.
    factor_decay: alpha of the running averages, ``alpha F + (1 - alpha) F_new``.
    kl_clip: kappa; ``None``: no clip.
    factor_every, inverse_every: steps from one update of the factors, or of the decompositions, to the next;
    a number, or by step. What is by step has the same values on all peers, and is asked for some of them (at
    ``STEPS_COMPARED``) when this is made.
    images_every: of a batch's images, each so many-th goes into factors of convolutions, which take most of a
    step's time: 4 costs a fourth, and the factors are noisier. Layers of rows count whole.
    block_rows: a factor of more rows is decomposed in diagonal blocks of as many at most, as Distributed
    Shampoo does with large dimensions (Shi et al., 2023, arXiv 2309.06497). Two blocks take a quarter of the
    time, and may be two peers'; what the inputs of one have to do with the other's is passed over.
    form: "eigen" (of the damped Kronecker product), or "inverse" (of damped factors).
    scaling: "fisher", of samples' losses, or "pytorch", as kfac-pytorch counts (see ``layers``): damping and
    clip of one mean something else in the other. The loss is to be a mean over its samples.
    factor_dtype: of running averages; decompositions are made in float32 at least.
    grad_scale: what output gradients are divided by: ``scaler.get_scale`` of a ``GradScaler`` (unscale the
    gradients before ``step``). Losses divided by k passes make output gradients k times too small: ``1 / k``.
    background: decompose in a thread, and go on with older bases until it is done; factors are decomposed
    then as the last average that has ended left them. One set is under way at most.
    skip: names of modules that are left to the optimizer.
    communicator: makes one from what is needed; by default there are no other peers.
    on_note: told of a layer, and of what is odd with it, once each; by default a ``RuntimeWarning`` says so.

    Warns once (``RuntimeWarning``) where the optimizer takes a step after passes and ``step`` was not called:
    that one is by the bases that there are.

    A layer is left alone as long as it has had no pass, or no gradient, or has no bases yet, or has changed
    its shape; passes that are not finite are dropped, and where a factor cannot be decomposed its layer goes
    on with the bases it has. What is left to the optimizer is in ``left_out``, with why. Hooks and thread end
    with the object, or with ``close()``; a second one on a layer and optimizer waits for that.

    Raises ValueError: an argument is out of range, or nothing is left to precondition. TypeError: there is
    neither optimizer nor lr.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        lr: float | ByStep | None = None,
        damping: float | ByStep = 0.003,
        factor_decay: float | ByStep = 0.95,
        kl_clip: float | ByStep | None = 0.001,
        factor_every: int | EveryByStep = 1,
        inverse_every: int | EveryByStep = 10,
        images_every: int = 1,
        block_rows: int | None = None,
        form: DecompositionForm = "eigen",
        scaling: Scaling = "pytorch",
        factor_dtype: torch.dtype = torch.float32,
        grad_scale: float | Callable[[], float] = 1.0,
        background: bool = False,
        skip: Sequence[str] = (),
        communicator: Callable[[Needs], Communicator] | None = None,
        on_note: Callable[[str, str], None] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"K-FAC: model is a {type(model).__name__}; give a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"K-FAC: optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
        self._lr = _rate(optimizer, lr)
        self._damping = _by_step("damping", damping)
        self._decay = _by_step("factor_decay", factor_decay, high=1.0)
        self._kl_clip = None if kl_clip is None else _by_step("kl_clip", kl_clip)
        self._factor_every = _turns("factor_every", factor_every)
        self._inverse_every = _turns("inverse_every", inverse_every)
        if form not in get_args(DecompositionForm):
            raise ValueError(f'K-FAC: form is {form!r}; give "eigen" or "inverse"')
        if scaling not in get_args(Scaling):
            raise ValueError(f'K-FAC: scaling is {scaling!r}; give "fisher" or "pytorch"')
        if not isinstance(factor_dtype, torch.dtype) or not factor_dtype.is_floating_point:
            raise ValueError(f"K-FAC: factor_dtype is {factor_dtype}; give a real floating-point type")
        if type(images_every) is not int or images_every < 1:
            raise ValueError(
                f"K-FAC: images_every is {images_every!r}; it must be a whole number, 1 at least"
            )
        if block_rows is not None and (type(block_rows) is not int or block_rows < 1):
            raise ValueError(f"K-FAC: block_rows is {block_rows!r}; give a whole number, 1 at least, or None")
        gate = PassGate(_scale(grad_scale), scaling, images_every)
        known, self._left_out = _sorted_out(model, skip, optimizer)
        self._form: DecompositionForm = form
        self._block_rows = block_rows
        self._scaling: Scaling = scaling
        self._on_note, self._noted = on_note, set[tuple[str, str]]()
        self.steps = 0
        """How many were taken."""
        self.dropped = 0
        """How often a layer's passes were not finite, and left out of its factors."""
        self.plain: tuple[str, ...] = ()
        """Layers that took the last step with their gradient, or a part of it, as it was."""
        self._model = weakref.ref(model)
        self._unseen = dict[str, int]()
        """How many steps in a row a layer has had a gradient and no pass."""
        self._gate = gate
        self._gate.opened = self._factor_every(0)
        self._layers = {
            name: KfacLayer(name, module, factor_dtype, gate, block_rows) for name, module in known.items()
        }
        self._sides = {
            f"{name}.{side}": (layer, side) for name, layer in self._layers.items() for side in SIDES
        }
        self._bases = {name: self._bases_of(name) for name in self._sides}
        self._blocks = {
            basis: _Block(layer, side, at)
            for name, (layer, side) in self._sides.items()
            for at, basis in enumerate(self._bases[name])
        }
        needs = Needs(
            averaged={name: layer.factors[side] for name, (layer, side) in self._sides.items()},
            computed={name: undecomposed(block.factors[0], form) for name, block in self._blocks.items()},
            layers={name: layer.size for name, layer in self._layers.items()},
            bases={
                name: tuple(basis for side in SIDES for basis in self._bases[f"{name}.{side}"])
                for name in self._layers
            },
            settings=_in_words(
                lr="the optimizer's" if lr is None else lr,
                damping=damping,
                factor_decay=factor_decay,
                kl_clip=kl_clip,
                factor_every=factor_every,
                inverse_every=inverse_every,
                images_every=images_every,
                block_rows=block_rows,
                form=form,
                scaling=scaling,
                factor_dtype=factor_dtype,
            ),
        )
        self._peers = communicator(needs) if communicator else OneProcess(needs)
        self._round: FactorRound | None = None
        self._rounds = 0
        self._due = False
        self._now: tuple[int, float, float | None] | None = None  # the step under way: number, damping, clip
        self._taken = self._peers.taken()  # the crew's number of the last step that was counted
        self._job: _Job | None = None
        self._work: _Work | None = None  # of the step under way
        self._forgotten = False
        self._thread = ThreadPoolExecutor(1, "kfac") if background else None
        self._stop = threading.Event()
        for layer in self._layers.values():
            layer.watch()
        hooks: list[Any] = list(self._layers.values())
        self._waits = optimizer is not None
        if optimizer is not None:
            this = weakref.ref(self)
            hooks.append(optimizer.register_step_pre_hook(partial(_on_step, this)))
        self._end = weakref.finalize(self, _end, hooks, self._thread, self._stop)
        watcher = _Watcher(self._end, None if optimizer is None else weakref.ref(optimizer))
        self._older: dict[str, list[_Watcher]] = {}
        for name, layer in self._layers.items():
            others = [one for one in _watchers.get(layer.module, []) if one.end.alive]
            self._older[name] = [one for one in others if one.goes_with(optimizer)]
            _watchers[layer.module] = [*others, watcher]

    def __repr__(self) -> str:
        return f"KFAC({len(self._layers)} layers, {self._form}, {self.steps} steps)"

    @property
    def layers(self) -> Mapping[str, KfacLayer]:
        """What is preconditioned, by the modules' names."""
        return self._layers

    @property
    def left_out(self) -> dict[str, str]:
        """Modules with parameters that K-FAC leaves alone, and why."""
        model = self._model()
        found = {} if model is None else _modules_of(model)
        there = {name or "model": module for name, module in found.items()}
        changed = {
            name: why
            for name, one in self._layers.items()
            if (why := one.left_out(model is None or there.get(name) is one.module)) is not None
        }
        unseen = {name: "no pass has reached it yet" for name, one in self._layers.items() if not one.folded}
        return {**self._left_out, **(unseen if self.steps else {}), **changed}

    def ages(self) -> dict[str, int | None]:
        """How many averages of factors the decompositions are behind that this peer goes by, by ``LAYER.A``
        and ``LAYER.G``; ``None``: there is none yet, or none has come, or others precondition the layer.
        """
        last, work, found = max(0, self.steps - 1), self._peers.works_on(), dict[str, int | None]()
        for name, (layer, _) in self._sides.items():
            bases = self._newest(name, last) if layer.name in work else None
            found[name] = None if bases is None else max(basis.age_rounds for basis in bases)
        return found

    @property
    def age(self) -> int | None:
        """The greatest of ``ages``; ``None``: there is none."""
        return max((age for age in self.ages().values() if age is not None), default=None)

    def _bases_of(self, name: str) -> tuple[str, ...]:
        """What is computed of a factor: the names of its blocks' bases."""
        layer, side = self._sides[name]
        whole, count = f"{name}.{self._form}", len(layer.size.blocks(side))
        return (whole,) if count == 1 else tuple(f"{whole}.{at}" for at in range(count))

    def _newest(self, name: str, step: int) -> list[Basis] | None:
        """The bases of all blocks of a factor; ``None``: one of them is not there."""
        found = [self._peers.newest(basis, step) for basis in self._bases[name]]
        there = [basis for basis in found if basis is not None]
        return there if len(there) == len(found) else None

    def _note(self, name: str, what: str) -> None:
        kind = what.split(":")[0]
        if (name, kind) not in self._noted:
            self._noted.add((name, kind))
            if self._on_note is None:
                _warn(f"K-FAC: {name}: {what}")
            else:
                self._on_note(name, what)

    # -- A step

    @torch.no_grad()
    def step(self, samples: float | None = None) -> None:
        """Take the passes in, and precondition the gradients in place: now, or in the optimizer's next step.

        Call it before ``optimizer.step()``. samples: how much this peer's factors count in an average (by
        default as many as its passes had). Gradients stay as they are where one of them is not finite.

        A step is one of the optimizer. Where it gathers several batches for one, calls after the first keep
        their passes, and add their ``samples``; where peers take the step together, each after as many
        batches as it has, all of them go into its factors.

        Raises:
            ValueError: a setting by step, or samples, is out of range; nothing has changed then.
            RuntimeError: K-FAC was closed (ragtag.HasLeft: the crew was left, which closes it), or an older
                one that was not has a layer and the optimizer, too.
        """
        self._peers.require_in("kfac.step()")
        if not self._end.alive:
            raise RuntimeError("K-FAC was closed")
        self._require_alone()
        if samples is not None:
            samples = _number("samples", samples, zero=True, high=math.inf)
        for layer in self._layers.values():
            layer.keep()
        if self._waits and self._now is not None:  # peers may have unlike numbers of batches for one step
            self._collect()
            if self._work is not None:
                self._work = self._work.with_more(samples)
            return
        at = self.steps
        self._lr(at)
        damping, decay = self._damping(at), self._decay(at)
        kappa = None if self._kl_clip is None else self._kl_clip(at)
        turn, next_opened = self._inverse_every(at), self._factor_every(at + 1)
        self._look_at_shapes()
        self._collect()
        if self._gate.opened:
            self._look_for_unseen()
        self._due |= turn
        work = _Work(at, self._gate.opened, decay, damping, samples)
        if self._waits and not self._peers.in_step():
            self._work = work  # once the optimizer steps, with all others where these take the step, too
        else:
            self._do(work)
        self._now = (at, damping, kappa)
        if not self._waits:
            self._precondition()
        self.steps, self._gate.opened = at + 1, next_opened

    def _do(self, work: _Work) -> None:
        """Take the passes in, begin an average of factors, and decompose what is due."""
        self._work = None
        damping, opened = work.damping, work.opened and self._is_settled()
        if self._thread is None and self._peers.in_step():
            if opened:
                self._fold(work)
            if self._due:
                self._settle()
                self._decompose(damping, work.at)
        else:
            if opened and not self._rounds:
                self._fold(work)
                self._is_settled()
                opened = False
            if self._due and self._job is None and self._rounds:
                self._decompose(damping, work.at)
            if opened:
                self._fold(work)

    def _require_alone(self) -> None:
        """Two on one layer in an optimizer's steps would precondition its gradient twice.

        Not when this one is made: ``kfac = KFAC(...)`` lets go of an older one only after that.
        """
        if any(one.end.alive for older in self._older.values() for one in older):
            gc.collect()  # an older one in a cycle is nobody's any more
        for name, older in self._older.items():
            if any(one.end.alive for one in older):
                raise RuntimeError(
                    f"K-FAC: an older K-FAC of this optimizer has the layer {name!r}, too, and its gradient "
                    "would be preconditioned twice: close() the older one"
                )
        self._older.clear()

    def _look_at_shapes(self) -> None:
        for name, layer in self._layers.items():
            layer.watch()
            changed = layer.changed
            if changed is not None:
                self._note(name, f"left to the optimizer: {changed}")

    def _look_for_unseen(self) -> None:
        """Where passes go by its hooks, a layer has gradients; one that is not used has none."""
        for name, layer in self._layers.items():
            if layer.samples or not layer.has_gradient:
                self._unseen.pop(name, None)
                continue
            self._unseen[name] = self._unseen.get(name, 0) + 1
            if self._unseen[name] == UNSEEN_STEPS:
                self._note(
                    name,
                    f"no pass was seen in {UNSEEN_STEPS} steps with gradients: it is in evaluation mode, or "
                    "not called as a module, or was compiled and called before K-FAC was made",
                )

    def _fold(self, work: _Work) -> None:
        seen = max((layer.samples for layer in self._layers.values()), default=0)
        before = {name: layer.folded for name, layer in self._layers.items()}
        finite = fold(list(self._layers.values()), work.decay)
        for name, good in zip(self._layers, finite, strict=True):
            if not good:
                self.dropped += 1
                self._note(name, "passes that are not finite: they are left out of its factors")
        factors = {  # one without new passes would hold the others' back; without any it is the identity
            name: layer.factors[side]
            for name, (layer, side) in self._sides.items()
            if layer.folded > before[layer.name]
        }
        self._round = self._peers.average(factors, float(seen) if work.samples is None else work.samples)

    def _is_settled(self) -> bool:
        """Take the average under way, unless others at their own pace are to be waited for: passes go on into
        the next one's factors then.
        """
        if self._round is not None and not self._peers.in_step() and not self._round.over:
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        """Take the average under way, if there is one."""
        if self._round is not None:
            means, self._round = self._round.result(), None
            self._rounds += 1
            for name, mean in means.items():
                layer, side = self._sides[name]
                layer.factors[side] = mean.to(layer.factors[side])
                layer.folded = max(layer.folded, 1)  # by others' passes

    def _decompose(self, damping: float, at: int) -> None:
        due = set(self._peers.mine(at))
        factors = {
            name: block.factors for name, block in self._blocks.items() if block.layer.folded and name in due
        }
        self._due = False
        if self._thread is None:
            self._publish(_decomposed_all(factors, self._form, damping, self._stop), self._rounds, at)
        else:
            future = self._thread.submit(_decomposed_all, factors, self._form, damping, self._stop)
            self._job = _Job(future, self._rounds)

    def _collect(self) -> None:
        job = self._job
        if job is not None and job.future.done():
            self._job = None
            self._publish(job.future.result(), job.rounds, self.steps)

    def _publish(self, made: _Made, rounds: int, at: int) -> None:
        self._peers.publish(made.bases, made.took_s, self._rounds - rounds, at)
        for basis, what in made.odd.items():
            self._note(self._blocks[basis].layer.name, what)

    @torch.no_grad()
    def _precondition(self) -> None:
        """Of gradients as they are now. A step that K-FAC was not told of shares nothing with other peers.

        A kind of optimizer that calls its parent's ``step`` calls the hooks of both: what is preconditioned
        already is left as it is.
        """
        told, taken = self._now is not None, self._peers.taken()
        if not told and taken != self._taken:  # a step of the crew for which this peer's batch came too late
            at = self.steps
            missed = _Work(at, self._gate.opened, self._decay(at), self._damping(at), None)
            self.went_on(1)
            if not self._peers.in_step():
                self._do(missed)  # the others wait for what it has to add, which may be nothing
        elif self._work is not None:
            self._do(self._work)
        self._taken = taken
        at, damping, kappa = self._now or self._before()
        self._now = None
        lr = self._lr(at)
        work = self._peers.works_on()
        gradients = {name: layer.gradient() for name, layer in self._layers.items()}
        own: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            a, g = (self._newest(f"{name}.{side}", at) for side in SIDES)
            if gradient is None or name not in work or a is None or g is None:
                continue
            if not told and self._layers[name].written:
                continue
            of_a, of_g = ([basis.tensor.to(gradient.device) for basis in side] for side in (a, g))
            own[name] = preconditioned(gradient, of_a, of_g, self._form, damping)
        changed: list[tuple[KfacLayer, Tensor]] = []
        products: list[Tensor] = []
        whole: set[str] = set()
        for name, given in (self._peers.share(own) if told else own).items():
            gradient = gradients[name]
            if gradient is not None:
                after = given.to(gradient)
                if name not in own:
                    came = ~torch.isnan(after)
                    after = torch.where(came, after, gradient)
                if name in own or bool(came.all()):
                    whole.add(name)
                changed.append((self._layers[name], after))
                products.append((after * gradient).sum())
        if told or products:
            self.plain = self._with_gradients_but(whole)
        if not products:
            return
        moved = lr**2 * float(torch.stack([product.to(products[0]) for product in products]).sum())
        if not math.isfinite(moved):
            self.plain = self._with_gradients_but(set())
            return
        scale = 1.0 if kappa is None or moved == 0 else min(1.0, math.sqrt(kappa / abs(moved)))
        afters = [after for _, after in changed]
        if scale != 1:
            afters = list(torch._foreach_mul(afters, scale))
        for (layer, _), after in zip(changed, afters, strict=True):
            layer.write(after)

    def _with_gradients_but(self, whole: set[str]) -> tuple[str, ...]:
        return tuple(n for n, layer in self._layers.items() if layer.has_gradient and n not in whole)

    def _say_forgotten(self) -> None:
        """Once: passes were watched, and the optimizer takes a step that K-FAC has not been told of."""
        if not self._forgotten and any(layer.untold for layer in self._layers.values()):
            self._forgotten = True
            by = "older factors precondition its gradients" if self.steps else "its gradients are the model's"
            _warn(
                f"K-FAC: the optimizer takes a step, and kfac.step() was not called: {by}: call kfac.step() "
                "after backward() and before optimizer.step()"
            )

    def _before(self) -> tuple[int, float, float | None]:
        """The settings of the last step."""
        at = max(0, self.steps - 1)
        return at, self._damping(at), None if self._kl_clip is None else self._kl_clip(at)

    # -- The end, and checkpoints

    def close(self) -> None:
        """Take the hooks off the model, and end the thread after the decomposition that it is at.

        An average under way is given up. ``state_dict`` works as before.
        """
        self._end()
        self._due |= self._job is not None
        self._round = self._job = None

    def state_dict(self) -> dict[str, Any]:
        """Between steps: the running averages, and, where there are no other peers, the decompositions.

        Plain numbers and tensors on the CPU. Other peers' communicator keeps its own.
        """
        self._settle()
        factors = {name: layer.factors[side].cpu().clone() for name, (layer, side) in self._sides.items()}
        state: dict[str, Any] = {
            "steps": self.steps,
            "form": self._form,
            "scaling": self._scaling,
            "block_rows": self._block_rows,
            "due": self._due or self._job is not None,
            "factors": factors,
            "folded": {name: layer.folded for name, layer in self._layers.items()},
        }
        if isinstance(self._peers, OneProcess):
            state["bases"] = self._peers.state_dict()
        return state

    def went_on(self, steps: int) -> None:
        """So many more steps were taken after the state that was loaded, and not here: a peer's K-FAC is to
        average factors, and to use new bases, at the steps at which the others' do.
        """
        self.steps += steps
        self._gate.opened = self._factor_every(self.steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same model; decompositions under way are dropped.

        Raises ValueError, naming the first part that is not as it should be; nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise ValueError("K-FAC: the state is not a dictionary")
        steps, due, factors, folded = map(state.get, ("steps", "due", "factors", "folded"))
        if type(steps) is not int or steps < 0 or type(due) is not bool:
            raise ValueError("K-FAC: the state has no count of steps")
        if state.get("form") != self._form:
            raise ValueError(f"K-FAC: the state is of the form {state.get('form')!r}, not {self._form!r}")
        if state.get("scaling", "pytorch") != self._scaling:
            raise ValueError(f"K-FAC: the state's scaling is {state.get('scaling')!r}, not {self._scaling!r}")
        if state.get("block_rows") != self._block_rows:
            raise ValueError(
                f"K-FAC: the state's block_rows is {state.get('block_rows')!r}, not {self._block_rows!r}"
            )
        if not isinstance(factors, Mapping) or factors.keys() != self._sides.keys():
            odd = sorted(
                self._sides.keys() ^ (factors.keys() if isinstance(factors, Mapping) else set()), key=str
            )
            raise ValueError(f"K-FAC: the state is of other layers: {odd[0]!r}")
        if not isinstance(folded, Mapping) or folded.keys() != self._layers.keys():
            raise ValueError("K-FAC: the state does not say which layers have had passes")
        if not all(type(count) is int and count >= 0 for count in folded.values()):
            raise ValueError("K-FAC: the state's counts of passes are not numbers of 0 or more")
        for name, (layer, side) in self._sides.items():
            _require_factor(name, factors[name], layer.factors[side])
        opened = self._factor_every(steps)
        if isinstance(self._peers, OneProcess):
            self._peers.load_state_dict(state.get("bases"))
        for name, (layer, side) in self._sides.items():
            layer.factors[side] = factors[name].to(layer.factors[side], copy=True)
        for name, layer in self._layers.items():
            layer.folded = folded[name]
            layer.forget()
        self.steps, self._due, self._gate.opened = steps, due, opened
        self._taken = self._peers.taken()
        self._job = self._round = self._work = None


def _warn(what: str) -> None:
    """At the line that called Ragtag, through torch where an optimizer did."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "ragtag",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(what, RuntimeWarning, stacklevel=level)


def _decomposed_all(
    factors: Mapping[str, tuple[Tensor, Tensor]],
    form: DecompositionForm,
    damping: float,
    stop: threading.Event,
) -> _Made:
    """Of each factor, beside which its layer's other one is, in the order given, as long as K-FAC lives."""
    made = _Made({}, {}, {})
    for name, (factor, other) in factors.items():
        if stop.is_set():
            break
        began_s = time.perf_counter()
        try:
            basis = decomposed(factor, form, damping)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            made.odd[name] = f"{_NOT_MADE}: {error}"
            continue
        if torch.isfinite(basis).all():
            made.bases[name] = basis
            made.took_s[name] = time.perf_counter() - began_s
        else:
            made.odd[name] = f"{_NOT_MADE}: it is not finite"
            continue
        needed = too_little_damping(basis, other, damping) if form == "eigen" else None
        if needed is not None:
            made.odd[name] = (
                "its factor is singular, and damping is below its rounding: give a damping of "
                f"{needed:.0e} or more, not {damping:g}, or scale the layer's inputs"
            )
    return made


def _on_step(
    this: Callable[[], KFAC | None], _: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The optimizer's hook, with what its ``step`` is called with, itself first.

    A closure makes the gradients anew, so they are preconditioned after each call of it.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _before_step(this)
        return None

    def and_then(*given: Any, **more: Any) -> Any:
        loss = closure(*given, **more)
        _before_step(this)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": and_then}
    return (args[0], and_then, *args[2:]), kwargs


def _before_step(this: Callable[[], KFAC | None]) -> None:
    """The optimizer is about to take a step."""
    kfac = this()
    if kfac is None:
        return
    if kfac._now is None:
        kfac._say_forgotten()
    if kfac.steps:
        kfac._precondition()


def _end(hooks: list[Any], thread: ThreadPoolExecutor | None, stop: threading.Event) -> None:
    for hook in hooks:
        hook.remove()
    stop.set()
    if thread is not None:
        thread.shutdown(wait=False, cancel_futures=True)


def _rate(optimizer: torch.optim.Optimizer | None, lr: float | ByStep | None) -> ByStep:
    if lr is not None:
        return _by_step("lr", lr, zero=True)
    if optimizer is None:
        raise TypeError("K-FAC: give the optimizer that takes the steps, or its lr")
    return _by_step("lr", lambda step: float(optimizer.param_groups[0]["lr"]), zero=True)


def _in_words(**settings: object) -> str:
    """Without a comma in a setting, by which they are told apart where they differ."""
    return ", ".join(f"{name} {_by_values(one) if callable(one) else one}" for name, one in settings.items())


def _by_values(setting: Callable[[int], object]) -> str:
    """A function cannot be compared, and its values can be at a few steps."""
    return "/".join(_at_step(setting, step) for step in STEPS_COMPARED)


def _at_step(setting: Callable[[int], object], step: int) -> str:
    """To four digits: more may be of another machine's rounding, and all settings have 512 letters."""
    try:
        value = setting(step)
    except LookupError:  # of a list of values that ends before
        return "none"
    return f"{value:.4g}" if isinstance(value, int | float) else type(value).__name__


def _require_factor(name: str, given: object, ours: Tensor) -> None:
    if not isinstance(given, Tensor) or given.shape != ours.shape or not given.is_floating_point():
        raise ValueError(f"K-FAC: the state's factor {name!r} is not a tensor of shape {tuple(ours.shape)}")
    if not torch.isfinite(given).all():
        raise ValueError(f"K-FAC: the state's factor {name!r} is not finite")


def _number(what: str, value: object, *, zero: bool, high: float) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (0 < number <= high or (zero and number == 0)) or number == math.inf:
        least = "0 or more" if zero else "above 0"
        most = "" if high == math.inf else f", {high} at most"
        raise ValueError(f"K-FAC: {what} is {value!r}; it must be a number {least}{most}")
    return float(number)


def _by_step(what: str, value: float | ByStep, *, zero: bool = False, high: float = math.inf) -> ByStep:
    """A setting as a function of the step, checked: a number at once, a function's value when it is used."""
    if callable(value):
        return lambda step: _number(f"{what} at step {step}", value(step), zero=zero, high=high)
    fixed = _number(what, value, zero=zero, high=high)
    return lambda step: fixed


def _scale(value: float | Callable[[], float]) -> Callable[[], float]:
    if callable(value):
        return lambda: _number("grad_scale", value(), zero=False, high=math.inf)
    fixed = _number("grad_scale", value, zero=False, high=math.inf)
    return lambda: fixed


def _turns(what: str, value: int | EveryByStep) -> Callable[[int], bool]:
    """Whether it is time for something at a step."""

    def checked(every: object) -> int:
        if type(every) is not int or every < 1:
            raise ValueError(f"K-FAC: {what} is {every!r}; it must be a whole number of steps, 1 at least")
        return every

    if callable(value):
        return lambda step: step % checked(value(step)) == 0
    fixed = checked(value)
    return lambda step: step % fixed == 0


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name; of those of one name the innermost, which others wrap."""
    return {plain_name(name, model): module for name, module in model.named_modules()}


def _sorted_out(
    model: nn.Module, skip: Sequence[str], optimizer: torch.optim.Optimizer | None
) -> tuple[dict[str, nn.Linear | nn.Conv2d], dict[str, str]]:
    """The layers that K-FAC knows, by name, and why it does not know the others.

    Of what the optimizer does not step, products with gradients would have no place in the KL clip.
    """
    stepped = None if optimizer is None else {id(p) for g in optimizer.param_groups for p in g["params"]}
    if isinstance(skip, str):
        raise ValueError(f"K-FAC: skip is {skip!r}; give a list of modules' names")
    modules = _modules_of(model)
    skip = [plain_name(name, model) for name in skip]
    for name in skip:
        if name not in modules:
            raise ValueError(f"K-FAC: the model has no module {name!r} to skip")
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                if nn.parameter.is_lazy(parameter):
                    raise ValueError(f"K-FAC: {name!r} has no shape yet; let the model see one batch first")
                users.setdefault(id(parameter), []).append(name)
    known: dict[str, nn.Linear | nn.Conv2d] = {}
    left_out: dict[str, str] = {}
    for name, module in modules.items():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not own and not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        shared = sorted({user for parameter in own for user in users[id(parameter)]} - {name})
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in skip):
            reason: str | None = "it is skipped"
        elif shared:
            reason = f"it shares parameters with {', '.join(shared)}"
        else:
            reason = why_not(module)
        if reason is None and stepped is not None and stepped.isdisjoint(map(id, own)):
            reason = "the optimizer had none of its parameters when K-FAC was made"
        if reason is None:
            assert isinstance(module, nn.Linear | nn.Conv2d)
            known[name or "model"] = module
        else:
            left_out[name or "model"] = reason
    if not known:
        raise ValueError(f"K-FAC: the model has no layer to precondition: {left_out}")
    return known, left_out
