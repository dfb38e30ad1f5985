"""The live view follows the files of a run to its end, whatever that is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ragtag.app.terminal.dashboard import UNWRITTEN_LOOKS, watch
from ragtag.app.tracefile import CREW_FILE, TraceWriter, peer_file
from ragtag.core import trace
from tests.app.synthetic import Story, write_run
from tests.app.terminal.watching import fed, in_time, states


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


def test_of_several_crews_one_after_the_other_the_newest_is_shown(tmp_path: Path) -> None:
    """A sweep: each script joins again after leaving, and its next crew's trace is in a folder of its own."""
    out, crews = io.StringIO(), iter((2, 3, 10))
    launcher = TraceWriter(tmp_path / CREW_FILE)
    launcher.write(trace.Run(t=0.0, world="live", name="sweep", seed=0, peers=2, method=""))

    def crew(folder: Path, t: float, loss: float) -> None:
        for peer in range(2):
            with TraceWriter(folder / peer_file(peer)) as writer:
                writer.write(trace.Join(t=t, peer=peer))
                writer.write(trace.Step(t=t + 1, peer=peer, step=5, samples=5, loss=loss))
                writer.write(trace.Leave(t=t + 2, peer=peer, steps=5))

    def wait(seconds: float) -> None:
        number = next(crews, None)
        if number is None:
            launcher.write(trace.Note(t=99.0, peer=-1, what="stopping", detail="SIGINT"))
            launcher.write(trace.Leave(t=99.5, peer=-1))
            return
        (folder := tmp_path / f"crew-{number}").mkdir()
        crew(folder, 10.0 * number, float(number))

    crew(tmp_path, 0.0, 1.0)
    console = Console(file=out, width=80, height=30, force_terminal=True)
    last = watch(tmp_path, console=console, wait=wait, title="sweep", begun=True)
    launcher.close()
    assert last.crew == "crew-10" and last.peers.ended and list(last.peers.rows[0].losses) == [10.0]
    said = out.getvalue()
    for name, loss in (("crew-1", 1), ("crew-2", 2), ("crew-3", 3)):
        assert said.count(f"{name}: ") == 1 and f"loss {loss}" in said
    assert "sweep, crew-10" in said and "no trace" not in said
    assert "stopping" in "".join(text for _, text in last.peers.events)  # the launcher's word still comes
