"""Writing and reading a run's trace files: ``peer-NN.jsonl`` for each peer and ``crew.jsonl``.

``files`` says which they are, and whether one is still written. Records go through ``writer``, which
``thin`` keeps bounded, and come back through ``read``: a whole run in time order, or as it grows.
"""

from ragtag.app.tracefile.files import CREW_FILE, crews, peer_file, trace_files
from ragtag.app.tracefile.read import (
    BLOCK_BYTES,
    LineReader,
    RunTrace,
    TraceDamage,
    TraceFollower,
    last_leaves,
    read_run,
    run_key,
)
from ragtag.app.tracefile.writer import TraceWriter

__all__ = [
    "BLOCK_BYTES",
    "CREW_FILE",
    "TraceDamage",
    "TraceFollower",
    "LineReader",
    "RunTrace",
    "TraceWriter",
    "crews",
    "last_leaves",
    "peer_file",
    "read_run",
    "run_key",
    "trace_files",
]
