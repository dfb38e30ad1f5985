"""The live view fits its screen, and follows the files of a run to its end."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from ragtag.app.dashboard import UNWRITTEN_LOOKS, Dashboard, watch
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file
from ragtag.core import trace
from tests.app.synthetic import Story, write_run
from tests.app.watching import fed, in_time, shown, states, step

STORY = Story(rounds=100, round_s=0.5)


# -- The screen


@pytest.mark.parametrize("width", [80, 111, 112, 120])
def test_everything_fits(width: int) -> None:
    for until_t in (0.0, 5.0, 20.0, 35.0, math.inf):
        text = shown(fed(STORY, until_t), width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        table = [line for line in text.splitlines()[2:] if line[:4].strip(" #").isdigit()]
        assert len(table) >= 6 or until_t == 0.0
        assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(table)


def test_long_figures_fit_in_eighty_columns() -> None:
    dashboard = Dashboard(64, "x" * 200)
    for peer in (0, 63):
        dashboard.feed(step(1.0, peer, 123_456, loss=123.4567))
        dashboard.feed(trace.Eval(t=1.0, peer=peer, model="own", step=1, accuracy=1.0))
        round_ = trace.Round(
            t=7000.0,
            peer=peer,
            round=123_456,
            scatter_s=0.1,
            gather_s=0.1,
            total_s=0.0999,
            arrived=1.0,
            missed=[1 - peer % 2],
            bytes_sent=123_456_789_012,
        )
        for _ in range(1200):
            dashboard.feed(round_)
    lines = shown(dashboard, 80, 100).splitlines()
    row = next(line for line in lines if line.strip().startswith("63 "))
    assert len(row) <= 80
    for figure in ("123,456", "100.0%", "99.9 ms", "123 GB", "123.457"):
        assert figure in row


def test_of_a_crowd_those_in_trouble_are_shown() -> None:
    dashboard = Dashboard(64)
    for peer in range(64):
        dashboard.feed(step(1.0, peer))
    dashboard.feed(trace.Fault(t=2.0, peer=60, name="kill"))
    dashboard.feed(trace.Fault(t=2.0, peer=61, name="freeze", until_t=9.0))
    lines = shown(dashboard, 80, 24).splitlines()
    assert len(lines) <= 24
    assert any("60" in line and "gone" in line for line in lines)
    assert any("61" in line and "frozen" in line for line in lines)
    assert any("more" in line for line in lines)


def test_a_trace_does_not_steer_the_terminal_or_its_markup() -> None:
    dashboard = Dashboard(2)
    evil = "\x1b[2J\x07[bold red]boo[/]\r\n"
    dashboard.feed(trace.Run(t=0.0, world="live", name=evil, seed=0, peers=2, method=evil))
    dashboard.feed(trace.Error(t=1.0, peer=0, what=evil))
    dashboard.feed(trace.Note(t=1.0, peer=0, what=evil, detail=evil))
    text = shown(dashboard, 120)
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text
    assert "[bold red]boo[/]" in text


def test_a_loss_that_is_not_finite_is_seen() -> None:
    dashboard = Dashboard(1)
    dashboard.feed(trace.Step(t=0.0, peer=0, step=1, samples=8, loss=None))
    assert "nan" in shown(dashboard, 80)


# -- Following files


class Writing:
    """Writes a run bit by bit, each time the view waits."""

    def __init__(self, folder: Path, story: Story, bits: int = 20) -> None:
        self.records, self.bits, self.at = in_time(story), bits, 0
        self.folder = folder
        self.writers: dict[int, TraceWriter] = {}

    def __call__(self, seconds: float) -> None:
        assert seconds > 0
        assert self.at < len(self.records), "the view waits after the end of the run"
        until = min(len(self.records), self.at + -(-len(self.records) // self.bits))
        for record in self.records[self.at : until]:
            peer = -1 if isinstance(record, trace.Fault) else record.peer
            writer = self.writers.get(peer)
            if writer is None:
                writer = self.writers[peer] = TraceWriter(self.folder / peer_file(peer))
            writer.write(record)
        self.at = until
        if until == len(self.records):
            for writer in self.writers.values():
                writer.close()


def test_watch_follows_a_run_to_its_end_without_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    story = Story(rounds=100, round_s=0.5)
    last = watch(tmp_path, console=Console(file=out, width=80), wait=Writing(tmp_path, story))
    assert states(last.peers) == states(fed(story).peers)
    lines = out.getvalue().splitlines()
    assert any("peer 2 is frozen" in line for line in lines)
    assert any("peer 4 is gone" in line for line in lines)
    figures = [line for line in lines if "training" in line and "loss" in line]
    assert 5 <= len(figures) <= 12  # a line every five seconds of fifty
    assert lines[-1].split()[-2] == "arrived" and "5 done, 1 gone" in lines[-1]
    assert lines.count(lines[-1]) == 1
    assert "\x1b" not in out.getvalue()


def test_watch_redraws_a_table_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, height=30, force_terminal=True)
    watch(tmp_path, console=console, wait=Writing(tmp_path, Story(rounds=40)))
    assert out.getvalue().count("Round time") >= 10
    assert "\x1b[" in out.getvalue()


def test_watch_ends_when_it_is_told_and_shows_what_was_written_before(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=40, finished=False))
    out = io.StringIO()
    last = watch(tmp_path, lambda: True, console=Console(file=out, width=80))
    assert not last.over and last.peers.rows[0].round == 39
    assert "5 training, 1 gone" in out.getvalue().splitlines()[-1]


def test_watch_ends_where_nobody_writes_and_says_who_had_not_ended(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=20, finished=False))
    out, waits = io.StringIO(), []
    last = watch(tmp_path, console=Console(file=out, width=80), wait=waits.append)
    assert last.abandoned and len(waits) == UNWRITTEN_LOOKS - 1
    said = " ".join(out.getvalue().split())
    assert "any more, and peer 0, 1, 2, 3, 5 had not ended; was it killed?" in said
    assert "5 training, 1 gone" in said


def test_watch_waits_as_long_as_one_writer_lives_even_a_stopped_one(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=20, finished=False))
    writer = TraceWriter(tmp_path / peer_file(3))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 50:
            writer.close()

    assert watch(tmp_path, console=Console(file=io.StringIO()), wait=wait).abandoned
    assert len(waits) == 50 + UNWRITTEN_LOOKS - 1


def test_watch_ends_with_the_launcher_whatever_the_peers_say(tmp_path: Path) -> None:
    story = Story(rounds=20, finished=False)
    write_run(tmp_path, story)
    with TraceWriter(tmp_path / CREW_FILE) as writer:
        writer.write(trace.Leave(t=story.until_t))
        last = watch(tmp_path, console=Console(file=io.StringIO()), wait=pytest.fail)
    assert last.peers.ended and not last.over and not last.abandoned


def test_watch_waits_for_the_last_error_while_the_launcher_lives(tmp_path: Path) -> None:
    write_run(tmp_path, Story(rounds=20, killed=None))
    crew = TraceWriter(tmp_path / CREW_FILE)

    def wait(seconds: float) -> None:
        crew.write(trace.Error(t=99.0, peer=1, what="ValueError: at the very end"))
        crew.write(trace.Leave(t=99.1))

    out = io.StringIO()
    last = watch(tmp_path, console=Console(file=out), wait=wait)
    crew.close()
    assert last.over and last.peers.state(1) == "failed"
    assert "at the very end" in out.getvalue()


def test_watch_says_that_it_waits_for_a_trace(tmp_path: Path) -> None:
    out = io.StringIO()
    story = Story(rounds=20)
    last = watch(tmp_path, console=Console(file=out, width=80), wait=Writing(tmp_path, story))
    assert "waiting for a run to write one there" in " ".join(out.getvalue().split())
    assert last.over and not last.abandoned


def test_watch_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        watch(tmp_path / "nowhere")
