"""What one optimizer averages with its crew, and when: what is behind the optimizer that a script holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ragtag.core.channels import channel_of, require_name
from ragtag.core.errors import HasLeft
from ragtag.core.types import Noted, Outcome
from ragtag.training.align.aligner import Aligner
from ragtag.training.align.plan import Aligned
from ragtag.training.coherence import Coherence, CoherenceMeter
from ragtag.training.exchange.aligned import Aligning
from ragtag.training.exchange.asked import exchange_of, mode_of, schedule_of
from ragtag.training.exchange.base import Exchange, layer
from ragtag.training.exchange.central import is_centred
from ragtag.training.exchange.combine import Asked, require_together
from ragtag.training.exchange.compress import Compression
from ragtag.training.exchange.sparse import SparseReplica
from ragtag.training.optimizer.account import RESTORED, Accounting
from ragtag.training.optimizer.gathering import Gathering
from ragtag.training.optimizer.modes import Closure, Gradients, Models
from ragtag.training.optimizer.scheduling import Scheduling
from ragtag.training.optimizer.siblings import Siblings
from ragtag.training.optimizer.weight import Weight
from ragtag.training.planning import Planner
from ragtag.training.state.fixed import Fixed
from ragtag.training.state.follower import Follower
from ragtag.training.state.whole import Stand, Whole, kept_up
from ragtag.training.tensors.modules import (
    Watch,
    buffer_parts,
    counter_parts,
    fixed_parts,
    name_parameters,
    parameters_of,
)
from ragtag.training.transport import Transport


class AveragedModel:
    """The model, or models, of one optimizer, and this peer's part in averaging them.

    A ``CrewOptimizer`` hands its steps on to it; the crew gives it state, asks where it stands and ends it.

    asked: what the optimizer is asked for.
    transport: the crew's network.
    name: of what is averaged, the same on all peers.
    seed: of random selections.
    model: whose parameters these are (``None``: it is found by a look at which module is called).
    buffers: whether floating-point buffers are averaged, too.
    weight: how much this peer counts in a mean.
    deadline_s: bounds each round (``None``: measurement does).
    coherence: whether, and how often, gradients are compared with earlier ones.
    siblings: what all optimizers of this peer have in common.
    on_outcome, on_ready, on_note, on_step: see ``CrewOptimizer``.
    """

    def __init__(
        self,
        asked: Asked,
        transport: Transport,
        *,
        name: str,
        seed: int,
        model: torch.nn.Module | None,
        buffers: bool,
        weight: Weight,
        deadline_s: float | None,
        coherence: Coherence | None,
        siblings: Siblings,
        on_outcome: Callable[[Outcome], None] | None,
        on_ready: Callable[[AveragedModel], None] | None,
        on_note: Callable[[Noted], None] | None,
        on_step: Callable[[float | None], None] | None,
    ) -> None:
        self.asked = asked
        self.name = require_name(name)
        self._transport, self._seed, self._buffers = transport, seed, buffers
        self.weight, self._deadline_s, self._siblings = weight, deadline_s, siblings
        self._on_outcome, self._on_ready = on_outcome, on_ready
        self._on_note, self._on_step = on_note, on_step
        self._mode = mode_of(asked, weight)
        self.gathering: Gathering | None = None
        """Towards a target batch, where there is one."""
        self.accounting: Accounting | None = None
        """What has become of its samples, where there is a target batch."""
        if asked.target is not None:
            samples = asked.target.samples
            self.gathering = siblings.gathering(samples) or Gathering(samples, transport, on_note)
            self.accounting = Accounting(self.gathering)
        self.scheduling = Scheduling(
            schedule_of(asked),
            transport,
            name,
            on_note,
            self.gathering,
            began=lambda: transport.newer(self.channel),
        )
        """When it averages, which peers it waits for, and where its time goes."""
        self._coherence = coherence
        self._meter = self._new_meter()
        self._steps = self._since = 0
        self._exchange: Exchange | None = None
        self._counters: Fixed | None = None
        self._loaded: dict[str, Any] = {}  # of the exchange, before there is one
        self._under_way: Any = None
        self._current = -1
        self._watch: Watch | None = None
        self._modules: tuple[torch.nn.Module, ...] = ()
        self.whole: Whole | None = None
        """All that is averaged, to be compared with other peers' (``None``: averaging has not begun)."""
        self.outcome: Outcome | None = None
        """What the last average came to."""
        self.arrive: Callable[[], Outcome | None] | None = None
        """What the next average begins with, once: it brings the crew's model to a peer that was not there.
        Its outcome takes that average's place (``None``: the average follows)."""
        self.look: Callable[[], None] = lambda: None
        """Called before each average: it gets the state of a crew that has gone on without this peer."""
        self.is_apart: Callable[[], bool] = lambda: False
        """Whether no average is due, whatever the schedule says: the crew has gone on without this peer, and
        its state comes with another optimizer's average."""
        self.left_out: tuple[str, ...] = ()
        """Floating-point buffers that are not averaged (known once averaging has begun)."""
        self.left = False
        """Whether this peer has left its crew: it averages no more."""
        self._planner = Planner(transport, self.channel, on_note) if asked.averager.planned else None
        if model is not None:
            self._configure([model])
        else:
            self._look_for_modules()

    # -- What it is

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that takes the local steps."""
        return self.asked.inner

    @property
    def channel(self) -> int:
        """The number of the channel that it averages on."""
        return channel_of(self.name)

    @property
    def averages_gradients(self) -> bool:
        """Whether all peers average gradients before their steps: these are then the same on all."""
        return isinstance(self._mode, Gradients) and self.asked.averager.kind == "at once"

    @property
    def content(self) -> str:
        """What is averaged: "models" or "gradients"."""
        return self._mode.content

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The models whose parameters these are, as far as they have been given or seen at work."""
        return self._modules if self._watch is None else tuple(self._watch.modules)

    @property
    def modules_known(self) -> bool:
        """Whether ``modules`` is all there will be: averaging has begun, or the model was given."""
        return self._exchange is not None

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add to the inner optimizer's. Raises RuntimeError once averaging or stepping has begun."""
        if self._exchange is not None or self._steps:
            raise RuntimeError(
                "add_param_group: the crew has agreed on what is averaged; add all groups before the first "
                "step (and without model=...), or make a new crew optimizer on every peer"
            )
        self.inner.add_param_group(group)
        self._meter = self._new_meter()
        self._look_for_modules()

    def _new_meter(self) -> CoherenceMeter | None:
        asked = self._coherence
        return None if asked is None else CoherenceMeter(asked, self.parameters)

    def _look_for_modules(self) -> None:
        self.look_no_more()
        watch = self._watch = Watch(self.parameters)
        weakref.finalize(self, watch.end)  # of nothing that refers to this: a finalizer lives as long as that

    def look_no_more(self) -> None:
        """Find no further module: averaging begins."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    # -- Steps

    def require_in(self, asked: str) -> None:
        """Raise HasLeft once this peer has left its crew. asked: what was asked for then."""
        if self.left:
            raise HasLeft(asked)

    def step(self, closure: Closure | None, skipped: bool) -> float | None:
        """Take a local step, and average when the schedule says so. Returns the closure's loss.

        skipped: its gradients overflowed; this peer takes part in the average all the same.
        """
        if self._steps == 0:
            self._siblings.require(self)
        if self._exchange is not None and self._steps == 0 and is_centred(self.asked.averager):
            self._exchange.average(0.0)  # all go on from one state; what one has resumed is in it
        loss = self._mode.local(closure, skipped)
        self._steps += 1
        self._since += 1
        scheduling, delay = self.scheduling, self.asked.delay
        if self._meter is not None and not skipped:
            scheduling.spent.cohered(self._steps, self._meter.stepped(self._steps))
        scheduling.worked(self._steps)
        leads = False
        if self.accounting is not None and isinstance(self._mode, Gradients):
            leads = self.accounting.stepped(self._mode.batch, skipped)
        if delay and self._under_way is not None and self._is_to_end(delay):
            self._end()
        if leads:
            self._siblings.averages(self, lambda: scheduling.due(self._steps, self._since))
        elif self.accounting is None and not self.is_apart() and scheduling.due(self._steps, self._since):
            if self.asked.partial or (delay and self.asked.averager.quorum):
                self._turn()
            else:
                self._begin() if delay else self.average()
        if self._on_step is not None:
            self._on_step(loss)
        return loss

    @property
    def found(self) -> bool:
        """Whether it is known what it averages: it has been given a model, or has been stepped."""
        return self.modules_known or self._steps > 0

    def prepares(self, aside: bool) -> None:
        """All that step towards a target batch are to average: end what is under way, and see whether this
        peer has to get into step.

        aside: in another optimizer's step. What the script has in ``.grad`` stays there.
        """
        with self._gradients_aside() if aside else nullcontext():
            self._end()
        self._ready()
        self.look()

    def turns(self, aside: bool) -> None:
        """Average, or begin to. aside: as above."""
        with self._gradients_aside() if aside else nullcontext():
            self._begin() if self.asked.delay else self.average()

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        kept = [(parameter, parameter.grad) for parameter in self.parameters]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _is_to_end(self, delay: int) -> bool:
        """Whether the average under way is to be taken over now. Towards a target batch each peer computes as
        many batches as it can meanwhile. Where a quorum is enough, peers are on clocks of their own, and none
        stands still (Decoupled DiLoCo). Else all wait for it after as many steps.
        """
        if self.gathering is not None:
            return bool(self._under_way.over)
        return self._since >= delay and (not self.asked.averager.quorum or self._under_way.over)

    def _turn(self) -> None:
        """Average, unless the round that this peer offered to is under way still: it computes on then. The
        schedule is asked again after the next step.
        """
        if self._under_way is None or self._under_way.over:
            self._begin()

    def average(self) -> Outcome:
        """Average now, whatever the schedule says: of fragments, the next one. Raises HasLeft."""
        self.require_in("optimizer.average()")
        self._end()
        exchange = self._ready()
        arrived = self._arrive()
        if arrived is None:
            with self._offering() as weight:
                outcome = exchange.average(weight, self._deadline_s, self.scheduling.begin())
        else:
            outcome = arrived
        self._since = 0
        return self._averaged(outcome, taken=arrived is not None)

    @contextmanager
    def _offering(self) -> Iterator[float]:
        """Make ready what is averaged; the weight that it has."""
        if self.scheduling.went_by >= 0:
            self._transport.goes_on_after(self.channel, self.scheduling.went_by)
        with self._accounted():
            yield self._mode.offer(self.weight() if self.accounting is None else self.accounting.offers())

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """The samples of an average that ends with an error, which the script may go on from, are dropped."""
        try:
            yield
        except BaseException:
            if self.accounting is not None:
                self.accounting.failed()
            raise

    def _arrive(self) -> Outcome | None:
        """Get into step with the crew, where this peer is not; the last round of doing so."""
        self.look()
        if self.arrive is None:
            return None
        arrive, self.arrive = self.arrive, None
        outcome = arrive()
        if outcome is not None and self.gathering is None:
            self.weight()  # what was learned until now is in no average
        return outcome

    def _averaged(self, outcome: Outcome, taken: bool = False) -> Outcome:
        self.outcome = outcome
        self._current = kept_up(self._current, outcome, self._transport.me)
        kept = self._exchange is not None and self._exchange.kept
        if not taken:
            self._mode.take(outcome)
            self._ready().stepped(outcome)
        if self.accounting is not None:
            self.accounting.averaged(outcome, gave=not taken)
        self.scheduling.averaged(outcome, kept)
        if self._planner is not None:
            self._planner.averaged(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        return outcome

    # -- Averages that local steps do not wait for (overlap=True, outer=Outer(delay=...), a slow peer's turn)

    def _begin(self) -> None:
        """Begin an average, and go on with local steps."""
        self._end()
        exchange = self._ready()
        arrived = self._arrive()
        if arrived is not None:
            self._since = 0
            self._averaged(arrived, taken=True)
            return
        with self._offering() as weight:
            self._under_way = exchange.begin(weight, self._deadline_s, self.scheduling.begin())
        self._since = 0
        if isinstance(self._under_way, Outcome):
            self._end()

    def _end(self) -> None:
        """Wait for the average under way, if there is one, and step by it."""
        begun, self._under_way = self._under_way, None
        if begun is not None and self._exchange is not None:
            back = self._mode.aside()
            try:
                with self._accounted():
                    outcome = self._exchange.end(begun)
                self._averaged(outcome)
            finally:
                back()

    # -- Where it stands

    @property
    def progress(self) -> tuple[int, int]:
        """How many steps were taken, and how many of them since the last average."""
        return self._steps, self._since

    @property
    def stands_aside(self) -> bool:
        """Whether this peer is so slow that the others' rounds do not wait for it, by its schedule."""
        return self._transport.me in self.scheduling.aside

    @property
    def follower(self) -> Follower | None:
        """Takes part without a gradient of its own.

        ``None``: models are averaged, so that the next average brings what a peer has missed; or averaging
        has not begun.
        """
        exchange, mode = self._exchange, self._mode
        if exchange is None or not isinstance(mode, Gradients):
            return None
        return Follower(exchange, mode, self._deadline_s, self._aligner)

    def stand(self) -> Stand:
        """Where this peer stands. Raises RuntimeError: averaging has not begun."""
        if self.whole is None:
            raise RuntimeError("averaging has not begun")
        # what is in no model yet does not count: gradients that wait, updates of a central state
        counts = self.content == "models" and not is_centred(self.asked.averager)
        round_ = -1 if self.outcome is None else self.outcome.round
        return Stand(self.whole.digest(), self._current, self._since if counts else 0, round_)

    def settle(self) -> None:
        """End what is under way: no more local steps will come."""
        self._end()
        if (aligner := self._aligner) is not None:
            aligner.finish()
        if self.accounting is not None:
            self.accounting.ends()
            self._mode.forget()
        if self._exchange is not None and is_centred(self.asked.averager) and self._since:
            self.average()

    @property
    def _aligner(self) -> Aligner | None:
        """Compares replicas, where they are kept alike."""
        kept = layer(self._exchange, Aligning)
        return None if kept is None else kept.aligner

    @property
    def aligned(self) -> Aligned | None:
        """What the last comparison of replicas came to (``None``: there was none)."""
        return None if (aligner := self._aligner) is None else aligner.aligned

    @property
    def replica(self) -> int | None:
        """A digest of what replicas that are kept alike have in common (``None``: they are not)."""
        return None if (aligner := self._aligner) is None else aligner.digest()

    @property
    def sparse(self) -> SparseReplica | None:
        """What sends selections, once averaging has begun (``None``: everything is sent)."""
        return layer(self._exchange, SparseReplica)

    @property
    def compression(self) -> Compression | None:
        """What sending less came to in the last round (``None``: everything is sent)."""
        return None if self.sparse is None else self.sparse.compression

    # -- Its state, kept and given

    def state_dict(self) -> dict[str, Any]:
        """How far this peer has come, and the state of its exchange."""
        more = {} if self.accounting is None else {"samples": self.accounting.state_dict()}
        return {"step": self._steps, "since_average": self._since, **more, **self._exchange_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave. Raises ValueError, naming what does not fit first."""
        self._steps, self._since = int(state["step"]), int(state["since_average"])
        if self.accounting is not None:
            self._mode.forget()
            self.accounting.drop(RESTORED)
            if "samples" in state:
                self.accounting.load_state_dict(state["samples"])
        self._load({"outer": {}, **{k: v for k, v in state.items() if k in ("feedback", "outer")}})

    def resume_at(self, steps: int, since: int) -> None:
        """Go on as a peer that has come so far; gradients gathered before are forgotten."""
        self._steps, self._since = steps, since
        if self._under_way is not None:  # it is of what was here before; it ends by its own deadline
            self._under_way.wait()
            self._under_way = None
        self._mode.forget()
        if self.accounting is not None:
            self.accounting.drop(RESTORED)
        for more in (self._exchange, self._meter):
            if more is not None:
                more.forget()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that its optimizer has."""
        return parameters_of(self.inner.param_groups)

    def fixed(self, elsewhere: Iterable[torch.Tensor] = ()) -> Fixed:
        """What the models have beside what is averaged, to be the same on all peers from the beginning.

        Buffers, and parameters that no optimizer has and that need a gradient, are among it where the model
        was given: one that is found has been at work, has counted, and may have been trained.

        elsewhere: parameters that other optimizers of this peer have.
        """
        given = self.asked.has_model
        averaged = [*self.parameters, *elsewhere]
        parts = fixed_parts(averaged, self.modules, trainable=given, buffers=given and self._buffers)
        return Fixed(self.name, parts, self._transport)

    @property
    def counters(self) -> Fixed | None:
        """Integers in the models' buffers, which no average is of; ``None``: there are none."""
        if self._counters is None and self.asked.has_model and self._buffers:
            parts = counter_parts(self.modules)
            self._counters = Fixed(f"{self.name}/counters", parts, self._transport) if parts else None
        return self._counters

    def anchor_here(self) -> None:
        """The model, as it is now, is what all peers begin with; differences that are sent are to it."""
        if self.sparse is not None:
            self.sparse.anchor_here()

    @property
    def outer_state(self) -> dict[str, Any]:
        """Anchor and momentum of the outer steps (see ``outer.OuterSteps.state_dict``); empty: none yet."""
        state: dict[str, Any] = self._exchange_state().get("outer") or {}
        return state

    @outer_state.setter
    def outer_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, naming it, at the first parameter that does not fit."""
        self._load({"outer": dict(state)})

    def load_compression(self, state: dict[str, Any]) -> None:
        """Take up ``sparse.tensors()``, or a part; now, or when averaging begins. Raises ValueError."""
        self._load({"feedback": {**self._loaded.get("feedback", {}), **state}})

    def _exchange_state(self) -> dict[str, Any]:
        return dict(self._loaded) if self._exchange is None else self._exchange.state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take up an exchange's state: now, or when averaging begins."""
        if self._exchange is not None:
            self._exchange.load_state_dict(state)
        else:
            self._loaded |= state

    # -- The beginning

    def _ready(self) -> Exchange:
        """What is averaged; where that is not agreed on yet, it is now."""
        if self._exchange is not None:
            return self._exchange
        return self._configure(self._watch.modules if self._watch is not None else [])

    def _configure(self, modules: list[torch.nn.Module]) -> Exchange:
        names = name_parameters(self.inner.param_groups, modules)
        buffers, left_out = buffer_parts(modules) if self._buffers else ([], [])
        require_together(self.asked.with_buffers(bool(buffers)))
        exchange = self._exchange = exchange_of(
            self.asked,
            self._mode,
            names,
            buffers,
            self._transport,
            name=self.name,
            seed=self._seed,
            deadline_s=self._deadline_s,
            corrections=self._siblings.corrections,
            note=self._on_note,
        )
        exchange.load_state_dict(self._loaded)
        self._loaded = {}
        parts = Models(self.inner).parts(names, buffers)
        self.whole = Whole(self.name, parts, self._transport, self.asked.guard)
        self.left_out = tuple(left_out)
        self._modules = tuple(modules)
        self.look_no_more()
        if self._on_ready is not None:
            self._on_ready(self)
        if self.gathering is not None:
            self.gathering.opened()
        return exchange
