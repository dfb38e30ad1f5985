"""What a script meets first: names, arguments, texts, and errors that say what to write."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ragtag
from ragtag.app.crew import Crew
from ragtag.protocols.method import Method
from ragtag.training.optimizer import CrewOptimizer

OF_THE_CREW = {"transport", "samples", "on_ready", "on_note", "channel", "seed"}
"""What a crew tells its optimizers by itself."""


# -- Names


def test_dir_shows_what_is_for_users_and_nothing_else() -> None:
    assert dir(ragtag) == sorted(ragtag.__all__)
    assert {"join", "RPS", "schedules"} <= set(dir(ragtag))


def test_names_are_shown_before_torch_is_imported() -> None:
    code = "import ragtag, sys; assert 'join' in dir(ragtag); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -- Arguments


def test_an_editor_sees_all_arguments_of_an_optimizer() -> None:
    own = inspect.signature(CrewOptimizer).parameters
    shown = inspect.signature(Crew.optimizer).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in shown.values())
    for_users = {name for name in own if name not in OF_THE_CREW} - {"inner", "method"}
    assert set(shown) - {"self", "optimizer", "averager"} == for_users
    for name in for_users:
        assert shown[name].annotation == own[name].annotation, name
        default, inner = shown[name].default, own[name].default
        assert default == getattr(inner, "name", inner), name
        assert f"{name}: " in inspect.getdoc(Crew.optimizer), name


# -- Texts


@pytest.mark.parametrize(
    ("averager", "text"),
    [
        (ragtag.RPS(), "RPS()"),
        (ragtag.RPS(repair=True), "RPS(repair=True)"),
        (ragtag.AllReduce(), "AllReduce()"),
        (ragtag.AllReduce(ring=True), "AllReduce(ring=True)"),
        (ragtag.Moshpit(group=8), "Moshpit(group=8)"),
        (ragtag.Moshpit(group=4, repair=False), "Moshpit(group=4, repair=False)"),
        (ragtag.RandomGroups(), "RandomGroups(group=8)"),
        (ragtag.Centre(ragtag.schedules.SoftSync(2)), "Centre(SoftSync(n=2, corrected=True))"),
        (ragtag.Centre(compensate=0.04), "Centre(Asynchronous(discard_from=None), compensate=0.04)"),
    ],
)
def test_an_averager_is_shown_as_it_is_written(averager: Method, text: str) -> None:
    assert repr(averager) == text
    found = eval(text, {**vars(ragtag.schedules), **{name: getattr(ragtag, name) for name in ragtag._HOMES}})
    assert found.name == averager.name
