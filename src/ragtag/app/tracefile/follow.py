"""Reading a trace while it is written."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.tracefile.alive import is_written
from ragtag.app.tracefile.damage import Damage
from ragtag.app.tracefile.lines import LineReader
from ragtag.app.tracefile.names import trace_files
from ragtag.app.tracefile.read import decoded, time_of
from ragtag.core import trace


class Follower:
    """Follows a run's trace files as they grow; files that come later are found too."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.damage = Damage()
        self._readers: dict[Path, LineReader] = {}
        self._decoder = trace.Decoder()

    def is_written(self) -> bool | None:
        """Whether any process writes the trace; ``None``: there is none, or the file system cannot tell."""
        found = [is_written(path) for path in trace_files(self.folder)]
        if any(found):
            return True
        return None if None in found or not found else False

    def poll(self, blocks_max: int = 4) -> list[trace.Record]:
        """The records that have come, in time order; at most ``blocks_max`` blocks of each file at a time.

        Call again at once while it returns anything: an empty list means that nothing more is there now.
        """
        records: list[trace.Record] = []
        for path in trace_files(self.folder):
            reader = self._readers.setdefault(path, LineReader(path))
            for _ in range(blocks_max):
                lines = reader.read()
                if lines is None:
                    break
                records += decoded(lines, path.name, self._decoder, self.damage)
        self.damage.unknown_kinds, self.damage.extra_fields = (
            self._decoder.unknown_kinds,
            self._decoder.extra_fields,
        )
        return sorted(records, key=time_of)
