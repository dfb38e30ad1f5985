"""How a peer ends, where what it ends with is broken."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from ragtag.app.crew.peer import Peer
from ragtag.app.crew.transport import DriverTransport
from ragtag.app.environment import Place
from ragtag.app.tracefile import TraceWriter, peer_file, read_run
from ragtag.core import trace
from ragtag.network.driver.mailbox import DriverFailed
from tests.network.crew import PATIENCE_S, Crew
from tests.training.test_split import Numbers


def breaks(now_s: float) -> None:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize("failed", [False, True])
def test_a_peer_whose_driver_died_closes_and_records_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """It dies while the peer draws samples: their claims can be given back to nobody."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with Crew(2) as crew:
        driver = crew.drivers[0]
        writer = TraceWriter(tmp_path / peer_file(0))
        peer = Peer(Place(0, 2, "otters"), DriverTransport(driver, PATIENCE_S), driver, writer, 0.0)
        split = peer.data.split(DataLoader(Numbers(100), batch_size=2), None, None, None)
        next(iter(split))
        driver.engine.mailbox.put(breaks, None)
        driver.engine.thread.join(PATIENCE_S)
        if failed:
            peer.leave(1.0, failed=True, over=False)
        else:
            with pytest.raises(DriverFailed, match="by zero"):
                peer.leave(1.0, failed=False, over=True)
        assert driver.link.fileno() == -1, "its socket is closed"
        (left,) = [record for record in read_run(tmp_path).records() if isinstance(record, trace.Leave)]
        assert left.failed
        peer.leave(1.0, failed=False, over=True)
