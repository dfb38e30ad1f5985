"""Reading a trace while it is written."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.tracefile.alive import is_written
from ragtag.app.tracefile.damage import Damage
from ragtag.app.tracefile.lines import LineReader
from ragtag.app.tracefile.names import CREW_FILE, crews, trace_files
from ragtag.app.tracefile.read import decoded, time_of
from ragtag.core import trace


class Follower:
    """Follows a run's trace files as they grow; files that come later are found too.

    Where its peers form several crews, one after the other, it follows one of them, at first the first, and
    what the launcher writes.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._crew = self.folder
        self.damage = Damage()
        self._readers: dict[Path, LineReader] = {}
        self._decoder = trace.Decoder()

    def next_crew(self) -> str | None:
        """Go on to the newest crew; its name, or ``None``: there is no newer one than is followed already."""
        newest = crews(self.folder)[-1]
        if newest == self._crew:
            return None
        self._crew = newest
        return newest.name

    def _files(self) -> list[Path]:
        files = trace_files(self._crew)
        launcher = self.folder / CREW_FILE
        return files if self._crew == self.folder or not launcher.exists() else [launcher, *files]

    def is_written(self) -> bool | None:
        """Whether any process writes the trace; ``None``: there is none, or the file system cannot tell."""
        found = [is_written(path) for path in self._files()]
        if any(found):
            return True
        return None if None in found or not found else False

    def poll(self, blocks_max: int = 4) -> list[trace.Record]:
        """The records that have come, in time order; at most ``blocks_max`` blocks of each file at a time.

        Call again at once while it returns anything: an empty list means that nothing more is there now.
        """
        records: list[trace.Record] = []
        for path in self._files():
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
