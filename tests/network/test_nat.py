"""Peers behind routers that translate addresses, in the lab (benchmarks/lab): each averages with all.

Where a router keeps a peer's port two such peers reach each other by hole punching. Where it draws a port for
each destination nothing gets through between them, and a member that both reach relays.
"""

from __future__ import annotations

import json

import pytest

from tests.network.labs import lab_of

pytestmark = pytest.mark.root

N, BEHIND = 4, ((1,), (2, 3))
"""Peer 0 is public, 1 behind a router, 2 and 3 behind another one."""
ENOUGH, WITHIN_S = 5, 60.0

PEER = """
import json, sys, time
import torch
import ragtag
from tests.network.test_nat import ENOUGH, N, WITHIN_S

whole, seen = 0, 0
def told(outcome):
    global whole, seen
    others = [bool((outcome.heard >> peer & 1).any()) for peer in range(N)]
    whole += all(others)

began_s = time.monotonic()
with ragtag.join(deadline_s=30.0) as crew:
    model = torch.nn.Linear(64, 64)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model, on_outcome=told)
    told_s = None
    while time.monotonic() < began_s + WITHIN_S and (told_s is None or time.monotonic() < told_s + 2.0):
        model(torch.randn(4, 64)).sum().backward()
        time.sleep(0.02)
        optimizer.step()
        if whole >= ENOUGH and told_s is None:
            told_s = time.monotonic()
    card = crew._peer.driver.engine.reach.agent.roster.mine
    ways = {way.peer: way.through for way in crew._peer.driver.directions()}
    seen = {"inner": card.inner_host, "host": card.host, "state": card.state_port}
    print(json.dumps({"whole": whole, "ways": ways, "relayed": crew._peer.driver.relayed(), **seen}))
"""


@pytest.mark.slow
def test_peers_behind_routers_average_with_all() -> None:
    with lab_of(N, behind=BEHIND) as lab:
        peers = lab.joined(PEER)
        found = [json.loads(peer.communicate(timeout=2 * WITHIN_S)[0]) for peer in peers]
    assert all(peer["whole"] >= ENOUGH for peer in found), found
    assert [peer["inner"] for peer in found] == ["", "192.168.2.3", "192.168.3.4", "192.168.3.5"]
    assert [peer["host"] for peer in found] == [lab.hosts[0], lab.hosts[1], lab.hosts[2], lab.hosts[2]]
    assert [peer["state"] > 0 for peer in found] == [True, False, False, False]


@pytest.mark.slow
def test_peers_behind_symmetric_routers_average_with_all_through_the_two_that_both_reach() -> None:
    with lab_of(N, behind=((1,), (2,)), symmetric=True) as lab:
        peers = lab.joined(PEER)
        found = [json.loads(peer.communicate(timeout=2 * WITHIN_S)[0]) for peer in peers]
    assert all(peer["whole"] >= ENOUGH for peer in found), found
    seats = {peer["host"]: peer["inner"] for peer in found}
    assert seats == {
        host: "192.168.2.3" if at == 1 else "192.168.3.4" if at == 2 else ""
        for at, host in enumerate(lab.hosts)
    }
    relayed = [sorted(through for through in peer["ways"].values() if through >= 0) for peer in found]
    assert [len(ways) for ways in relayed] == [0, 1, 1, 0], "only the two that do not reach each other"
    assert found[0]["relayed"] + found[3]["relayed"] > 0 and found[1]["relayed"] == found[2]["relayed"] == 0
