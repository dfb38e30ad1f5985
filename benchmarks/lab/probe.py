"""What a link does to datagrams: numbered ones with the time of their sending, from one namespace to others.

All namespaces of a machine have one clock, so that delays are measured one way. The kernel says when one
came, so that a busy receiver does not count.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lab import Lab

PORT = 4999
HEADERS = 42
"""Bytes of Ethernet, IP and UDP."""
BEGINS_S = 0.1
"""Between the word to all senders and the first datagram: they begin together."""
BEHIND_S = 0.002
WINDOWS = 25
SILENT_S = 1.0
"""A receiver that has heard something, and then nothing for so long, has heard all."""
HEAD, STAMP = struct.Struct("<IId"), struct.Struct("@ll")
SO_RCVBUFFORCE, SO_TIMESTAMPNS = 33, 35
"""Of Linux; Python does not name them."""


@dataclass(frozen=True)
class Probed:
    """What came from one sender.

    rate_mbit: of Ethernet frames, in the middle one (by speed) of WINDOWS spans of as many datagrams each:
        what the machine held up for a while does not count. sent_mbit: the same, as they were sent.
    loss: share that did not come. burst: how many were missing in a row, on average; 0 where none was.
    delay_ms: median and largest, one way. overtaken: share that came after one sent later.
    """

    rate_mbit: float
    sent_mbit: float
    loss: float
    burst: float
    bursts: int
    delay_ms: float
    longest_ms: float
    overtaken: float


def probe(
    lab: Lab, senders: list[int], to: int, *, offered_mbit: float, count: int, size: int = 1200
) -> list[Probed]:
    """Send datagrams from each of the senders to one peer; what came, by sender.

    offered_mbit: how fast each sends, in Mbit/s of Ethernet frames. count: how many each sends.
    size: bytes of UDP payload, at least 16. Raises LabError, or RuntimeError if one of them fails.
    """
    seconds = count * (size + HEADERS) * 8 / offered_mbit / 1e6
    patience_s = 20 + 20 * seconds
    script = [sys.executable, str(Path(__file__))]
    receiver = lab.start(
        to, [*script, "receive", str(len(senders)), str(count), str(patience_s)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert receiver.stdout is not None
    if receiver.stdout.readline() != "ready\n":
        raise RuntimeError("the receiving end of the probe failed")
    begin_s = time.monotonic() + BEGINS_S + 0.3 * len(senders)
    numbers = [str(one) for one in (count, size, offered_mbit, begin_s)]
    sending = [
        lab.start(one, [*script, "send", lab.hosts[to], str(at), *numbers]) for at, one in enumerate(senders)
    ]
    for process in sending:
        if process.wait(patience_s):
            raise RuntimeError("the sending end of the probe failed")
    out = receiver.communicate(timeout=patience_s)[0]
    if receiver.returncode:
        raise RuntimeError("the receiving end of the probe failed")
    return [Probed(**one) for one in json.loads(out)]


def send(host: str, me: int, count: int, size: int, offered_mbit: float, begin_s: float) -> None:
    """Send at an even pace. What is late is made up for at once, but no more than BEHIND_S: a sender that the
    machine kept from sending would else fill any queue.
    """
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.connect((host, PORT))
    gap_s = (size + HEADERS) * 8 / offered_mbit / 1e6
    rest = bytes(size - HEAD.size)
    begin_s = max(begin_s, time.monotonic())
    for number in range(count):
        early_s = begin_s + number * gap_s - time.monotonic()
        if early_s > 0:
            time.sleep(early_s)
        begin_s += max(0.0, -early_s - BEHIND_S)
        end.send(HEAD.pack(me, number, time.time()) + rest)


def receive(senders: int, count: int, patience_s: float) -> None:
    """Say what came from each sender."""
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)  # what is lost is lost on the line
    end.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    end.bind(("0.0.0.0", PORT))
    print("ready", flush=True)
    came: list[list[tuple[int, float, float]]] = [[] for _ in range(senders)]
    size, until_s = 0, time.monotonic() + patience_s
    end.settimeout(patience_s)
    while time.monotonic() < until_s:
        try:
            data, said, _, _ = end.recvmsg(65536, socket.CMSG_SPACE(STAMP.size))
        except TimeoutError:
            break
        seconds, nanoseconds = STAMP.unpack(said[0][2])
        if not size:
            size = len(data)
            end.settimeout(SILENT_S)
        sender, number, sent_s = HEAD.unpack_from(data)
        came[sender].append((number, sent_s, seconds + nanoseconds / 1e9))
    print(json.dumps([figures(one, count, size) for one in came]), flush=True)


def figures(came: list[tuple[int, float, float]], count: int, size: int) -> dict[str, float]:
    """``Probed``'s fields, of what came: numbers, when sent, when come (s)."""
    numbers = sorted({number for number, _, _ in came})
    gaps = [later - sooner - 1 for sooner, later in zip([-1, *numbers], [*numbers, count], strict=True)]
    bursts = [gap for gap in gaps if gap]
    delays = sorted(now_s - sent_s for _, sent_s, now_s in came) or [0.0]
    overtaken, newest = 0, -1
    for number, _, _ in came:
        overtaken += number < newest
        newest = max(newest, number)
    bits = (size + HEADERS) * 8
    return {
        "rate_mbit": _speed([(at, now_s) for at, (_, _, now_s) in enumerate(came)]) * bits / 1e6,
        "sent_mbit": _speed(sorted((number, sent_s) for number, sent_s, _ in came)) * bits / 1e6,
        "loss": 1 - len(numbers) / count,
        "burst": sum(bursts) / len(bursts) if bursts else 0.0,
        "bursts": len(bursts),
        "delay_ms": delays[len(delays) // 2] * 1e3,
        "longest_ms": delays[-1] * 1e3,
        "overtaken": overtaken / max(1, len(came)),
    }


def _speed(counted: list[tuple[int, float]]) -> float:
    """How fast numbers grow, by a second, in the middle one of WINDOWS spans; 0 where there are too few."""
    ends = counted[:: max(1, len(counted) // WINDOWS)]
    spans = [(later[0] - sooner[0], later[1] - sooner[1]) for sooner, later in pairwise(ends)]
    return median(count / max(took_s, 1e-9) for count, took_s in spans) if spans else 0.0


if __name__ == "__main__":
    if sys.argv[1] == "send":
        to, me, n, payload, mbit, at_s = sys.argv[2:]
        send(to, int(me), int(n), int(payload), float(mbit), float(at_s))
    else:
        receive(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
