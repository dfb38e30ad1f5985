"""Replicas that are compared: the report's section, and the live view."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragtag.app.report import build_report
from ragtag.app.terminal.dashboard import Dashboard
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace
from tests.app.terminal.watching import shown


def records(peer: int, apart: tuple[int, ...]) -> list[trace.Align]:
    """Comparisons of 264 units, of which so many differ; this peer takes those that it has not."""
    own = peer == 1
    return [
        trace.Align(
            t=61.0 + at, peer=peer, round=31 + 32 * at, units=264, apart=count, own=count * own, peers=2,
            given=3 * (not own), taken=count * own, distance=0.0125 * own * (count > 0),
        )
        for at, count in enumerate(apart)
    ]  # fmt: skip


def written(folder: Path, apart: tuple[int, ...]) -> str:
    with TraceWriter(folder / peer_file(trace.CREW)) as crew:
        crew.write(trace.Run(t=0.0, world="live", name="run", seed=1, peers=2, method="rps", config={}))
    for peer in range(2):
        with TraceWriter(folder / peer_file(peer)) as writer:
            writer.write(trace.Join(t=0.1, peer=peer))
            for record in records(peer, apart):
                writer.write(record)
    return build_report(folder).read_text(encoding="utf-8")


def test_what_differed_and_what_was_done_is_shown(tmp_path: Path) -> None:
    page = written(tmp_path, (33, 0, 0))
    section = page[page.index("<h2>Replicas</h2>") :]
    row = section[section.index('<td class="num">1</td>') :]
    row = row[: row.index("</tr>")]
    shown_ = [cell.partition("<")[0] for cell in row.split('<td class="num">')[1:]]
    assert shown_ == ["1", "3", "4.17 %", "4.17 %", "0", "33", "0.013", "0.013", "62 s"]


def test_that_they_differ_still_is_said(tmp_path: Path) -> None:
    assert "they differ" in written(tmp_path, (0, 5))


def test_where_nothing_is_compared_there_is_no_section(tmp_path: Path) -> None:
    assert "<h2>Replicas</h2>" not in written(tmp_path, ())


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_view_says_how_far_they_are_alike(width: int) -> None:
    view = Dashboard(0)
    view.feed(trace.Run(t=0.0, world="live", name="run", seed=1, peers=2, method="rps+repair"))
    assert "replicas" not in shown(view, width)
    for peer in range(2):
        view.feed(trace.Note(t=61.0, peer=peer, what="replicas differ", detail="33 of 264 parts"))
        view.feed(records(peer, (33,))[0])
    assert "replicas 12.5% apart" in shown(view, width) and "replicas 12.5% apart" in view.line()
    events = [text for _, text in view.peers.events]
    assert events == ["replicas differ: 33 of 264 parts"], "once, though both say it"
    for peer in range(2):
        view.feed(trace.Note(t=65.0, peer=peer, what="replicas alike", detail="bit for bit"))
        view.feed(records(peer, (33, 0))[1])
    assert "replicas alike" in view.line()
    assert [text for _, text in view.peers.events][1:] == ["replicas alike: bit for bit"]
