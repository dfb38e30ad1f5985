"""An optimizer whose model is averaged with a crew's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch

from ragtag.codecs.base import Codec
from ragtag.codecs.dense import DenseName
from ragtag.core.channels import channel_of, require_name
from ragtag.core.types import Noted, Outcome
from ragtag.optim.outer import Nesterov, Streaming
from ragtag.protocols.channel.averager import Averager
from ragtag.schedules.base import Schedule
from ragtag.schedules.centre import Centre
from ragtag.schedules.grouping import ProgressiveGrouping
from ragtag.training.align.aligner import Aligner
from ragtag.training.align.plan import Align, Aligned
from ragtag.training.coherence import Coherence, CoherenceMeter
from ragtag.training.exchange.aligned import Aligning
from ragtag.training.exchange.asked import (
    align_of,
    align_text,
    asked_of,
    codec_of,
    mode_of,
    require_kinds,
    schedule_of,
    streaming_of,
)
from ragtag.training.exchange.base import Exchange, layer
from ragtag.training.exchange.central import is_centred
from ragtag.training.exchange.combine import require_together
from ragtag.training.exchange.compress import Compression, TopK
from ragtag.training.exchange.dense import Replica
from ragtag.training.exchange.outer import Outer
from ragtag.training.exchange.slow import SlowPeer
from ragtag.training.exchange.sparse import SparseReplica
from ragtag.training.optimizer.modes import Closure, Gradients, Models
from ragtag.training.optimizer.scheduling import Conduct
from ragtag.training.optimizer.weight import Weight, weight_of
from ragtag.training.state.follower import Follower
from ragtag.training.state.whole import Stand, Whole, kept_up
from ragtag.training.tensors.layout import Part
from ragtag.training.tensors.modules import Watch, buffer_parts, name_parameters, parameters_of
from ragtag.training.transport import Transport

_KEY = "ragtag"  # this optimizer's entry in a state_dict


class CrewOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: takes its steps, and averages with the crew as often as the schedule says.

    A torch.optim.Optimizer in every use: it shares ``param_groups`` and ``state`` with ``inner``;
    learning-rate schedulers, gradient clipping, closures, hooks and torch.amp.GradScaler work (a peer
    whose step the scaler skips still takes part in the average).

    The optimizer's own state (momentum, Adam's moments) stays local, and so does whatever belongs to no
    parameter and no buffer. Peers should begin with the same weights (the same seed, or a checkpoint):
    the first average is one of whatever they begin with.

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
    weight: how much this peer counts in a mean: a number, a function called before each average, or
        "samples": the number of samples since the last average.
    samples: how many samples this peer has been given so far (a crew tells that by itself).
    deadline_s: bounds each round; by default its bound comes from measurement.
    coherence: ``ragtag.Coherence()``: measure now and then how far gradients agree with earlier ones (see
        ``training.coherence``); in trace and report, and in ``conduct.spent.coherence``.
    on_outcome: called with each round's outcome.
    on_ready: called once, when the crew has agreed on what is averaged and nothing has been averaged yet.
    on_note: told of what is odd (a speed not believed) and of rounds sent whole.
    on_step: called after each local step with the closure's loss.

    Raises SchemaMismatch, naming the first tensor that differs, where another peer has another model;
    NotFinite, naming the tensor, when a value to be averaged is NaN or infinite (nothing is then sent);
    HasLeft, at a step or an average after the crew was left.
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
        weight: float | Callable[[], float] | Literal["samples"] = 1.0,
        samples: Callable[[], int] | None = None,
        outer: Nesterov | Streaming | None = None,
        codec: Codec | DenseName | None = None,
        compress: TopK | None = None,
        align: Align | bool = True,
        deadline_s: float | None = None,
        coherence: Coherence | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        on_ready: Callable[[CrewOptimizer], None] | None = None,
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
        self._asked = asked = asked_of(
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
            has_model=model is not None,
        )
        self._inner = inner
        self._adopting = True
        super().__init__(inner.param_groups, inner.defaults)
        self._adopting = False
        self.name = require_name(name)
        self._transport, self._codec, self._method = transport, codec_of(asked), asked.averager
        self._mode = mode_of(asked)
        self.conduct = Conduct(schedule_of(asked), transport, name, on_note)
        """When it averages, which peers it waits for, and where its time goes."""
        self._outer = streaming_of(asked)
        self._under_way: Any = None
        self._weight: Weight = weight_of(weight, samples)
        self._meter = (
            None if coherence is None else CoherenceMeter(coherence, parameters_of(inner.param_groups))
        )
        self._deadline_s, self._on_outcome = deadline_s, on_outcome
        self._compress, self._seed, self._on_note = compress, seed, on_note
        self._on_ready, self._on_step = on_ready, on_step
        self._buffers = buffers
        self._steps = self._since = 0
        self._exchange: Exchange | None = None
        self._loaded: dict[str, Any] = {}  # of the exchange, before there is one
        self._watch: Watch | None = None
        self._whole: Whole | None = None
        self._current = -1
        self.outcome: Outcome | None = None
        """What the last average came to."""
        self.arrive: Callable[[], Outcome | None] | None = None
        """What the next average begins with, once: how a peer that was not there gets the crew's model. The
        outcome takes that average's place (``None``: the average follows)."""
        self.left_out: tuple[str, ...] = ()
        """Floating-point buffers that are not averaged (known once averaging has begun)."""
        if model is not None:
            self._configure([model])
        else:
            self._watch = Watch(parameters_of(inner.param_groups))
            weakref.finalize(self, self._watch.hook.remove)

    # -- What it shares with the optimizer inside

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the local steps."""
        return self._inner

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The models whose parameters these are, as far as they have been given or seen at work."""
        return self._modules if self._watch is None else tuple(self._watch.modules)

    @property
    def modules_known(self) -> bool:
        """Whether ``modules`` is all there will be: averaging has begun, or the model was given."""
        return self._exchange is not None

    @property
    def progress(self) -> tuple[int, int]:
        """How many steps were taken, and how many of them since the last average."""
        return self._steps, self._since

    @property
    def whole(self) -> Whole | None:
        """All that it averages, to be compared with other peers' (``None``: averaging has not begun)."""
        return self._whole

    def stand(self) -> Stand:
        """Where this peer stands. Raises RuntimeError: averaging has not begun."""
        if self._whole is None:
            raise RuntimeError("averaging has not begun")
        # what is in no model yet does not count: gradients that wait, updates of a central state
        since = self._since if self._mode.content == "models" and not is_centred(self._method) else 0
        round_ = -1 if self.outcome is None else self.outcome.round
        return Stand(self._whole.digest(), self._current, since, round_)

    def settle(self) -> None:
        """End what is under way: no more local steps will come."""
        self._end()
        if self._exchange is not None and is_centred(self._method) and self._since:
            self.average()

    def resume_at(self, steps: int, since: int) -> None:
        """Go on as a peer that has come so far; gradients gathered before are forgotten."""
        self._steps, self._since = steps, since
        if self._under_way is not None:  # it is of what was here before; it ends by its own deadline
            self._under_way.wait()
            self._under_way = None
        self._mode.forget()
        for more in (self._exchange, self._meter):
            if more is not None:
                more.forget()

    @property
    def outer_state(self) -> dict[str, Any]:
        """Anchor and momentum of the outer steps (see ``outer.OuterSteps.state_dict``); empty: none yet."""
        state: dict[str, Any] = self._exchange_state().get("outer") or {}
        return state

    @outer_state.setter
    def outer_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, naming it, at the first parameter that does not fit."""
        self._load({"outer": dict(state)})

    def _exchange_state(self) -> dict[str, Any]:
        return dict(self._loaded) if self._exchange is None else self._exchange.state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take up an exchange's state: now, or when averaging begins."""
        if self._exchange is not None:
            self._exchange.load_state_dict(state)
        else:
            self._loaded |= state

    @property
    def compression(self) -> Compression | None:
        """What sending less came to in the last round (``None``: everything is sent)."""
        return None if self.sparse is None else self.sparse.compression

    @property
    def sparse(self) -> SparseReplica | None:
        """What sends selections, once averaging has begun (``None``: everything is sent)."""
        return layer(self._exchange, SparseReplica)

    @property
    def aligned(self) -> Aligned | None:
        """What the last comparison of replicas came to (``None``: there was none)."""
        kept = layer(self._exchange, Aligning)
        return None if kept is None else kept.aligner.aligned

    def load_compression(self, state: dict[str, Any]) -> None:
        """Take up ``sparse.tensors()``, or a part; now, or when averaging begins. Raises ValueError."""
        self._load({"feedback": {**self._loaded.get("feedback", {}), **state}})

    @property
    def channel(self) -> int:
        """The number of the channel that it averages on."""
        return channel_of(self.name)

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
        if self._exchange is not None or self._steps:
            raise RuntimeError(
                "add_param_group: the crew has agreed on what is averaged; add all groups before the first "
                "step (and without model=...), or make a new crew optimizer on every peer"
            )
        self._inner.add_param_group(param_group)
        if self._meter is not None:
            self._meter = CoherenceMeter(self._meter.asked, parameters_of(self._inner.param_groups))
        if self._watch is not None:
            self._watch.end()
            self._watch = Watch(parameters_of(self._inner.param_groups))
            weakref.finalize(self, self._watch.hook.remove)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and how far this peer has come (under "ragtag", which others pass over)."""
        progress = {"step": self._steps, "since_average": self._since, **self._exchange_state()}
        return {**self._inner.state_dict(), _KEY: progress}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this or a plain optimizer has saved."""
        plain = dict(state_dict)
        progress = plain.pop(_KEY, None)
        self._inner.load_state_dict(plain)
        if progress is not None:
            self._steps, self._since = int(progress["step"]), int(progress["since_average"])
            self._load({"outer": {}, **{k: v for k, v in progress.items() if k in ("feedback", "outer")}})

    def __getstate__(self) -> NoReturn:
        raise TypeError("a crew's optimizer holds a network; copy or save its state_dict() instead")

    def __repr__(self) -> str:
        return f"CrewOptimizer({self._mode.content} by {self._method.name}, {self._inner!r})"

    # -- Steps

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Take a local step, and average when the schedule says so. Returns the closure's loss."""
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return _step_with_hooks(self, closure)
        return self._step(closure)

    def _step(self, closure: Closure | None = None) -> float | None:
        self.conduct.require_in("optimizer.step()")
        if self._exchange is not None and self._steps == 0 and is_centred(self._method):
            self._exchange.average(0.0)  # all go on from one state; what one has resumed is in it
        skipped = self._unscale()
        loss = self._mode.local(closure, skipped)
        self._steps += 1
        self._since += 1
        if self._meter is not None and not skipped:
            self.conduct.spent.cohered(self._steps, self._meter.stepped(self._steps))
        self.conduct.worked(self._steps)
        delay = self._asked.delay
        if self._under_way is not None and self._since >= delay:
            self._end()
        if self.conduct.due(self._steps, self._since):
            self._begin() if delay else self.average()
        if self._on_step is not None:
            self._on_step(loss)
        return loss

    def average(self) -> Outcome:
        """Average now, whatever the schedule says: of fragments, the next one."""
        self.conduct.require_in("optimizer.average()")
        self._end()
        exchange = self._ready()
        arrived = self._arrive()
        if arrived is None:
            weight = self._mode.offer(self._weight())
            outcome = exchange.average(weight, self._deadline_s, self.conduct.begin())
        else:
            outcome = arrived
        self._since = 0
        return self._averaged(outcome, taken=arrived is not None)

    def _arrive(self) -> Outcome | None:
        """Get into step with the crew, where this peer is not; the last round of doing so."""
        if self.arrive is None:
            return None
        arrive, self.arrive = self.arrive, None
        outcome = arrive()
        if outcome is not None:
            self._weight()  # what was learned until now is in no average
        return outcome

    @property
    def follower(self) -> Follower | None:
        """Takes part without a gradient of its own; ``None``: models are averaged, so that the next average
        brings what a peer has missed; or averaging has not begun.
        """
        exchange, mode, kept = self._exchange, self._mode, layer(self._exchange, Aligning)
        if exchange is None or not isinstance(mode, Gradients):
            return None
        return Follower(exchange, mode, self._deadline_s, None if kept is None else kept.aligner)

    def _averaged(self, outcome: Outcome, taken: bool = False) -> Outcome:
        self.outcome = outcome
        self._current = kept_up(self._current, outcome, self._transport.me)
        kept = self._exchange is not None and self._exchange.kept
        if not taken:
            self._mode.take(outcome)
            self._ready().stepped(outcome)
        self.conduct.averaged(outcome, kept)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        return outcome

    # -- Averages that local steps do not wait for (outer=Outer(delay=...))

    def _begin(self) -> None:
        """Begin an average, and go on with local steps."""
        self._end()
        exchange = self._ready()
        weight = self._mode.offer(self._weight())
        self._under_way = exchange.begin(weight, self._deadline_s, self.conduct.begin())
        self._since = 0

    def _end(self) -> None:
        """Wait for the average under way, if there is one, and step by it."""
        begun, self._under_way = self._under_way, None
        if begun is not None and self._exchange is not None:
            self._averaged(self._exchange.end(begun))

    @property
    def stands_aside(self) -> bool:
        """Whether this peer is so slow that the others' rounds do not wait for it, by its schedule."""
        return self._transport.me in self.conduct.aside

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

    def _ready(self) -> Exchange:
        """What is averaged; where that is not agreed on yet, it is now."""
        if self._exchange is not None:
            return self._exchange
        return self._configure(self._watch.modules if self._watch is not None else [])

    def _configure(self, modules: list[torch.nn.Module]) -> Exchange:
        names = name_parameters(self.param_groups, modules)
        buffers, left_out = buffer_parts(modules) if self._buffers else ([], [])
        require_together(self._asked.with_buffers(bool(buffers)))
        exchange = self._exchange = self._made(names, buffers)
        exchange.load_state_dict(self._loaded)
        self._loaded = {}
        self._whole = Whole(self.name, Models(self._inner).parts(names, buffers), self._transport)
        self.left_out = tuple(left_out)
        self._modules = tuple(modules)
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._on_ready is not None:
            self._on_ready(self)
        return exchange

    def _made(self, names: Sequence[str], buffers: Sequence[Part]) -> Exchange:
        """The exchange that was asked for: one with the crew, and the layers around it."""
        outer, align, transport = self._outer, align_of(self._asked), self._transport
        content = self._mode.content if outer is None else f"{self._mode.content}, {outer.rule}"
        content += align_text(self._asked)
        exchange: Exchange
        if self._compress is not None:
            exchange = SparseReplica(
                self._mode.parts(names, ()),
                transport,
                self._compress,
                name=self.name,
                content=content,
                whole=Models(self._inner).parts(names, buffers),
                outer=None if outer is None else outer.rule,
                seed=self._seed,
                note=self._on_note,
            )
        else:
            exchange = dense = Replica(
                self._mode.parts(names, buffers),
                transport,
                self._method,
                self._codec,
                name=self.name,
                content=content,
                fragments=1 if outer is None else outer.fragments,
            )
            if outer is not None:
                exchange = Outer(dense, outer, len(names))
        if self._asked.partial:
            exchange = SlowPeer(exchange, parameters_of(self.param_groups), transport)
        if align is not None:
            aligner = Aligner(
                align,
                Models(self._inner).parts(names, ()),
                lambda parameter: self._inner.state.get(parameter, {}),
                transport,
                name=self.name,
                deadline_s=self._deadline_s,
                rows=layer(exchange, SparseReplica),
                note=self._on_note,
            )
            exchange = Aligning(exchange, aligner)
        return exchange


# torch wraps each optimizer's step in a label for its profiler and a look for hooks, which takes as long as
# all else here. The inner optimizer's step has that already; this one's is wrapped only where it has hooks.
CrewOptimizer.step.hooked = True  # type: ignore[attr-defined]
_step_with_hooks = CrewOptimizer.profile_hook_step(CrewOptimizer._step)
