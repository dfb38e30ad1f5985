"""Results of a recipe's parts, stored in a folder: a reproduction that was interrupted goes on there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import ragtag

PLAIN = (int, float, str, bool)


class ResultCache:
    """The parts in a folder, by call: function, arguments, and all of ragtag's source.

    Results are JSON, and come back as the type that the function is annotated to return. A path among the
    arguments stands for its contents, so the same data in another folder find the same parts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[Path, str] = {}

    @classmethod
    def of(cls, out: Path) -> ResultCache:
        """The cache of the recipe whose report goes to the folder ``out``."""
        return cls(out / "parts")

    def find(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether this call's result is there, and the result. Raises ValueError: its file makes no sense."""
        path = self._path(function, arguments)
        if not path.exists():
            return False, None
        try:
            return True, decode(_returned(function), json.loads(path.read_text("utf-8")))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no result of {function.__qualname__}: delete it") from error

    def store(self, function: Callable[..., Any], arguments: tuple[Any, ...], result: Any) -> None:
        """Write a result, whole or not at all. Raises TypeError: it would not come back as what it is."""
        path, text = self._path(function, arguments), json.dumps(_plain(result))
        decode(_returned(function), json.loads(text))  # raise now rather than when the part is wanted
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(text, "utf-8")
        part.replace(path)

    def forget(self) -> None:
        """Delete all parts: the report has been written."""
        for path in [*self._folder.glob("*.json"), *self._folder.glob("*.part")]:
            path.unlink()
        if self._folder.exists() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _path(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Path:
        called = f"{function.__module__}.{function.__qualname__}{self._named(arguments)!r}"
        name = hashlib.sha256(f"{called} {_source()}".encode()).hexdigest()[:32]
        return self._folder / f"{name}.json"

    def _named(self, value: Any) -> Any:
        """``value`` with a digest of its contents in place of each path, in dataclasses and tuples, too."""
        if isinstance(value, Path):
            if value not in self._contents:
                self._contents[value] = _contents(value)
            return self._contents[value]
        if isinstance(value, (tuple, list)):
            return [self._named(v) for v in value]
        if is_dataclass(value) and not isinstance(value, type):
            return type(value).__qualname__, [self._named(getattr(value, f.name)) for f in fields(value)]
        return value


def decode(kind: Any, value: Any) -> Any:
    """A value of type ``kind``, from what ``json`` made of it.

    Types may be plain values, literals, lists, tuples, dicts, optional values and dataclasses of these.

    Raises:
        TypeError: another type, or a value that is not of it.
        KeyError: a dataclass's field is missing.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and type(None) in inner and len(inner) == 2:
        return None if value is None else decode(next(k for k in inner if k is not type(None)), value)
    if origin is Literal and value in inner:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{f.name: decode(hints[f.name], value[f.name]) for f in fields(kind)})
    if origin is list:
        return [decode(inner[0], v) for v in value]
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(decode(k, v) for k, v in zip(kinds, value, strict=True))
    if origin is dict:
        return {(inner[0])(k): decode(inner[1], v) for k, v in value.items()}
    if kind in PLAIN and isinstance(value, (int, float) if kind is float else kind):
        return kind(value)
    raise TypeError(f"{value!r} is not of type {kind}")


def _plain(value: Any) -> Any:
    """A value as ``json`` takes it: dataclasses become dicts, in lists and tuples, too."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _returned(function: Callable[..., Any]) -> Any:
    return get_type_hints(function)["return"]


@lru_cache(maxsize=1)
def _source() -> str:
    """A digest of the package's source, as other source may give other results."""
    return _contents(Path(ragtag.__file__).parent, "*.py")


def _contents(path: Path, pattern: str = "*") -> str:
    """A digest of a file, or of the files of a folder that match ``pattern``, with their names.

    Raises FileNotFoundError: there is neither.
    """
    found = hashlib.sha256()
    files = [p for p in sorted(path.rglob(pattern)) if p.is_file()] if path.is_dir() else [path]
    for one in files:
        name = one.relative_to(path).as_posix() if path.is_dir() else ""
        with one.open("rb") as file:
            found.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()} ".encode())
    return found.hexdigest()
