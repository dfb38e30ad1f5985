"""A script in a process of its own, and the thread that follows it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ragtag.app.environment import Reached
from ragtag.app.on_ray import actor as module
from ragtag.app.on_ray.actor import News, Script
from ragtag.core.trace import LINE_BYTES_MAX

PATIENCE_S = 60.0


def followed(script: Script) -> News:
    """All news of a script until its end, as one."""
    whole, until_s = News(), time.monotonic() + PATIENCE_S
    while whole.end is None:
        assert time.monotonic() < until_s
        news = script.take(1.0)
        whole.lines += news.lines
        whole.dropped += news.dropped
        whole.trace += news.trace
        whole.told += news.told
        whole.end = news.end
    return whole


def started(tmp_path: Path, text: str, traced: bool = False, **place: str) -> Script:
    path = tmp_path / "script.py"
    path.write_text(text)
    return Script([str(path), "--flag"], place, (), traced)


def test_lines_arguments_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGTAG_KEY", "another crew's")
    monkeypatch.setenv("RAGTAG_RAY", "another crew's")
    text = (
        "import os, sys\n"
        "env = os.environ\n"
        "print(sys.argv[1], env['RAGTAG_RANK'], env.get('RAGTAG_KEY'), 'RAGTAG_RAY' in env)\n"
        "print('trouble', file=sys.stderr)\n"
    )
    news = followed(started(tmp_path, text, RAGTAG_RANK="3"))
    assert sorted(news.lines) == [("--flag 3 None False", False), ("trouble", True)]
    assert news.end is not None
    assert (news.end.status, news.end.held) == (0, "")


def test_a_traceback_is_the_end_and_no_line(tmp_path: Path) -> None:
    news = followed(started(tmp_path, "raise ValueError('no such thing')\n"))
    assert news.end is not None
    assert news.end.status == 1
    assert news.end.held.endswith("ValueError: no such thing")
    assert news.lines == []


def test_a_signal_ends_it(tmp_path: Path) -> None:
    script = started(tmp_path, "print('up')\nimport time\ntime.sleep(100)\n")
    until_s = time.monotonic() + PATIENCE_S
    while script.take(1.0).lines != [("up", False)]:
        assert time.monotonic() < until_s
    script.signal(signal.SIGKILL)
    news = followed(script)
    assert news.end is not None
    assert news.end.status == -signal.SIGKILL
    script.signal(signal.SIGKILL)  # too late: nobody else is hit


def test_that_it_has_joined_is_passed_on(tmp_path: Path) -> None:
    text = "import os\nos.write(int(os.environ['RAGTAG_READY_FD']), b'0 ready rps\\n0 averaged\\n')\n"
    told = [(each.reached, each.detail) for each in followed(started(tmp_path, text)).told]
    assert told == [(Reached.READY, "rps"), (Reached.AVERAGED, "")]


def test_whole_lines_of_its_trace_are_passed_on_and_the_folder_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRACE_BYTES_MAX", 64)
    text = (
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['RAGTAG_RUN'])\n"
        "(folder / 'peer-02.jsonl').write_text(''.join(f'line {i}\\n' for i in range(100)) + 'torn')\n"
        "(folder / 'other.txt').write_text('not a trace\\n')\n"
        "print(folder)\n"
    )
    news = followed(started(tmp_path, text, traced=True))
    assert {name for name, _ in news.trace} == {"peer-02.jsonl"}
    assert b"".join(data for _, data in news.trace) == b"".join(b"line %d\n" % i for i in range(100))
    assert all(len(data) <= 64 for _, data in news.trace)
    assert not Path(news.lines[0][0]).exists()


def test_lines_that_nobody_fetches_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINES_MAX", 10)
    script = started(tmp_path, "for i in range(1000): print(i)\n")
    until_s = time.monotonic() + PATIENCE_S
    while script._end is None:  # nobody takes
        assert time.monotonic() < until_s
        os.sched_yield()
    news = followed(script)
    assert [text for text, _ in news.lines] == [str(i) for i in range(990, 1000)]
    assert news.dropped == 990


def test_a_line_of_the_trace_may_be_as_long_as_lines_are(tmp_path: Path) -> None:
    text = (
        "import os, pathlib\n"
        f"line = '{{}}'.rjust({LINE_BYTES_MAX - 1}) + '\\n'\n"
        "(pathlib.Path(os.environ['RAGTAG_RUN']) / 'peer-00.jsonl').write_text(line + 'next\\n')\n"
    )
    news = followed(started(tmp_path, text, traced=True))
    assert b"".join(data for _, data in news.trace).split() == [b"{}", b"next"]


def test_what_it_told_just_before_its_end_is_passed_on(tmp_path: Path) -> None:
    """While the thread was at what it had printed."""
    text = (
        "import os\n"
        "print('.\\n' * 30_000, flush=True)\n"
        "os.write(int(os.environ['RAGTAG_READY_FD']), b'0 averaged\\n')\n"
        "os._exit(0)\n"
    )
    for _ in range(3):
        assert [each.reached for each in followed(started(tmp_path, text)).told] == [Reached.AVERAGED]
