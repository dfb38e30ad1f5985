"""A console that no run depends on: its file may be on a full disk, its reader may have gone."""

from __future__ import annotations

import io
import os
import time
from contextlib import suppress
from typing import Any

from rich.console import Console

from ragtag.app.disk import advice

RETRY_S = 1.0
"""How long nothing is printed after an error."""


class SparedConsole(Console):
    """A console whose errors of the file system cost what was to be printed, and nothing else.

    Printing is tried again every ``RETRY_S``; once it works, a line says how many prints were lost, and why.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if isinstance(self.file, io.TextIOWrapper):  # one character less, and no error, where it has no such
            self.file.reconfigure(errors="replace")
        self.lost, self._why, self._again_s = 0, "", 0.0

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, or count as lost."""
        if time.monotonic() < self._again_s:
            self.lost += 1
            return
        self.quiet = False
        try:
            if self.lost:
                lost = f"ragtag: {self.lost} lines could not be printed here ({self._why})"
                super().print(lost, style="dim", soft_wrap=True, markup=False)
                self.lost = 0
            super().print(*objects, **options)
        except OSError as error:
            self.lost += 1
            self.quiet = True  # else what was not printed would be kept, and grow
            self._why, self._again_s = advice(error, "it"), time.monotonic() + RETRY_S

    def on_broken_pipe(self) -> None:
        """Rich would end the program; the error that it is handling goes to ``print``."""
        raise

    def close(self) -> None:
        """Give up what is left. Python would try once more at its end, and exit with 120."""
        try:
            self.file.flush()
        except OSError:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.file.fileno())
                os.close(nowhere)
