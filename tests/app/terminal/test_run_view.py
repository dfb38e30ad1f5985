"""What ``ragtag run`` prints: lines are broken between words, and the end tells of who came to it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from ragtag.app.launch.events import Ended, Printed, Remark
from ragtag.app.terminal.run_view import RunView, models, print_wrapped
from ragtag.app.tracefile import TraceWriter, crews, peer_file
from ragtag.core import trace

LONG = "an epoch is 134 steps of each peer, where one alone takes about 402: raise the rate, or train on"
PATH = "/a/folder" * 12


def printed(text: str, width: int = 80, terminal: bool = True) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False)
    print_wrapped(console, Text(text), Text("[12] "))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_line_is_broken_between_words_below_its_prefix(width: int) -> None:
    lines = printed(LONG, width)
    assert lines[0].startswith("[12] an epoch") and all(line.startswith("     ") for line in lines[1:])
    assert " ".join(line[5:].strip() for line in lines) == LONG
    assert max(map(len, lines)) <= width and len(lines) > 1


def test_a_path_is_left_whole_and_so_is_everything_without_a_terminal() -> None:
    assert any(PATH in line for line in printed(f"{LONG} {PATH} {LONG}"))
    assert printed(LONG, terminal=False) == [f"[12] {LONG}"]


def test_indents_of_what_a_script_prints_are_kept() -> None:
    assert printed("    x = 1") == ["[12]     x = 1"]


@pytest.mark.parametrize("watched", [True, False])
def test_a_loss_that_the_table_tells_of_is_no_line_beside_it(watched: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    view = RunView(console, console, watched, "continue")
    view.show(Ended(1, -9, "itself"))
    view.show(Remark("x"))
    view.show(Printed(1, "y", error=False))
    lost = [line for line in out.getvalue().splitlines() if "lost" in line]
    assert len(lost) == (0 if watched else 1) and len(out.getvalue().splitlines()) == len(lost) + 2


def test_of_several_crews_the_last_ones_models_are_told_of(tmp_path: Path) -> None:
    for folder, digest in (
        (tmp_path, "aa" * 16),
        (tmp_path / "crew-2", "bb" * 16),
        (tmp_path / "crew-10", "cc" * 16),
    ):
        folder.mkdir(exist_ok=True)
        for peer in range(2):
            with TraceWriter(folder / peer_file(peer)) as writer:
                writer.write(trace.Leave(t=1.0, peer=peer, digest=digest, round=1))
    (tmp_path / "crew-11").mkdir()  # nobody has come to it
    (tmp_path / "crew-x").mkdir()
    assert [path.name for path in crews(tmp_path)[1:]] == ["crew-2", "crew-10"]
    assert models(tmp_path) == "2 peers hold the same model (cccccccccccc)"
