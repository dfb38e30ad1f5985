"""What of a trace could not be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

EXAMPLES_MAX = 20


@dataclass(slots=True)
class Damage:
    """What could not be read, and what a newer version has added.

    lines: damaged lines by file name; examples: the first of them, with line numbers; torn: files whose
    last line is cut short; dropped: notes of writers that met a full disk.
    """

    lines: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    extra_fields: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, reason: str) -> None:
        """One more damaged line in the file ``name``."""
        self.lines[name] += 1
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"{name}: {reason}"[:300])

    def messages(self) -> list[str]:
        """One sentence for each thing that was wrong; empty where the trace is whole."""
        said = [f"{name}: {n} damaged line(s) left out" for name, n in sorted(self.lines.items())]
        said += self.examples
        said += [f"{name}: the last line is cut short (the writer was ended)" for name in self.torn]
        newer = "written by a newer version of Ragtag"
        said += [f"{n} record(s) of unknown kind {kind!r}, {newer}" for kind, n in self.unknown_kinds.items()]
        said += [
            f"{n} record(s) with the unknown field {name}, {newer}" for name, n in self.extra_fields.items()
        ]
        return said
