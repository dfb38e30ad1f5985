"""The top-k recipe's images and text: those that every machine has, or those that ``--data`` names."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ragtag.recipes.tasks.cifar import unpacked
from ragtag.recipes.tasks.images import Task, cifar, digits
from ragtag.recipes.tasks.sources import sources
from ragtag.recipes.tasks.texts import describe_text, load_text, text_task

IMAGES, LSTM, TRANSFORMER = "images", "LSTM", "transformer"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where data come from.

    arrays: the folder of CIFAR-10's arrays; ``None``: digits.
    text: a file; ``None``: library source.
    """

    arrays: Path | None = None
    text: Path | None = None

    @property
    def names(self) -> dict[str, str]:
        """The names of the images and the text."""
        return {
            "images": "digits" if self.arrays is None else "CIFAR-10",
            "text": describe_text(self.text),
        }

    def load(self, task: str) -> Task:
        """A task by its name. A process that runs several jobs reads it once."""
        return _load(self, task)


@lru_cache(maxsize=4)
def _load(found: Sources, task: str) -> Task:
    if task == IMAGES:
        return digits() if found.arrays is None else cifar(found.arrays)
    return text_task(task, found.text)


@contextlib.contextmanager
def prepared(data: Path | None, out: Path) -> Iterator[Sources]:
    """The data that ``--data`` names, ready in ``out`` until the context ends.

    Raises:
        FileNotFoundError, ValueError: see ``sources.sources``, or the text is too short.
    """
    archive, text = sources(data)
    if text is not None:
        load_text(text)  # refused before anything runs
    with contextlib.ExitStack() as undo:
        if archive is None:
            yield Sources(None, text)
            return
        out.mkdir(parents=True, exist_ok=True)
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=out, prefix=".data-")))
        yield Sources(undo.enter_context(unpacked(archive, folder)), text)
