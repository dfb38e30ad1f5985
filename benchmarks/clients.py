"""How long an average takes where peers with slow uplinks are clients, and where they own as much as others.

    python benchmarks/clients.py                 # everything; it stores the result
    python benchmarks/clients.py --quick         # smaller vectors, nothing stored

All machines of the peers run, in virtual time, as in ``benchmarks/shares.py``, which says what a time is.
The last four peers of each crew send 20 Mbit/s and receive ten times that. *full*: all own as much. *plan*:
as much as DeDLOC's linear program gives them. *clients*: the last four own nothing, and the others as much as
each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # tests import this file, too

from ragtag.core.wire import CHUNK_BYTES
from ragtag.optim.roles import Capacity, Mix, even_shares
from ragtag.recipes.dedloc.mixes import MBIT
from ragtag.simulation.link import OVERHEAD_BYTES
from shares import HOMES, averages
from stored import how

RESULTS = Path(__file__).parent / "results" / "clients.json"
SLOW = (Capacity(20 * MBIT, 200 * MBIT, 1.0),) * 4
CREWS = {
    "4 at 200 Mbit/s": (Capacity(200 * MBIT, 200 * MBIT, 1.0),) * 4 + SLOW,
    "8 homes": HOMES[:8] + SLOW,
    "1 at 1 Gbit/s": (Capacity(1000 * MBIT, 1000 * MBIT, 1.0), *SLOW),
    "4 alike": SLOW + SLOW,
}


def row(name: str, peers: tuple[Capacity, ...], values: int) -> dict[str, Any]:
    """One crew: times of an average, calm and where datagrams are lost."""
    on_wire = values * 4 * (CHUNK_BYTES + OVERHEAD_BYTES) / CHUNK_BYTES
    mix = Mix(peers, 1.0, on_wire)
    clients = peers[:-4] + tuple(replace(peer, client=True) for peer in peers[-4:])
    found: dict[str, Any] = {"crew": name, "peers": len(peers)}
    for way, of, shares in (
        ("full", peers, (1 / len(peers),) * len(peers)),
        ("plan", peers, even_shares(mix, mix.able).shares),
        ("clients", clients, ()),
    ):
        took_s, whole = averages(of, shares, values)
        lossy_s, lossy_whole = averages(of, shares, values, loss=0.01)
        found[way] = {
            "took_s": round(took_s, 4),
            "lossy_s": round(lossy_s, 4),
            "whole_percent": round(100 * min(whole, lossy_whole), 3),
        }
    found["clients_over_full"] = round(found["clients"]["took_s"] / found["full"]["took_s"], 3)
    found["least_s"] = round(on_wire / SLOW[0].up_bytes_per_s, 4)
    return found


def main() -> None:
    """Measure, print and store."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="smaller vectors, nothing stored")
    quick = arguments.parse_args().quick
    stamp, values = how(), 50_000 if quick else 200_000
    rows = []
    for name, peers in CREWS.items():
        rows.append(row(name, peers, values))
        print(json.dumps(rows[-1]), flush=True)
    if not quick:
        RESULTS.write_text(json.dumps({**stamp, "values": values, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
