"""The live view knows who is up, fits its screen, and follows the files of a run."""

from __future__ import annotations

import heapq
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from ragtag.app.dashboard import UNWRITTEN_LOOKS, Dashboard, watch
from ragtag.app.peers import Peers
from ragtag.app.tracefile import CREW_FILE, Follower, TraceWriter, peer_file
from ragtag.core import trace
from tests.app.synthetic import Story, crew_records, peer_records, write_run

STORY = Story(rounds=100, round_s=0.5)


def in_time(story: Story) -> list[trace.Record]:
    parts = [list(crew_records(story)), *(list(peer_records(story, p)) for p in range(story.peers))]
    return list(heapq.merge(*(sorted(part, key=lambda r: r.t) for part in parts), key=lambda r: r.t))


def fed(story: Story, until_t: float = math.inf) -> Dashboard:
    dashboard = Dashboard(0)
    for record in in_time(story):
        if record.t > until_t:
            break
        dashboard.feed(record)
    return dashboard


def shown(dashboard: Dashboard, width: int, height: int = 30) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=False).print(dashboard.render())
    return out.getvalue()


def states(peers: Peers) -> list[str]:
    return [peers.state(peer) for peer in peers.rows]


def step(t: float, peer: int, n: int = 1, loss: float = 1.0) -> trace.Step:
    return trace.Step(t=t, peer=peer, step=n, samples=8 * n, loss=loss)


# -- States


def test_a_run_from_its_start_to_its_end() -> None:
    frozen, killed = STORY.at(STORY.freeze_at), STORY.at(STORY.kill_at)
    thaws = STORY.at(STORY.freeze_at + STORY.freeze_for)
    assert states(fed(STORY, 0.3).peers) == ["waiting"] * 6
    assert states(fed(STORY, frozen - 0.1).peers) == ["training"] * 6
    assert fed(STORY, frozen + 1).peers.state(2) == "frozen"
    assert states(fed(STORY, thaws + 2).peers) == ["training"] * 6
    assert fed(STORY, killed + 1).peers.state(4) == "gone"
    end = fed(STORY)
    assert states(end.peers) == ["done"] * 4 + ["gone", "done"]
    assert end.over and end.peers.progress == 1.0
    said = [text for _, text in end.peers.events]
    assert said[:4] == ["loss: 10% of datagrams", "peer 2 is frozen", "peer 2 is back", "peer 4 is gone"]


def test_what_a_row_holds() -> None:
    end = fed(STORY).peers
    records = [r for r in in_time(STORY) if isinstance(r, trace.Round)]
    assert [end.rows[p].missed for p in range(6)] == [sum(p in r.missed for r in records) for p in range(6)]
    assert end.rows[0].step == STORY.rounds * STORY.steps_per_round
    assert end.rows[0].round == STORY.rounds - 1
    assert end.rows[0].sent == STORY.rounds * 650_000


def test_most_of_the_others_must_find_a_peer_silent() -> None:
    peers = Peers(5)
    for peer in range(5):
        peers.feed(trace.Join(t=0.0, peer=peer))
    peers.feed(trace.Note(t=1.0, peer=0, what="silent", other=3))
    assert peers.state(3) == "training"
    peers.feed(trace.Note(t=1.1, peer=1, what="silent", other=3))
    assert peers.state(3) == "silent"
    peers.feed(trace.Note(t=2.0, peer=0, what="heard again", other=3))
    assert peers.state(3) == "training"
    assert [text for _, text in peers.events] == ["peer 3 is silent", "peer 3 is back"]


def test_a_freeze_without_an_end_ends_when_the_peer_is_heard() -> None:
    peers = Peers(2)
    peers.feed(trace.Join(t=0.0, peer=1))
    peers.feed(trace.Fault(t=1.0, peer=1, name="freeze"))
    peers.feed(step(50.0, 0))
    assert peers.state(1) == "frozen"
    peers.feed(trace.Note(t=51.0, peer=0, what="heard again", other=1))
    assert peers.state(1) == "training"


