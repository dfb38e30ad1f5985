"""What the parts of a model are called, whatever it is wrapped in."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def plain_name(name: str, root: nn.Module) -> str:
    """The name that a module, parameter or buffer of ``root`` has in the model that is wrapped.

    torch.compile puts ``_orig_mod`` wherever a module is compiled, data parallelism ``module`` at the root.
    """
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    inside = getattr(root, "_orig_mod", root)
    if isinstance(inside, DataParallel | DistributedDataParallel) and parts[0:1] == ["module"]:
        del parts[0]
    return ".".join(parts)
