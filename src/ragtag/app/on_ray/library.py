"""Ray itself, where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

from ragtag.core.errors import Error


class NoRay(Error, ImportError):
    """Ray is not installed."""


def load_ray() -> Any:
    """The ``ray`` module.

    Raises:
        NoRay: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise NoRay("Ray is not installed; pip install 'ragtag[ray]', on every node of the cluster") from None


def own_host() -> str:
    """The address under which Ray's other nodes reach this one."""
    load_ray()
    return str(importlib.import_module("ray.util").get_node_ip_address())
