"""What an object holds: the sizes of all containers that can be reached from it, by the way there."""

from __future__ import annotations

import types
from collections import Counter, deque

import numpy as np

_LEAVES = (str, bytes, int, float, bool, type(None), type, np.generic, types.ModuleType)
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def tables(**roots: object) -> Counter[str]:
    """Entries by path, such as ``node.lanes[].rounds``; what lies behind closures is not seen."""
    sizes, seen, todo = Counter[str](), set[int](), list(roots.items())
    while todo:
        path, held = todo.pop()
        if id(held) in seen or isinstance(held, (*_LEAVES, *_CALLED)):
            continue
        seen.add(id(held))
        if isinstance(held, np.ndarray):
            sizes[path] += held.size
        elif isinstance(held, dict):
            sizes[path] += len(held)
            todo += [(f"{path}[]", part) for pair in held.items() for part in pair]
        elif isinstance(held, list | tuple | set | frozenset | deque):
            sizes[path] += len(held)
            todo += [(f"{path}[]", part) for part in held]
        else:
            names = set(getattr(held, "__dict__", ())) | set(getattr(held, "__struct_fields__", ()))
            for kind in type(held).__mro__:
                slots = getattr(kind, "__slots__", ())
                names.update([slots] if isinstance(slots, str) else slots)
            todo += [
                (f"{path}.{name}", getattr(held, name, None))
                for name in sorted(names)
                if name != "__weakref__"
            ]
    return sizes