def test_a_peer_that_fails_is_told_once_and_ends() -> None:
    peers = Peers(2)
    peers.feed(step(1.0, 0))
    peers.feed(step(1.0, 1))
    peers.feed(trace.Error(t=2.0, peer=1, what="ValueError: no"))
    peers.feed(trace.Leave(t=2.1, peer=1))
    peers.feed(trace.Error(t=2.2, peer=1, what="ValueError: no", detail="Traceback"))
    assert peers.state(1) == "failed" and not peers.over
    assert [text for _, text in peers.events] == ["peer 1: ValueError: no"]
    peers.feed(trace.Leave(t=9.0, peer=0))
    assert peers.over


def test_a_peer_that_leaves_with_an_error_has_failed_and_the_error_is_told_when_it_comes() -> None:
    peers = Peers(2)
    peers.feed(step(1.0, 1))
    peers.feed(trace.Leave(t=2.0, peer=1, failed=True))
    peers.feed(trace.Note(t=2.0, peer=0, what="left", other=1))
    assert peers.state(1) == "failed"
    peers.feed(trace.Error(t=2.2, peer=1, what="ValueError: no"))
    assert [text for _, text in peers.events] == ["peer 1: ValueError: no"]
    peers.feed(trace.Leave(t=9.0, peer=0))
    assert peers.over


def test_a_peer_that_leaves_is_told_of_once() -> None:
    peers = Peers(3)
    for peer in range(3):
        peers.feed(step(1.0, peer))
    for told_by in (1, 2):
        peers.feed(trace.Note(t=2.0, peer=told_by, what="left", other=0))
    assert peers.state(0) == "gone"
    peers.feed(trace.Leave(t=2.1, peer=0))
    peers.feed(trace.Leave(t=2.2, peer=1))
    peers.feed(trace.Note(t=2.3, peer=2, what="left", other=1))
    assert (peers.state(0), peers.state(1)) == ("done", "done")
    assert [text for _, text in peers.events] == ["peer 0 has left", "peer 1 is done"]


def test_a_peer_that_goes_on_after_an_error_has_not_failed() -> None:
    peers = Peers(1)
    peers.feed(trace.Error(t=2.0, peer=0, what="a warning, as it turned out"))
    peers.feed(step(1.9, 0))  # from before, read later
    assert peers.state(0) == "failed"
    peers.feed(step(2.5, 0))
    assert peers.state(0) == "training"


def test_a_killed_peer_may_join_again() -> None:
    peers = Peers(1)
    peers.feed(step(0.0, 0))
    peers.feed(trace.Fault(t=1.0, peer=0, name="kill"))
    assert peers.state(0) == "gone" and peers.over
    peers.feed(trace.Join(t=2.0, peer=0))
    assert peers.state(0) == "training" and not peers.over


def test_progress_by_steps_by_time_and_unknown() -> None:
    def run(**planned: float) -> Peers:
        peers = Peers(0)
        record = trace.Run(t=0.0, world="live", name="x", seed=0, peers=2, method="rps", **planned)  # type: ignore[arg-type]
        peers.feed(record)
        peers.feed(step(5.0, 0, 30))
        peers.feed(step(5.0, 1, 10))
        return peers

    assert run(steps_planned=100).progress == pytest.approx(0.2)
    assert run(planned_s=20.0).progress == pytest.approx(0.25)
    assert run().progress is None


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


def test_a_follower_takes_whole_lines_and_new_files(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.poll() == []
    line = trace.encode(step(1.0, 0))
    path = tmp_path / peer_file(0)
    path.write_bytes(line + line[:10])
    assert follower.poll() == [step(1.0, 0)]
    assert follower.poll() == []
    with path.open("ab") as file:
        file.write(line[10:] + b"damage\n")
    (tmp_path / CREW_FILE).write_bytes(trace.encode(trace.Fault(t=0.5, name="loss")))
    assert follower.poll() == [trace.Fault(t=0.5, name="loss"), step(1.0, 0)]
    assert follower.damage.lines == {peer_file(0): 1}


def test_a_follower_reads_a_large_file_in_parts(tmp_path: Path) -> None:
    line = trace.encode(step(1.0, 0))
    (tmp_path / peer_file(0)).write_bytes(line * 20_000)
    follower = Follower(tmp_path)
    sizes = []
    while records := follower.poll(blocks_max=1):
        sizes.append(len(records))
    assert sum(sizes) == 20_000 and len(sizes) > 3
