"""DDP scripts over Ragtag's transport, in real processes: peers are killed, frozen, and have NaN."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ragtag.app.launch import launch
from ragtag.app.launch.events import Event, Printed

WORKER = Path(__file__).with_name("crew_worker.py")
FREEZE_S = 0.8  # the others go on for so long after it that they meet again


@dataclass
class Peer:
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    behind: list[bool] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def read(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind != "step":
            self.said[kind] = rest
            return
        _, seconds, loss, _, heard, behind, _ = rest.split()
        self.seconds.append(float(seconds))
        self.losses.append(float(loss))
        self.heard.append(int(heard, 2))
        self.behind.append(behind == "1")

    def learned(self) -> bool:
        # a batch in twenty has four times the loss of most: the last twenty's mean tells little
        return statistics.median(self.losses[20:][-100:]) < 0.75 * statistics.median(self.losses[:20])


def run(n: int, steps: int, *, nan: int = -1, kill: int = -1, freeze: int = -1) -> list[Peer]:
    events: list[Event] = []
    argv = [str(WORKER), *map(str, (steps, nan, kill, freeze))]
    result = launch(n, argv, on_event=events.append)
    peers = [Peer() for _ in range(n)]
    for event in events:
        if isinstance(event, Printed) and not event.error:
            peers[event.peer].read(event.text)
    errors = [event.text for event in events if isinstance(event, Printed) and event.error]
    expected = [-9 if (peer, kill >= 0) == (3, True) else 0 for peer in range(n)]
    assert [end.status for end in result.ends] == expected, errors
    return peers


@pytest.mark.slow
def test_a_ddp_script_goes_on_when_peers_are_killed_and_frozen() -> None:
    peers = run(4, 500, kill=150, freeze=220)
    assert len({peer.said["began"] for peer in peers}) == 1, "all begin with the same model"
    assert len(peers[3].seconds) == 150
    for peer in peers[:3]:
        assert len(peer.seconds) == 500
        assert peer.learned()
    for peer in (peers[0], peers[2]):
        median = statistics.median(peer.seconds)
        late = peer.seconds[100:]
        assert max(late) < FREEZE_S / 2, "nobody waits for one that is frozen"
        assert statistics.quantiles(late, n=100)[98] < 6 * median
        assert any(peer.heard[at] & 8 for at in range(100))
        assert not any(heard & 8 for heard in peer.heard[160:]), "the dead have no voice"
    assert peers[1].seconds[220] < FREEZE_S / 2, "frozen before its step"
    assert any(peers[1].behind[220:]), "it gives nothing while its model is old"
    assert not peers[1].behind[-1], "it has had the others' model"
    assert any(heard & 2 for heard in peers[0].heard[230:]), "and then it counts again"


@pytest.mark.slow
def test_nan_on_one_peer_is_named_there_and_the_others_go_on() -> None:
    steps = 400  # of some ms: on a busy machine a peer may be away for a hundred, and then is to catch up
    peers = run(3, steps, nan=30)
    assert (
        peers[1]
        .said["refused"]
        .startswith("gradient of '0.weight' has 2000 NaN and 0 infinite of 2000 values. Nothing was sent")
    )
    assert [len(peer.seconds) for peer in peers] == [steps, steps - 1, steps]
    assert all(peer.learned() for peer in peers)
    assert not any("refused" in peers[at].said for at in (0, 2))
    assert all("nan" not in peer.said["ended"] for peer in peers)
