"""How a peer of a live crew gets into step where gradients are averaged: ``training.replay``, live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ragtag.app.crew.state import Keeper, State
from ragtag.app.crew.transport import DriverTransport
from ragtag.core.types import Outcome, PeerId
from ragtag.protocols.membership.roster import Holder
from ragtag.training.state.follower import rounds_max
from ragtag.training.state.replay import CatchUp, Result, Ways


def fall_behind(keeper: Keeper, transport: DriverTransport, channel: int, state_round: int) -> None:
    """This peer is not in step any more: it says so, and gives its state to nobody."""
    transport.standing.behind(channel, state_round)
    keeper.gives(False)


def come_abreast(keeper: Keeper, transport: DriverTransport, channel: int) -> None:
    """This peer catches up no longer."""
    transport.standing.abreast(channel)
    keeper.gives(True)


def in_step(seats: Mapping[PeerId, Holder], transport: DriverTransport, channel: int) -> dict[PeerId, Holder]:
    """Those of the members that have not said that they are behind."""
    behind = transport.standing.known_behind(channel)
    return {peer: holder for peer, holder in seats.items() if peer not in behind}


def catch_up(
    keeper: Keeper,
    transport: DriverTransport,
    seats: Callable[[], Mapping[PeerId, Holder]],
    key: bytes,
    passed: Callable[[Outcome], None],
    *,
    new: bool,
    state_round: int,
) -> Result:
    """Get the crew's state and, following their rounds meanwhile, take the steps that others took after it.

    To be called by the trainer's thread where a round is due. It takes as long as ``transport.deadline_s`` at
    most. seats: who may give the state. passed: told of each round that was followed but the last one. new:
    this peer does not take part yet. state_round: the last round after which its state was the crew's
    (``NO_STATE``: none).

    Raises:
        RuntimeError: there is no optimizer that follows.
    """
    optimizer = keeper.optimizer
    follower = None if optimizer is None else optimizer.follower
    if optimizer is None or follower is None:
        raise RuntimeError("this peer averages no gradients with all others, so it has nothing to follow")
    _, since = optimizer.progress
    channel, standing = optimizer.channel, transport.standing

    def put(state: State) -> bool:
        if not keeper.put(state):
            return False
        standing.behind(channel, state.round)
        return True

    fetch = keeper.asking(key, lambda: in_step(seats(), transport, channel))
    if new:
        transport.take_part(channel, -1)
    fall_behind(keeper, transport, channel, state_round)
    ways = Ways(
        newer=partial(transport.await_newer, channel),
        fetch=fetch,
        put=put,
        follow=follower.follow,
        redo=follower.redo,
        ahead=partial(standing.ahead, channel),
        passed=passed,
    )
    try:
        came = CatchUp(ways, rounds_max(follower.n_bytes), transport.deadline_s).run()
    finally:
        come_abreast(keeper, transport, channel)
    follower.arrived(came.in_step)
    if came.state_round >= 0:
        optimizer.resume_at(optimizer.progress[0] + came.redone * since, 0)
    return came
