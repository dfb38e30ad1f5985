"""Epochs of a split: the report tells what was missed and what was used twice."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.report import build_report, report_json
from ragtag.app.report.sections import EPOCHS_SHOWN
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace


def written(folder: Path, *records: trace.Epoch) -> str:
    for peer in (0, 1):
        with TraceWriter(folder / peer_file(peer)) as writer:
            writer.write(trace.Join(t=0.1, peer=peer))
            for record in records:
                if record.peer == peer:
                    writer.write(record)
    return build_report(folder).read_text(encoding="utf-8")


def told(peer: int, epoch: int, missed: int, twice: int) -> trace.Epoch:
    return trace.Epoch(t=1.0 + epoch, peer=peer, epoch=epoch, samples=6000, missed=missed, twice=twice)


def rows(page: str) -> list[list[str]]:
    section = page[page.index("<h2>Epochs</h2>") :]
    body = section[section.index("<tbody>") : section.index("</tbody>")]
    return [[cell.rpartition(">")[2] for cell in row.split("</td>")[:-1]] for row in body.split("</tr>")[:-1]]


def test_what_was_missed_and_used_twice_is_told_for_each_epoch(tmp_path: Path) -> None:
    page = written(tmp_path, *(told(p, 0, 0, 0) for p in (0, 1)), told(0, 1, 1024, 32), told(1, 1, 1040, 32))
    assert rows(page) == [["0", "6,000", "0", "0"], ["1", "6,000", "1,024 to 1,040", "32"]]
    assert ">Samples missed<" in page and ">1,024 to 1,040</div>" in page and "of 12,000 in 2 epochs" in page
    calm, stormy = report_json(tmp_path)["epochs"]
    names = ("epoch", "samples", "missed", "missed_least", "twice", "twice_least")
    assert [calm[name] for name in names] == [0, 6000, 0, 0, 0, 0]
    assert [stormy[name] for name in names] == [1, 6000, 1040, 1024, 32, 32]


def test_of_many_epochs_those_are_shown_in_which_something_was_missed(tmp_path: Path) -> None:
    page = written(tmp_path, *(told(0, epoch, 7 * (epoch == 3), 0) for epoch in range(100)))
    shown = rows(page)
    assert len(shown) == EPOCHS_SHOWN and shown[0] == ["3", "6,000", "7", "0"] and shown[-1][0] == "99"
    assert f"Shown are those {EPOCHS_SHOWN} of 100" in page
    assert len(report_json(tmp_path)["epochs"]) == 100


def test_where_nothing_was_missed_no_tile_says_so_and_without_a_split_there_is_no_section(
    tmp_path: Path,
) -> None:
    page = written(tmp_path / "calm", told(0, 0, 0, 0))
    assert rows(page) == [["0", "6,000", "0", "0"]] and "Samples missed" not in page
    assert "<h2>Epochs</h2>" not in written(tmp_path / "none")
    assert report_json(tmp_path / "none")["epochs"] == []
