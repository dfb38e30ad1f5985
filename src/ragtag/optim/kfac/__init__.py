"""K-FAC: gradients preconditioned by each layer's Fisher matrix, taken for a Kronecker product.

``preconditioner.KFAC``: in three lines of any loop; settings, checkpoints, the thread. ``layers``: one
layer's passes and maths. A pass's inputs and output gradients become factors A and G, which are averaged
over steps and (``communicator``) over peers; from these come bases, which one peer computes for all; between
the newest bases a gradient becomes the preconditioned one. ``placement``: who computes, preconditions and
receives, and what that sends, without torch.
"""

from __future__ import annotations

from ragtag.optim.kfac.communicator import Communicator, OneProcess
from ragtag.optim.kfac.layers import why_not
from ragtag.optim.kfac.placement import LayerPlan, LayerSize, kaisa, sent_bytes

__all__ = [
    "Communicator",
    "LayerPlan",
    "LayerSize",
    "OneProcess",
    "kaisa",
    "sent_bytes",
    "why_not",
]
