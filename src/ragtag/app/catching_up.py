"""How a peer of a live crew gets into step where gradients are averaged: ``training.replay``, live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ragtag.app.state import Keeper
from ragtag.app.transport import DriverTransport
from ragtag.core.types import Outcome, PeerId
from ragtag.protocols.roster import Holder
from ragtag.training.follower import rounds_max
from ragtag.training.replay import CatchUp, Result, Ways


def catch_up(
    keeper: Keeper,
    transport: DriverTransport,
    seats: Callable[[], Mapping[PeerId, Holder]],
    key: bytes,
    passed: Callable[[Outcome], None],
    *,
    new: bool,
) -> Result:
    """Get the crew's state and, following their rounds meanwhile, take the steps that others took after it.

    To be called by the trainer's thread where a round is due. It takes as long as ``transport.deadline_s`` at
    most. seats: who may give the state. passed: told of each round that was followed but the last one. new:
    this peer does not take part yet.

    Raises:
        RuntimeError: there is no optimizer that follows.
    """
    optimizer = keeper.optimizer
    follower = None if optimizer is None else optimizer.follower
    if optimizer is None or follower is None:
        raise RuntimeError("this peer averages no gradients with all others, so it has nothing to follow")
    _, since = optimizer.progress
    fetch = keeper.asking(key, seats)
    if new:
        transport.take_part(optimizer.channel, -1)
    ways = Ways(
        newer=partial(transport.await_newer, optimizer.channel),
        fetch=fetch,
        put=keeper.put,
        follow=follower.follow,
        redo=follower.redo,
        passed=passed,
    )
    came = CatchUp(ways, rounds_max(follower.n_bytes), transport.deadline_s).run()
    follower.arrived(came.in_step)
    if came.state_round >= 0:
        optimizer.resume_at(optimizer.progress[0] + came.redone * since, 0)
    return came
