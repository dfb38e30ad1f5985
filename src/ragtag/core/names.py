"""Things that a text names, as a script or a command line has it: ``"rps"``, ``"moshpit=4"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Named(NamedTuple, Generic[T_co]):
    """How a name's thing is made.

    number: the argument that a number after ``=`` is (empty: it takes none).
    needed: it has no default.
    """

    make: Callable[..., T_co]
    number: str = ""
    needed: bool = False


def named(text: str, table: Mapping[str, Named[T]], what: str) -> T:
    """What a text names. what: the kind of thing, for errors.

    Raises ValueError: nothing of that name, a number where none belongs, or none where one does.
    """
    name, equals, number = text.partition("=")
    if name not in table:
        raise ValueError(f"no {what} is called {text!r}; there are {', '.join(table)}")
    entry = table[name]
    if not equals and not entry.needed:
        return entry.make()
    if not entry.number:
        raise ValueError(f"{text!r}: {name} takes no number; write {name!r}")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{text!r}: after {name}= stands a whole number, as {name}=2")
    return entry.make(**{entry.number: int(number)})
