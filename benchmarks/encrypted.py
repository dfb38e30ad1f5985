"""Encrypted sums beside secure averages: bytes and processor time for a value, and how near sums are.

    OMP_NUM_THREADS=1 python benchmarks/encrypted.py      # takes pip install ragtag[encrypted]

16 peers. Bytes are of messages as a client sends and gets them: encrypted, one each way; secure averages,
four stages of the same machines that ``benchmarks/secagg.py`` drives, 4 dropouts allowed for, none of them
dropping. The key is not counted, which peers share once. Times are processor time of one thread, medians.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ragtag.core.seed import generator
from ragtag.privacy.encrypted import EncryptedSum, add_encrypted
from ragtag.protocols.secagg import SecureSetting, ring_for
from secagg import exact, secure_round
from stored import how

RESULTS = Path(__file__).parent / "results" / "encrypted.json"
N, DROPS, CLIP = 16, 4, 1.0
LENGTHS = (100, 2048, 16384)


def encrypted(length: int, vectors: list[np.ndarray[Any, Any]], repeats: int) -> dict[str, float]:
    peer = EncryptedSum(length, peers=N)
    taken: dict[str, list[float]] = {"encrypt": [], "add": [], "decrypt": []}
    made = [torch.from_numpy(vector) for vector in vectors]
    for _ in range(repeats):
        begin_s = time.process_time()
        parts = [peer.encrypt(vector) for vector in made]
        encrypted_s = time.process_time()
        total = add_encrypted(peer.public, parts)
        added_s = time.process_time()
        found = peer.decrypt(total)
        taken["encrypt"].append((encrypted_s - begin_s) / N)
        taken["add"].append(added_s - encrypted_s)
        taken["decrypt"].append(time.process_time() - added_s)
    off = float((found - torch.stack(made).double().sum(0)).abs().max())
    times = {name: statistics.median(some) for name, some in taken.items()}
    return {
        "client_s": times["encrypt"] + times["decrypt"],
        "aggregator_s": times["add"],
        "up_bytes": len(parts[0]),
        "down_bytes": len(total),
        "key_bytes": len(peer.key),
        "largest_error": off,
    }


def secure(length: int, vectors: list[np.ndarray[Any, Any]], repeats: int) -> dict[str, float]:
    degree, threshold = ring_for(N, DROPS)
    setting = SecureSetting(N, length, CLIP, degree, threshold, N - DROPS)
    rounds = [secure_round(setting, vectors, number) for number in range(repeats)]
    assert all(exact(setting, vectors, one.end) for one in rounds)
    return {
        "client_s": statistics.median(statistics.median(one.client_s) for one in rounds),
        "aggregator_s": statistics.median(one.aggregator_s for one in rounds),
        "up_bytes": rounds[0].up_bytes / N,
        "down_bytes": rounds[0].down_bytes / N,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="sums of each kind and length")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results")
    arguments = parser.parse_args()
    made = how()
    torch.set_num_threads(1)
    lengths = {}
    for length in LENGTHS:
        vectors = [
            generator(0, "vector", peer).uniform(-CLIP, CLIP, length).astype(np.float32) for peer in range(N)
        ]
        row: dict[str, Any] = {
            "encrypted": encrypted(length, vectors, arguments.repeats),
            "secure": secure(length, vectors, arguments.repeats),
        }
        for kind in row.values():
            kind["bytes_a_value"] = (kind["up_bytes"] + kind["down_bytes"]) / length
            kind["client_us_a_value"] = 1e6 * kind["client_s"] / length
        lengths[str(length)] = row
        for name, kind in row.items():
            print(
                f"{length:7,} values, {name:10s}{kind['bytes_a_value']:9.1f} B a value"
                f"{kind['client_us_a_value']:9.2f} us a value at a client"
                f"{1e3 * kind['aggregator_s']:9.2f} ms where it is added up"
            )
    record = {
        **made,
        "tenseal": importlib.metadata.version("tenseal"),
        "peers": N,
        "lengths": lengths,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
