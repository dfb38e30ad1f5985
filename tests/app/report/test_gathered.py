"""Steps with a target batch: the report's section tells what became of each peer's samples."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.report import build_report
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace


def written(folder: Path, *records: trace.Target) -> str:
    with TraceWriter(folder / peer_file(trace.CREW)) as crew:
        crew.write(trace.Run(t=0.0, world="live", name="run", seed=1, peers=2, method="rps", config={}))
    with TraceWriter(folder / peer_file(1)) as writer:
        writer.write(trace.Join(t=0.1, peer=1))
        for record in records:
            writer.write(record)
    return build_report(folder).read_text(encoding="utf-8")


def target(t: float, counted: float, **more: object) -> trace.Target:
    return trace.Target(t=t, peer=1, round=9, target=4096, steps=10, computed=9000, counted=counted, **more)  # type: ignore[arg-type]


def test_the_newest_counts_are_shown_with_the_reasons(tmp_path: Path) -> None:
    last = target(
        2.0, 8000, pending=32, dropped={"late": 960, "lost": 8, "untold": 0}, overshoot=0.01, goodput=0.8
    )
    page = written(tmp_path, target(1.0, 100), last)
    section = page[page.index("<h2>Target batch</h2>") :]
    row = section[section.index('<td class="num">1</td>') :]
    row = row[: row.index("</tr>")]
    shown = [cell.partition("<")[0] for cell in row.split('<td class="num">')[1:]]
    assert shown == ["1", "4,096", "10", "9,000", "8,000", "32", "1 %", "80 %"]
    assert "<td>960 late, 8 lost</td>" in row
    assert page.count("<td>960 late") == 1


def test_where_no_step_has_a_target_there_is_no_section(tmp_path: Path) -> None:
    assert "<h2>Target batch</h2>" not in written(tmp_path)
