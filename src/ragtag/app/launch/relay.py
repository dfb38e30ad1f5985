"""What peers print goes through a process of its own, so that no peer ever waits for a terminal.

A launcher that is stopped (Ctrl-Z), or whose terminal takes nothing (Ctrl-S), reads no pipes, and a peer that
prints into a full pipe stands still. The relay reads on: it holds what the launcher does not take yet, up to
a limit, and drops the oldest of it beyond that. It is in a session of its own, as peers are.

    peers' pipes -> relay: reads always, holds -> one socket -> launcher: shows

This file is also the relay's program, run by its path with nothing but the standard library.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

HOLD_BYTES, HOLD_ALL_BYTES = 16 << 20, 256 << 20
"""What is held of one stream, and of all together."""
_PIECE_BYTES = 1 << 16
_READS_MAX = 256  # of a stream whose writer has ended; a daemon of its own may write on
_ORDER = struct.Struct("<BI")  # what, stream; with WATCH comes the stream's descriptor
_FRAME = struct.Struct("<BII")  # what, stream, bytes that follow
_DROPPED = struct.Struct("<QQ")  # bytes, lines
_WATCH, _FINISH = 0, 1
_DATA, _GAP, _END = 0, 1, 2


@dataclass(slots=True)
class HeldOutput:
    """Output that nobody has taken yet, with what was dropped before it."""

    pieces: deque[bytearray] = field(default_factory=deque)
    size: int = 0
    dropped_bytes: int = 0
    dropped_lines: int = 0

    def add(self, data: bytes, limit: int) -> None:
        """Hold more; beyond ``limit`` bytes the oldest goes, up to the end of a line."""
        if not self.pieces or len(self.pieces[-1]) + len(data) > _PIECE_BYTES:
            self.pieces.append(bytearray())
        self.pieces[-1] += data
        self.size += len(data)
        if self.size <= limit:
            return
        while len(self.pieces) > 1 and self.size > limit:
            self._drop(len(self.pieces[0]))
        self._drop(self.pieces[0].find(b"\n") + 1)

    def _drop(self, n_bytes: int) -> None:
        first = self.pieces[0]
        self.dropped_bytes += n_bytes
        self.dropped_lines += first.count(b"\n", 0, n_bytes)
        self.size -= n_bytes
        del first[:n_bytes]
        if not first:
            self.pieces.popleft()

    def take(self) -> tuple[int, bytes] | None:
        """What is to be told next, and its content."""
        if self.dropped_bytes:
            gap = _DROPPED.pack(self.dropped_bytes, self.dropped_lines)
            self.dropped_bytes = self.dropped_lines = 0
            return _GAP, gap
        if not self.pieces:
            return None
        piece = bytes(self.pieces.popleft())
        self.size -= len(piece)
        return _DATA, piece


# -- The launcher's side


class Relay:
    """The launcher's end.

    selector: has this as the data of its socket; ``read`` when that is ready.
    on_output: is given a stream's number and bytes.
    on_gap: is told how many bytes and lines of a stream were dropped.
    on_end: called once should somebody end the relay: its streams are then to be read directly.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_output: Callable[[int, bytes], None],
        on_gap: Callable[[int, int, int], None],
        on_end: Callable[[], None],
    ) -> None:
        self._selector, self._on_output, self._on_gap, self._on_end = selector, on_output, on_gap, on_end
        self._sock, theirs = socket.socketpair()
        self._part = bytearray()
        self._open: set[int] = set()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), str(theirs.fileno())],  # noqa: PTH100
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()
        self.alive = True
        selector.register(self._sock, selectors.EVENT_READ, self)

    @property
    def pid(self) -> int:
        """The relay's process."""
        return self._process.pid

    def watch(self, stream: int, fd: int) -> None:
        """Have a pipe read, in place of this process."""
        self._open.add(stream)
        self._order(_WATCH, stream, [fd])

    def finish(self, streams: list[int], patience_s: float) -> None:
        """Take all that these streams' writers have left, unless nothing comes for ``patience_s``."""
        for stream in streams:
            if stream in self._open:
                self._order(_FINISH, stream, [])
        until_s = time.monotonic() + patience_s
        with selectors.DefaultSelector() as waiting:
            if self.alive:
                waiting.register(self._sock, selectors.EVENT_READ)
            while self.alive and self._open.intersection(streams):
                if not waiting.select(until_s - time.monotonic()):
                    break
                self.read()
                until_s = time.monotonic() + patience_s
        self._open.difference_update(streams)

    def read(self) -> None:
        """Take what has come, without waiting."""
        try:
            data = self._sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self._part += data
        for what, stream, content in _frames(self._part):
            if what == _DATA:
                self._on_output(stream, content)
            elif what == _GAP:
                self._on_gap(stream, *_DROPPED.unpack(content))
            else:
                self._open.discard(stream)

    def close(self) -> None:
        """End the relay."""
        if self.alive:
            self.alive = False
            self._selector.unregister(self._sock)
        self._sock.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)

    def _order(self, what: int, stream: int, fds: list[int]) -> None:
        if not self.alive:
            return
        try:
            socket.send_fds(self._sock, [_ORDER.pack(what, stream)], fds)
        except OSError:
            self._lost()

    def _lost(self) -> None:
        if self.alive:
            self.alive = False
            self._selector.unregister(self._sock)
            self._open.clear()
            self._on_end()


