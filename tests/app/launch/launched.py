"""Launches scripts, and gathers what is told of them."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.launch import launch
from ragtag.app.launch.events import Ended, Event, LaunchResult, Printed

SRC = Path(__file__).parents[3] / "src"
PATIENCE_S = 30.0


JOIN = """
import os, sys, time
me, n = int(os.environ["RAGTAG_RANK"]), int(os.environ["RAGTAG_SIZE"])
def tell(*words):
    os.write(int(os.environ["RAGTAG_READY_FD"]), (" ".join([str(me), *map(str, words)]) + chr(10)).encode())
def join():
    tell("joined", me)
    tell("ready")
def average():
    join()
    tell("averaged")
"""


def run(script: Path, text: str, n: int, **options: object) -> tuple[LaunchResult, list[Event]]:
    script.write_text(JOIN + text)
    events: list[Event] = []
    result = launch(n, [str(script)], on_event=events.append, **options)  # type: ignore[arg-type]
    return result, events


def lines(events: list[Event], peer: int, error: bool = False) -> list[str]:
    return [e.text for e in events if isinstance(e, Printed) and e.peer == peer and e.error == error]


def ends(events: list[Event]) -> list[Ended]:
    return [e for e in events if isinstance(e, Ended)]
