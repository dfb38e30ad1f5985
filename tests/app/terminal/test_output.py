"""What peers print: bounded lines, and tracebacks that are shown once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragtag.app.terminal.output import (
    HELD_LINES_MAX,
    HOLD_S,
    Lines,
    SeenErrors,
    Tracebacks,
    interrupted,
    last_line,
)

TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: no", "more: below"]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_do_not_depend_on_how_the_bytes_come(parts: list[bytes]) -> None:
    whole = Lines(bytes_max=1000)
    pieces = Lines(bytes_max=1000)
    data = b"".join(parts).replace(b"\r", b"")
    once = whole.feed(data) + whole.close()
    assert [x for part in parts for x in pieces.feed(part.replace(b"\r", b""))] + pieces.close() == once


def test_a_line_that_overwrites_itself_comes_as_its_last_state() -> None:
    lines = Lines()
    assert lines.feed(b"  1 %\r 50 %\r") == []
    assert lines.feed(b"100 %\nnext\r") == ["100 %"]
    assert lines.feed(b"\nlast") == ["next"]
    assert lines.close() == ["last"]
    assert lines.close() == []


def test_a_line_without_end_is_cut_and_nothing_of_it_lost() -> None:
    lines = Lines(bytes_max=100)
    shown = [text for _ in range(10) for text in lines.feed(b"x" * 99)] + lines.close()
    assert "".join(shown) == "x" * 990
    assert max(map(len, shown)) == 100


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert Lines().feed(b"\xff\xfe\n") == ["\ufffd\ufffd"]


def test_a_traceback_is_held_back_and_is_the_peers_last_words() -> None:
    tracebacks = Tracebacks()
    assert tracebacks.feed(["before", *TRACEBACK], now_s=10.0) == ["before"]
    assert tracebacks.due(10.0 + HOLD_S - 0.01) == []
    assert tracebacks.take() == "\n".join(TRACEBACK)
    assert tracebacks.take() == ""


def test_the_error_of_a_script_that_is_no_python_is_one_too() -> None:
    error = ['  File "/a b/train.py", line 2', "    crew = ragtag.join(", "SyntaxError: '(' was never closed"]
    tracebacks = Tracebacks()
    assert tracebacks.feed([*error, ""], now_s=10.0) == []
    assert last_line(tracebacks.take()) == error[-1]
    segfault = ["Current thread (most recent call first):", '  File "/a/train.py", line 2 in <module>']
    assert tracebacks.feed(segfault, now_s=10.0) == segfault


def test_an_interrupt_amid_the_end_of_python_is_one_with_where_it_came() -> None:
    where = "Exception ignored in atexit callback: <function f at 0x7f00>:"
    tracebacks = Tracebacks()
    assert tracebacks.feed(["before", where, TRACEBACK[0], "KeyboardInterrupt: "], now_s=10.0) == ["before"]
    assert interrupted(tracebacks.take())
    assert tracebacks.feed(["Exception ignored in: <function A.__del__ at 0x7f00>"], now_s=20.0) == []


def test_a_traceback_that_a_peer_survives_is_passed_on() -> None:
    tracebacks = Tracebacks()
    assert tracebacks.feed(TRACEBACK, now_s=10.0) == []
    assert tracebacks.due(10.0 + HOLD_S) == TRACEBACK
    assert tracebacks.feed(["after"], 13.0) == ["after"]
    assert tracebacks.take() == ""
    assert tracebacks.passed_on == "\n".join(TRACEBACK)


def test_what_is_held_back_is_bounded() -> None:
    tracebacks = Tracebacks()
    endless = [TRACEBACK[0], *["  again"] * HELD_LINES_MAX]
    assert len(tracebacks.feed(endless, 0.0)) >= HELD_LINES_MAX
    assert len(tracebacks.held) < HELD_LINES_MAX


def test_an_error_is_the_same_whatever_its_objects_addresses() -> None:
    seen = SeenErrors()
    assert seen.same_as(3, "KeyError: <a object at 0x7f00>") is None
    assert seen.same_as(1, "KeyError: <a object at 0x7fff>") == 3
    assert seen.same_as(2, "KeyError: other") is None
    assert seen.same_as(4, "") is None
    assert seen.same_as(5, "") is None


def test_the_line_that_says_what_was_raised() -> None:
    assert last_line("\n".join(TRACEBACK[:3])) == "ValueError: no"
    assert last_line("\n".join(TRACEBACK[:3]) + "\n    a second line of the message\n") == "ValueError: no"
    assert last_line("") == ""
    assert interrupted("Traceback (most recent call last):\n  x\nKeyboardInterrupt")
    assert not interrupted("\n".join(TRACEBACK))
