"""Delay on a line, for kernels without netem: frames are read from a tap, held, and written to it again.

Run in the lab's hub, as ``relay.py PEERS DELAY_MS JITTER_MS HELD``, which reads late0, late1, ... It says
"ready", answers each line with its counts, and ends when its input does, so also when its maker is gone.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME = 65536
IN_A_ROW = 64
"""So many are read before those whose time has come are let go."""


def attach(device: str) -> int:
    """A tap's file, which does not block."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return file


def relay(files: list[int], delay_s: float, jitter_s: float, held_at_most: int) -> None:
    """Hold each frame for the delay and a uniform draw up to jitter; drop those there is no room for."""
    draw = random.Random(0)
    held: list[tuple[float, int, int, bytes]] = []
    held_bytes, number, passed, dropped, latest_s = 0, 0, 0, 0, 0.0
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready = select.select([0, *files], [], [], wait_s)[0]
        if 0 in ready:
            if not os.read(0, 1):
                return
            counts = {"passed": passed, "dropped": dropped, "latest_ms": latest_s * 1e3}
            print(json.dumps(counts), flush=True)
        for file in ready:
            for _ in range(IN_A_ROW if file else 0):
                try:
                    frame = os.read(file, FRAME)
                except BlockingIOError:
                    break
                if held_bytes + len(frame) > held_at_most:
                    dropped += 1
                    continue
                number += 1
                held_bytes += len(frame)
                due_s = time.monotonic() + delay_s + (jitter_s * draw.random() if jitter_s else 0.0)
                heapq.heappush(held, (due_s, number, file, frame))
        now_s = time.monotonic()
        while held and held[0][0] <= now_s:
            due_s, _, file, frame = heapq.heappop(held)
            held_bytes -= len(frame)
            latest_s = max(latest_s, now_s - due_s)
            passed += 1
            os.write(file, frame)


if __name__ == "__main__":
    taps = [attach(f"late{peer}") for peer in range(int(sys.argv[1]))]
    print("ready", flush=True)
    relay(taps, float(sys.argv[2]) / 1e3, float(sys.argv[3]) / 1e3, int(sys.argv[4]))
