"""Things that a text names, as a script or a command line has it: ``"rps"``, ``"moshpit=4"``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Named(NamedTuple, Generic[T_co]):
    """How a name's thing is made.

    number: the argument that a number after ``=`` is (empty: it takes none); where there are several, they
        stand as their numbers do, ``low/high``. One whose name ends in ``_s`` is of seconds, the others are
        whole.
    needed: it has no default.
    """

    make: Callable[..., T_co]
    number: str = ""
    needed: bool = False

    @property
    def takes(self) -> Sequence[str]:
        """The arguments that numbers after ``=`` are, in their order."""
        return self.number.split("/") if self.number else ()


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
    if not entry.takes:
        raise ValueError(f"{text!r}: {name} takes no number; write {name!r}")
    given = number.split("/")
    kinds = [_SECONDS if argument.endswith("_s") else _WHOLE for argument in entry.takes]
    if len(given) != len(kinds) or not all(map(_Kind.reads, kinds, given)):
        stand = " and ".join(kind.what for kind in kinds)
        example = "/".join(kind.example(at) for at, kind in enumerate(kinds, 1))
        of = f" ({entry.number})" if len(kinds) > 1 else ""
        raise ValueError(f"{text!r}: after {name}= stands {stand}{of}, as {name}={example}")
    return entry.make(**{a: k.value(g) for a, k, g in zip(entry.takes, kinds, given, strict=True)})


class _Kind(NamedTuple):
    """What a number of a text is."""

    what: str
    form: re.Pattern[str]
    value: Callable[[str], float]
    example: Callable[[int], str]

    def reads(self, text: str) -> bool:
        return self.form.fullmatch(text) is not None


_WHOLE = _Kind("a whole number", re.compile("[0-9]+"), int, lambda at: str(2 * at))
_SECONDS = _Kind("a number of seconds", re.compile(r"[0-9]+(\.[0-9]+)?|\.[0-9]+"), float, lambda at: "0.5")