def _frames(part: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """The whole frames at the beginning of what has come; they are taken off it."""
    at = 0
    while len(part) - at >= _FRAME.size:
        what, stream, size = _FRAME.unpack_from(part, at)
        end = at + _FRAME.size + size
        if len(part) < end:
            break
        yield what, stream, bytes(part[end - size : end])
        at = end
    del part[:at]


# -- The relay's side


class _Relaying:
    """The loop of the relay's process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, tuple[int, HeldOutput]] = {}
        self._ended: deque[int] = deque()
        self._out = bytearray()
        self._watched = selectors.EVENT_READ
        self._selector.register(sock, self._watched, None)

    def run(self) -> None:
        """Until the launcher has ended."""
        while True:
            for key, mask in self._selector.select():
                if key.data is not None:
                    self._read(key.data)
                    continue
                if mask & selectors.EVENT_READ and not self._ordered():
                    return
            if not self._write():
                return

    def _ordered(self) -> bool:
        """Take one order; False: the launcher has ended."""
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _ORDER.size, 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if len(data) < _ORDER.size:
            return False
        what, stream = _ORDER.unpack(data)
        if what == _WATCH and fds:
            os.set_blocking(fds[0], False)
            self._streams[stream] = fds[0], HeldOutput()
            self._selector.register(fds[0], selectors.EVENT_READ, stream)
        elif what == _FINISH and stream in self._streams:
            for _ in range(_READS_MAX):
                if stream not in self._streams or not self._read(stream):
                    break
            self._end(stream)
        return True

    def _read(self, stream: int) -> bool:
        """Read a piece; False: there is none, or never will be."""
        fd, held = self._streams[stream]
        if fd < 0:
            return False
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if data:
            held.add(data, min(HOLD_BYTES, HOLD_ALL_BYTES // len(self._streams)))
        else:
            self._end(stream)
        return bool(data)

    def _end(self, stream: int) -> None:
        fd, held = self._streams[stream]
        if fd >= 0:
            self._selector.unregister(fd)
            os.close(fd)
            self._streams[stream] = -1, held

    def _write(self) -> bool:
        """Pass on what the launcher takes now; False: it has ended."""
        while self._out or self._fill():
            try:
                del self._out[: self._sock.send(self._out)]
            except BlockingIOError:
                break
            except OSError:
                return False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if wanted != self._watched:
            self._watched = wanted
            self._selector.modify(self._sock, wanted, None)
        return True

    def _fill(self) -> bool:
        """A frame of each stream that has something to tell; whether there was any."""
        for stream, (fd, held) in list(self._streams.items()):
            frame = held.take()
            if frame is not None:
                self._out += _FRAME.pack(frame[0], stream, len(frame[1])) + frame[1]
            elif fd < 0:
                self._out += _FRAME.pack(_END, stream, 0)
                del self._streams[stream]
        return bool(self._out)


def main() -> None:
    """The relay's process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(False)
    _Relaying(sock).run()


if __name__ == "__main__":
    main()
