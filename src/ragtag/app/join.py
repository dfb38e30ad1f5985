"""``ragtag.join``: into the crew that this process was started for."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace

from ragtag.app.crew.crew import Crew
from ragtag.app.crew.join import JoinError, join_as, joined
from ragtag.app.environment import place_from_environment
from ragtag.app.on_ray.meeting import crew_named
from ragtag.core.types import Role


def join(*, deadline_s: float = 120.0, client: bool = False) -> Crew:
    """Join the crew that this process was started for: by ``ragtag run``, ``ragtag join``, torchrun or Ray.

    Started by none of them, the process is a crew of one, and the same script trains alone.

    A process may join again once it has left (a sweep, one crew after another): all peers do so in the same
    order, keep their numbers, and form a new crew, whose trace and invitation are in ``RUN/crew-2``,
    ``RUN/crew-3``, ... A peer that was declared dead in an earlier one is not waited for, and takes part once
    it comes all the same; one that died since is waited for until the deadline, then left out. A peer that
    was invited enters the crew of its invitation again. Alone a process may have any number of crews.

    deadline_s: how long to wait for the others to start (a model's set-up may take a while on a slow
    machine). A peer that is not there by then is left out until it is heard.

    client: this peer trains, and owns nothing of what is averaged: it sends its values to peers that do, and
        gets the averages back. For a slow uplink, or a peer to which others get through badly.
        RAGTAG_ROLE=client and ``ragtag join --client`` say the same.

    Raises:
        JoinError: this process is in its crew already, or is one that its script has started and that imports
            the script; nobody else came, a peer belongs to another version or another crew, or an invitation
            lets nobody in (any more); all peers are clients.
        TypeError, ValueError: an argument cannot be.
        ragtag.app.environment.PlaceError: the environment contradicts itself.
        ragtag.network.link.udp.PortInUse: the address to listen on is taken.
    """
    if not isinstance(client, bool):
        raise TypeError(f"client is {client!r}; it is True or False")
    if not isinstance(deadline_s, int | float) or not deadline_s > 0:
        raise ValueError(f"deadline_s is {deadline_s!r}; it is a number of seconds, above 0")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # what spawn itself looks at
        raise JoinError(
            "ragtag.join() in a process that this script has started (as a DataLoader starts workers under "
            "spawn): it imports the script, and would be a peer, too. Put all that is not to run there below "
            'if __name__ == "__main__":'
        )
    if meeting := os.environ.get("RAGTAG_RAY"):
        if client or os.environ.get("RAGTAG_ROLE") == "client":
            raise JoinError(
                "no peer of a Ray cluster is a client: its nodes reach each other; leave that out"
            )
        return crew_named(meeting).join(deadline_s=deadline_s)
    place = place_from_environment()
    if client and place is not None:
        place = replace(place, role=Role.CLIENT)
    return join_as(None, deadline_s) if place is None else joined.join(place, deadline_s)
