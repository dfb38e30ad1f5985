"""An optimizer whose model is averaged with a crew's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DenseName
from ragtag.core.deadline import require_deadline
from ragtag.core.types import Noted, Outcome
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.channel.averager import Averager
from ragtag.protocols.rounds.robust import RobustMean
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Centre
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.training.align.plan import Align
from ragtag.training.coherence import Coherence
from ragtag.training.exchange.asked import asked_of, require_kinds
from ragtag.training.exchange.compress import TopK
from ragtag.training.optimizer.account import Account
from ragtag.training.optimizer.averaged import AveragedModel
from ragtag.training.optimizer.modes import Closure
from ragtag.training.optimizer.siblings import Siblings
from ragtag.training.optimizer.weight import weight_of
from ragtag.training.tensors.modules import parameters_of
from ragtag.training.transport import Transport

_KEY = "ragtag"  # this optimizer's entry in a state_dict


class CrewOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: takes its steps, and averages with the crew as often as the schedule says.

    A torch.optim.Optimizer in every use: it shares ``param_groups`` and ``state`` with ``inner``;
    learning-rate schedulers, gradient clipping, closures, hooks and torch.amp.GradScaler work (a peer
    whose step the scaler skips still takes part in the average).

    The optimizer's own state (momentum, Adam's moments) stays local, and so does whatever belongs to no
    parameter and no buffer. Peers that begin with other weights than the lowest peer's take those, and are
    told so. In a crew of more than 64 nobody does: begin alike there (the same seed, or a checkpoint).

    name: of what it averages, the same on all peers; of several optimizers in a crew, each has its own.
    seed: of random selections.
    transport: the crew's network.
    method: ``RPS()``, ``AllReduce()``, ... or its name (``protocols.channel.averagers``).
    average: "models" after the local step, or "gradients" before it (see ``modes.Gradients``).
    schedule, or its name (``schedules.names``), or every (an int): when; by default after every step. Those
        that do not wait for slow peers (``ragtag.schedules.Partial``, ``SSP``, ``DSSP``) need
        average="models" and RPS() or AllReduce(). ``BackupWorkers``, ``SoftSync``, ``Asynchronous``,
        ``ProgressiveGrouping`` bring their own averager, ``ragtag.Centre()``, which may stand here, too.
    model: whose parameters these are. Given, the crew's schemas are compared here and now; else when
        averaging begins, and the model is found by a look at which module is called (by a hook that
        torch.compile warns of: give it a compiled model).
    buffers: average the model's floating-point buffers too (see ``modules.buffer_parts``).
    outer: ``ragtag.Outer()``: outer momentum on averages of models (DiLoCo; see ``outer.OuterSteps``). Its
        anchor and momentum are in ``state_dict`` and in snapshots: a run that resumes has them, and a
        newcomer. ``ragtag.Outer(fragments=P, delay=tau)``: fragments in turn, while local steps go on
        (Streaming DiLoCo); ``average()`` at the end waits for what is still under way.
    codec: how values travel: "fp32" (the default) bit for bit, "bf16" at half the bytes (relative error
        2^-9), "int8" at a quarter (off by half a 127th of the largest of each 256: for gradients rather than
        models).
    compress: send a share of the entries only, ``TopK(ratio=.001)``, in a form of its own (no ``codec``): of
        the gradients, or, with average="models", of the differences to the last average.
    align: how replicas that average gradients are kept alike: by default they are compared after every 32
        rounds, and what a spoilt round (a death, lost chunks, growth) left different is made the same from
        the next comparison on, model and optimizer state, within 2 % of the bytes.
        ``ragtag.Align(every=...)``: how often; False: never (see ``training.align``). On all peers the same.
    overlap: average while the next step is computed: the average that a step begins is taken over after the
        next one, as a correction (see ``dense.Replica``). ``average()`` and the crew's end wait for it. With
        gradients the step by an average comes one step later, and towards a target batch as soon as it is
        there: gradients that are gathered meanwhile are of the model before it (delayed parameter updates:
        ZeRO-Offload, Ren et al., USENIX ATC 2021; used by DeDLOC).
    target_batch: average, and step, when all peers together have gathered so many samples since the last
        step (see ``schedules.target``); with average="gradients". Until then ``step()`` adds a batch's
        gradient to those gathered, and moves nothing. What becomes of each sample: ``samples``. Several
        optimizers of a crew step together, in the step of the last one of a loop (see ``gathering``).
    guard: ``ragtag.TrimmedMean(liars=.2)`` or ``ragtag.CentredClipping(liars=.2)``: how owners of blocks
        average what peers send, where a share ``liars`` of the peers may lie (``protocols.rounds.robust``).
        Against lying owners it does nothing. A crew that begins with too few peers for it is refused: a
        fifth takes three. ``None``: by the weighted mean.
    weight: how much this peer counts in a mean: a number (by default 1), a function called before each
        average, or "samples": the number of samples since the last average. With a target batch it is how
        much a batch counts, asked after each, by default "samples"; ``weight=1`` makes a target one of
        batches.
    samples: how many samples this peer has been given so far (a crew tells that by itself).
    deadline_s: bounds each round; by default its bound comes from measurement.
    coherence: ``ragtag.Coherence()``: measure now and then how far gradients agree with earlier ones (see
        ``training.coherence``); in trace and report.
    siblings: what all optimizers of this peer have in common; a crew gives it.
    on_outcome: called with each round's outcome.
    on_ready: called once, when the crew has agreed on what is averaged and nothing has been averaged yet.
    on_note: told of what is odd (a speed not believed) and of rounds sent whole.
    on_step: called after each local step with the closure's loss.

    Raises SchemaMismatch, naming the first tensor that differs, where another peer has another model;
    NotFinite, naming the tensor, when a value to be averaged is NaN or infinite (nothing is then sent);
    HasLeft, at a step or an average after the crew was left.
    ValueError, at the first step, where the crew has another optimizer that would wait for peers crosswise
    (see ``siblings``).
    """

    _step_supports_amp_scaling = True  # so that GradScaler calls step() also when it wants it skipped

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        transport: Transport,
        *,
        method: Averager | str | None = None,
        average: Literal["models", "gradients"] = "models",
        schedule: Schedule | Centre | ProgressiveGrouping | Averager | str | None = None,
        every: int | None = None,
        model: torch.nn.Module | None = None,
        buffers: bool = True,
        weight: float | Callable[[], float] | Literal["samples"] | None = None,
        samples: Callable[[], int] | None = None,
        outer: Nesterov | Streaming | None = None,
        codec: Codec | DenseName | None = None,
        compress: TopK | None = None,
        align: Align | bool = True,
        overlap: bool = False,
        target_batch: float | None = None,
        guard: RobustMean | None = None,
        deadline_s: float | None = None,
        coherence: Coherence | None = None,
        siblings: Siblings | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        on_ready: Callable[[AveragedModel], None] | None = None,
        on_note: Callable[[Noted], None] | None = None,
        on_step: Callable[[float | None], None] | None = None,
        name: str = "model",
        seed: int = 0,
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, CrewOptimizer):
            raise TypeError(
                f"a crew's optimizer wraps a plain torch.optim.Optimizer; this is a {type(inner).__name__}"
            )
        require_kinds(model=model, coherence=coherence)
        require_deadline(deadline_s)
        asked = asked_of(
            inner,
            transport.n,
            averager=method,
            average=average,
            schedule=schedule,
            every=every,
            outer=outer,
            codec=codec,
            compress=compress,
            align=align,
            overlap=overlap,
            target_batch=target_batch,
            guard=guard,
            has_model=model is not None,
            late=transport.late,
        )
        siblings = Siblings() if siblings is None else siblings
        self._inner = inner
        self._adopting = True
        super().__init__(inner.param_groups, inner.defaults)
        self._adopting = False
        self._averaged = AveragedModel(
            asked,
            transport,
            name=name,
            seed=seed,
            model=model,
            buffers=buffers,
            weight=weight_of(_weight_or_default(weight, target_batch), samples),
            deadline_s=deadline_s,
            coherence=coherence,
            siblings=siblings,
            on_outcome=on_outcome,
            on_ready=on_ready,
            on_note=on_note,
            on_step=on_step,
        )
        siblings.joins(self, self._averaged)

    def __repr__(self) -> str:
        averaged = self._averaged
        return f"CrewOptimizer({averaged.content} by {averaged.asked.averager.name}, {self._inner!r})"

    # -- What it is beyond an optimizer

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the local steps."""
        return self._inner

    @property
    def name(self) -> str:
        """Of what it averages; the same on all peers."""
        return self._averaged.name

    @property
    def outcome(self) -> Outcome | None:
        """What the last average came to (``None``: there was none yet)."""
        return self._averaged.outcome

    @property
    def samples(self) -> Account | None:
        """What has become of this peer's samples (``None``: no ``target_batch`` was given)."""
        accounting = self._averaged.accounting
        return None if accounting is None else accounting.account

    def average(self) -> Outcome:
        """Average now, whatever the schedule says: of fragments, the next one."""
        return self._averaged.average()

    # -- What any optimizer has, shared with the one inside

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if not self._adopting:
            self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's, by parameter."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if not self._adopting:
            self._inner.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's, as long as averaging has not begun. Raises RuntimeError after that."""
        if self._adopting:
            return
        self._averaged.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and how far this peer has come (under "ragtag", which others pass over)."""
        return {**self._inner.state_dict(), _KEY: self._averaged.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this or a plain optimizer has saved."""
        plain = dict(state_dict)
        progress = plain.pop(_KEY, None)
        self._inner.load_state_dict(plain)
        if progress is not None:
            self._averaged.load_state_dict(progress)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a crew's optimizer holds a network; copy or save its state_dict() instead")

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take a local step, and average when the schedule says so. Returns the closure's loss."""
        if torch.compiler.is_compiling():
            return _step_uncompiled(self, closure)
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return _step_with_hooks(self, closure)
        return self._step(closure)

    def _step(self, closure: Closure | None = None) -> float | None:
        self._averaged.require_in("optimizer.step()")
        return self._averaged.step(closure, skipped=self._unscale())

    def _unscale(self) -> bool:
        """Do what GradScaler asks of an optimizer that handles scales itself: divide the gradients by the
        scale. Returns whether they overflowed, so that this step is to be skipped.
        """
        found_inf: torch.Tensor | None = self.__dict__.get("found_inf")
        if found_inf is None:
            return False
        if found_inf.item():
            return True
        scale: torch.Tensor | None = self.__dict__.get("grad_scale")
        if scale is not None:
            factor = 1.0 / scale.item()
            for parameter in parameters_of(self.param_groups):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return False


def _weight_or_default(
    weight: float | Callable[[], float] | Literal["samples"] | None, target_batch: float | None
) -> float | Callable[[], float] | Literal["samples"]:
    if weight is None:
        return 1.0 if target_batch is None else "samples"
    return weight


def _step_uncompiled(optimizer: CrewOptimizer, closure: Closure | None) -> float | None:
    """A step in a function that is compiled breaks its graph: what networks and threads do is in none."""
    stepping: Callable[..., float | None] = torch.compiler.disable(CrewOptimizer.step)  # type: ignore[no-untyped-call]
    return stepping(optimizer, closure)


# torch wraps each optimizer's step in a label for its profiler and a look for hooks, which takes as long as
# all else here. The inner optimizer's step has that already; this one's is wrapped only where it has hooks.
CrewOptimizer.step.hooked = True  # type: ignore[attr-defined]
_step_with_hooks = CrewOptimizer.profile_hook_step(CrewOptimizer._step)
