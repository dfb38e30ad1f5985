"""Communication hooks for scripts that stay on DistributedDataParallel (``register_comm_hook``).

``sparse`` sends each bucket's largest gradient entries over DDP's own process group, gloo or NCCL;
``average`` averages gradients through Ragtag's transport, so that a script goes on when a peer is lost.
"""

from ragtag.hooks.alone import ddp
from ragtag.hooks.crew_hook import CrewState, average
from ragtag.hooks.sparse_hook import SparseState, sparse
from ragtag.hooks.stats import Stats

__all__ = ["CrewState", "SparseState", "Stats", "average", "ddp", "sparse"]
