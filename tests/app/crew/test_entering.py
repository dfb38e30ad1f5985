"""Peers that enter a crew of which nobody is left: the first one to have a seat begins, the others follow."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragtag.app.crew.membership import Entrance, enter, member_socket
from ragtag.app.crew.phases import Phases
from ragtag.app.environment import Place
from ragtag.app.invitation.token import Token, new_key
from ragtag.network.membership.agent import Told
from ragtag.protocols.crew.joining import Joining
from ragtag.protocols.membership.types import Changed

DEADLINE_S, GOSSIP_S = 30.0, 3.0


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False])
def test_one_begins_and_the_others_are_late(begins: bool) -> None:
    """Each knows the addresses of some others; whose token names itself only would begin. Nobody averages.

    Without that one no token names a peer that begins, and they begin all the same.
    """
    socks = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    at, key = [sock.getsockname()[:2] for sock in socks], new_key()
    known = [(at[1], at[2]), (at[2],), (at[2],) if begins else (at[0],)]

    def come(peer: int) -> Entrance:
        time.sleep(0.5 * peer)  # as processes come, one after the other
        token = Token(known[peer], "crew", key)
        place = Place(peer, 1, "crew", name=f"peer-{peer}")
        ways = member_socket(token, socks[peer].fileno())
        entrance, _ = enter(Joining("crew", "1", DEADLINE_S), place, token, ways, 1, 0, Phases())
        agent = entrance.agent

        def hear(told: Told) -> None:
            if isinstance(told, Changed):
                agent.roster.changed(told.member, told.was)

        agent.run_until(lambda: False, GOSSIP_S, hear)  # so that the others get to know where it sits
        return entrance

    with ThreadPoolExecutor(3) as pool:
        entered = [pool.submit(come, peer) for peer in range(3)]
        found = [future.result(2 * DEADLINE_S) for future in entered]
    try:
        assert sorted(entrance.late for entrance in found) == [False, True, True]
        assert {entrance.seat for entrance in found} == {0, 1, 2}
    finally:
        for entrance in found:
            entrance.agent.close()
        for sock in socks:
            sock.close()
