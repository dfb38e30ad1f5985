"""The report's section on selections."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.report import build_report
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace


def written(folder: Path, selections: bool) -> str:
    with TraceWriter(folder / peer_file(trace.CREW)) as crew:
        run = trace.Run(t=0.0, world="live", name="run", seed=1, peers=2, method="gather", config={})
        crew.write(run)
    for peer in range(2):
        with TraceWriter(folder / peer_file(peer)) as writer:
            writer.write(trace.Join(t=0.1, peer=peer))
            for at in range(3 if selections else 0):
                writer.write(
                    trace.Sparse(
                        t=1.0 + at,
                        peer=peer,
                        round=at,
                        entries=490,
                        density=0.001,
                        bytes=2176,
                        dense_bytes=2_002_176,
                        captured=0.25,
                        residual_norm=1.5,
                        committed=2,
                        restored=1,
                        late=4,
                    )
                )
    return build_report(folder).read_text(encoding="utf-8")


def test_what_was_selected_saved_and_given_back_is_shown(tmp_path: Path) -> None:
    page = written(tmp_path, selections=True)
    assert "<h2>Selections</h2>" in page
    for shown in ("sent whole", "0.100%", "6 MB", "1.5", ">12<"):
        assert shown in page, shown


def test_without_selections_there_is_no_section(tmp_path: Path) -> None:
    assert "<h2>Selections</h2>" not in written(tmp_path, selections=False)
