"""Writing and reading a run's trace files: ``peer-NN.jsonl`` for each peer and ``crew.jsonl``."""

from ragtag.app.tracefile.damage import Damage
from ragtag.app.tracefile.follow import Follower
from ragtag.app.tracefile.last import last_leaves
from ragtag.app.tracefile.lines import BLOCK_BYTES, LineReader
from ragtag.app.tracefile.names import CREW_FILE, crews, peer_file, trace_files
from ragtag.app.tracefile.read import RunTrace, read_run, run_key
from ragtag.app.tracefile.writer import TraceWriter

__all__ = [
    "BLOCK_BYTES",
    "CREW_FILE",
    "Damage",
    "Follower",
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
