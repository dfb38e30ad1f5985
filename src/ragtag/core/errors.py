"""Errors that more than one room raises."""

from __future__ import annotations


class Error(Exception):
    """What Ragtag says went wrong: the root of all errors of its own that a script or a command may meet.

    Each keeps a built-in base beside it (ValueError, RuntimeError, OSError, ...). Arguments that cannot be
    are plain TypeErrors and ValueErrors, as everywhere in Python.
    """


class HasLeft(Error, RuntimeError):
    """This peer has left its crew, and is asked to train with it all the same."""

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked}: this peer has left the crew. Leave after the last step; to train on alone, use the "
            "plain optimizer (optimizer.inner) and the plain loader; or ragtag.join() again"
        )


class NotFinite(Error, FloatingPointError):
    """NaN or infinity in what is to be sent; the message says where: the first tensor, or the first entry."""
