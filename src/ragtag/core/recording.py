"""What a machine was told, and when: enough to tell a fresh machine the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ragtag.core.types import Arrived, Average, Begin, Event, Offer, Publish, Run

_ENTRY_BYTES = 256  # the objects around one event or run, roughly


class RecordingFull(RuntimeError):
    """A recording has reached its limit; what came after is not in it, so it cannot be replayed."""


@dataclass(slots=True)
class Recording:
    """The events that one machine was given, in order, as ``(now_s, event)``.

    What arrived and what was asked to be averaged is copied: a receiver reuses its buffers, and a
    trainer its values. bytes_max: limit on the copies and the objects around them.
    """

    bytes_max: int = 256 << 20
    size_bytes: int = 0
    entries: list[tuple[float, Event]] = field(default_factory=list)

    def add(self, now_s: float, event: Event) -> None:
        """Keep an event.

        Raises:
            RecordingFull: it does not fit. Record fewer rounds, or raise ``bytes_max``.
        """
        size = _ENTRY_BYTES
        if isinstance(event, Arrived):
            size += sum(_ENTRY_BYTES + _run_bytes(run) for run in event.runs)
        elif isinstance(event, Average | Begin):
            size += event.values.nbytes
        elif isinstance(event, Offer):
            size += event.rows.nbytes
        elif isinstance(event, Publish):
            size += sum(rows.nbytes for rows in event.rows.values())
        if self.size_bytes + size > self.bytes_max:
            raise RecordingFull(
                f"a recording of {len(self.entries)} events and {self.size_bytes} bytes has no room for "
                f"{size} bytes more; record fewer rounds or raise bytes_max, now {self.bytes_max}"
            )
        self.size_bytes += size
        self.entries.append((now_s, _copied(event)))

    def __iter__(self) -> Iterator[tuple[float, Event]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _run_bytes(run: Run) -> int:
    arrays = run.payload.nbytes + run.weight.nbytes + run.heard.nbytes
    return arrays + (0 if run.mask is None else run.mask.nbytes)


def _copied(event: Event) -> Event:
    if isinstance(event, Arrived):
        return Arrived(tuple(_copied_run(run) for run in event.runs))
    if isinstance(event, Average | Begin):
        return replace(event, values=event.values.copy())
    if isinstance(event, Offer):
        return replace(event, rows=event.rows.copy())
    return event


def _copied_run(run: Run) -> Run:
    mask = None if run.mask is None else run.mask.copy()
    return replace(
        run,
        payload=run.payload.copy(),
        weight=run.weight.copy(),
        heard=run.heard.copy(),
        mask=mask,
    )
