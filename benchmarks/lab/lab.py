"""Network namespaces with links as bad as asked for, and gone when done with, whatever happens meanwhile."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ragtag.app.invitation.token import Token, encode

TOOLS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "nft": "nftables", "ethtool": "ethtool"}
PREFIX = "ragtaglab"
"""Of all names of namespaces: PREFIX-pid-start-serial-place. Pid and start tell whether their maker lives."""
PEERS_AT_MOST = 64
COMMAND_S = 60.0
"""How long one command that builds or asks may take: far longer than it does."""
FRAME = 1514
DRAWS = 1_000_000
"""Shares of nftables are so many to one."""
ALL_FRAMES = "1,6 0 0 4294967295,"
"""A classic BPF program that accepts everything: matches every frame, on kernels without matchall, too."""
ROOT = Path(__file__).parents[2]
RELAY = Path(__file__).with_name("relay.py")

INDEPENDENT = """
    numgen random mod {draws} < {share} counter name lost drop"""
BURSTS = """
    numgen inc mod {period} {{ {lost} }} counter name lost drop"""
RULES = """
table netdev line {{
  counter seen {{}}
  counter lost {{}}
  chain incoming {{
    type filter hook ingress device "eth0" priority 0;
    meta protocol != ip accept
    counter name seen{how}
  }}
}}
"""
ROUTER = """
table ip router {
  chain outgoing {
    type nat hook postrouting priority 100;
    oifname "eth0" masquerade@HOW@
  }
  chain incoming {
    type filter hook forward priority 0;
    iifname "eth0" ct state new drop
  }
  chain itself {
    type filter hook input priority 0;
    iifname "eth0" ct state new drop
  }
}
"""
BURSTS_DRAWN = 5_000
"""Bursts are drawn beforehand; after so many, or PERIOD packets, they come again."""
PERIOD = 4_000_000


class LabError(RuntimeError):
    """A lab could not be built, or a command in it failed."""


@dataclass(frozen=True)
class Counts:
    """What one peer's link did since the lab was built.

    seen, lost: IP packets that came to the peer, and those of them that were lost, since loss was last set.
    up, down: bytes of Ethernet frames that passed the uplink's and the downlink's token bucket;
        0 without a rate.
    up_dropped, down_dropped: frames for which these queues had no room.
    """

    seen: int
    lost: int
    up: int = 0
    down: int = 0
    up_dropped: int = 0
    down_dropped: int = 0


class Lab:
    """Peers as network namespaces ``names``, with ``eth0`` of addresses ``hosts``; a context manager.

    peers: at most 64.
    rate_mbit: of each uplink and each downlink, Mbit/s of Ethernet frames (UDP's payload and 42 bytes
        each); None: as fast as the machine.
    queue_ms: how much waits for its turn on each uplink and each downlink, at that rate; what comes on top
        is lost.
    queue_bytes: the same in bytes; in place of queue_ms.
    loss: share of IP packets lost on the way in to each peer.
    burst: how many are lost in a row on average; None: each one by itself, which makes 1 / (1 - loss).
        With bursts, a link has two states: in one nothing is lost, in the other everything, and before each
        packet it may change (Gilbert's model), so lengths are geometric. Where they lie is drawn beforehand:
        the same in each lab, and different by peer.
    delay_ms, jitter_ms: one way between two peers; and a uniform draw on top for each frame, so that frames
        overtake each other. A Python process holds them: good for about 300 Mbit/s of all peers together.
    behind: groups of peers, each behind a router that translates addresses (NAT): what goes out comes from
        the router's address, which is ``hosts[peer]`` of the group's first peer, and nothing comes in but
        from where something was sent. Such a peer's own address is ``inner_host_of(first, peer)``. Rate, loss
        and delay are those of the first peer's link.
    symmetric: whether these routers draw another port for each destination (RFC 4787's address and
        port-dependent mapping), so that what one member is told of a peer behind one helps no other. Else a
        peer keeps its port, where it can.
    offloads: whether network cards segment, checksum and join, as good ones do; rate and loss then hit
        whole trains.
    limit_s: what still runs in the lab after that is killed.

    Raises ValueError for what makes no sense, LabError for what this machine cannot do. On entry, labs whose
    process is gone are removed. While a lab lasts, SIGTERM and SIGHUP end the process by SystemExit.
    """

    _serial = 0

    def __init__(
        self,
        peers: int = 4,
        *,
        rate_mbit: float | None = None,
        queue_ms: float = 20.0,
        queue_bytes: int | None = None,
        loss: float = 0.0,
        burst: float | None = None,
        delay_ms: float = 0.0,
        jitter_ms: float = 0.0,
        behind: Sequence[Sequence[int]] = (),
        symmetric: bool = False,
        offloads: bool = False,
        limit_s: float = 3600.0,
    ) -> None:
        if not 1 <= peers <= PEERS_AT_MOST:
            raise ValueError(f"a lab has 1 to {PEERS_AT_MOST} peers, not {peers}")
        if rate_mbit is not None and rate_mbit <= 0:
            raise ValueError(f"rate_mbit is above 0, or None, not {rate_mbit}")
        if min(queue_ms, delay_ms, jitter_ms) < 0 or limit_s <= 0:
            raise ValueError("queue_ms, delay_ms and jitter_ms are 0 or more, limit_s is more")
        _lossy(loss, burst)
        Lab._serial += 1
        self.mark = f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{Lab._serial}"
        self.hub = f"{self.mark}-hub"
        self.names = [f"{self.mark}-{peer}" for peer in range(peers)]
        self.hosts = [host_of(peer) for peer in range(peers)]
        self._behind = {group[0]: tuple(group) for group in behind}
        second = {peer for group in behind for peer in group[1:]}
        self._linked = [peer for peer in range(peers) if peer not in second]  # with links of their own
        self._routers = {peer: self._router(group[0]) for group in behind for peer in group}
        self._symmetric = symmetric
        self.rate_mbit, self.offloads, self.limit_s = rate_mbit, offloads, limit_s
        self.delay_ms, self.jitter_ms = delay_ms, jitter_ms
        self._loss = (loss, burst)
        self._bucket = None if rate_mbit is None else _bucket(rate_mbit, queue_ms, queue_bytes)
        self._delayed = delay_ms > 0 or jitter_ms > 0
        self._relay: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._undo = ExitStack()

    def __enter__(self) -> Lab:
        reason = why_not()
        if reason:
            raise LabError(reason)
        with ExitStack() as undo:
            undo.callback(self._close)
            _end_by_exception(undo)
            remove_left_over()
            self._build()
            timer = threading.Timer(self.limit_s, self._kill)
            timer.daemon = True
            undo.callback(timer.cancel)
            timer.start()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    # -- What runs in it

    def run(self, peer: int, *command: str, stdin: str | None = None, timeout_s: float = COMMAND_S) -> str:
        """What a command in a peer's namespace prints. Raises LabError if it fails, or is late."""
        return _run("ip", "netns", "exec", self.names[peer], *command, stdin=stdin, timeout_s=timeout_s)

    def start(self, peer: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in a peer's namespace, with ``Popen``'s options; it is killed when the lab ends."""
        process = subprocess.Popen(["ip", "netns", "exec", self.names[peer], *command], **options)
        self._processes.append(process)
        return process

    def environment(self, peer: int, port: int = 4747, crew: str = "lab") -> dict[str, str]:
        """The variables by which ``ragtag.join()`` finds its crew."""
        return {
            "RAGTAG_RANK": str(peer),
            "RAGTAG_SIZE": str(len(self.names)),
            "RAGTAG_CREW": crew,
            "RAGTAG_PEERS": ",".join(f"{host}:{port}" for host in self.hosts),
        }

    def joined(self, script: str, crew: str = "lab", port: int = 4747) -> list[subprocess.Popen[str]]:
        """Start a script of Python for each peer, which joins one crew by its token; their output is piped.

        Peer 0 begins the crew. The script finds the library, the benchmarks and the tests.
        """
        token = encode(Token(((self.hosts[0], port),), crew, os.urandom(32), begins=True))
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAGTAG_TOKEN": token}
        return [
            self.start(
                peer,
                [sys.executable, "-c", script],
                env={**variables, "RAGTAG_RANK": str(peer)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for peer in range(len(self.names))
        ]

    # -- What its links do

    def lose(self, loss: float, burst: float | None = None) -> None:
        """From now on lose so many on the way in to each peer, and count from 0. As in ``Lab``."""
        self._loss = (loss, burst)
        clean = "add table netdev line\ndelete table netdev line\n"
        for peer in self._linked:
            self._at_card(peer, "nft", "-f", "-", stdin=clean + _rules(loss, burst, peer))

    def mtu(self, mtu: int, *, silently: bool = False) -> None:
        """Set what fits into a frame, both at each peer and at its port.

        silently: only at the ports. A peer does not know, and what does not fit is lost: a black hole. With
            offloads frames pass that are yet to be segmented.
        """
        for peer, name in enumerate(self.names):
            if not silently:
                _run("ip", "-n", name, "link", "set", "eth0", "mtu", str(mtu))
            _run("ip", "-n", self.hub, "link", "set", f"port{peer}", "mtu", str(mtu))

    def up(self, peer: int, up: bool = True) -> None:
        """Switch a peer's card on or off."""
        _run("ip", "-n", self.names[peer], "link", "set", "eth0", "up" if up else "down")

    def congestion(self, control: str) -> None:
        """Have TCP use a congestion control everywhere. Raises LabError if the kernel does not have it.

        By route: a namespace's default may only become what the whole machine allows everyone.
        """
        for host, name in zip(self.hosts, self.names, strict=True):
            route = f"10.203.47.0/24 dev eth0 scope link src {host} congctl {control}".split()
            _run("ip", "-n", name, "route", "replace", *route)

    def counts(self, peer: int) -> Counts:
        """What a peer's link did."""
        found = json.loads(self._at_card(peer, "nft", "-j", "list", "counters"))["nftables"]
        named = {one["counter"]["name"]: one["counter"]["packets"] for one in found if "counter" in one}
        if self._bucket is None:
            return Counts(named["seen"], named["lost"])
        up, down = (self._queue(f"{kind}{peer}") for kind in ("late", "port"))
        return Counts(
            named["seen"], named["lost"], up["bytes"], down["bytes"], up["drops"], down["drops"]
        )  # fmt: skip

    def relayed(self) -> dict[str, float]:
        """Frames that the relay passed, those it had no room for; how late (ms) the latest one was let go.

        Raises LabError where there is no relay, or none any more.
        """
        if self._relay is None or self._relay.stdin is None or self._relay.stdout is None:
            raise LabError("a lab without delay has no relay")
        try:
            self._relay.stdin.write("\n")
            self._relay.stdin.flush()
            found: dict[str, float] = json.loads(self._relay.stdout.readline())
        except (OSError, ValueError) as error:
            raise LabError(f"the relay has ended: {error}") from error
        return found

    def _at_card(self, peer: int, *command: str, stdin: str | None = None) -> str:
        """Run a command where a peer's link ends: in its namespace, or its router's."""
        where = self._routers.get(peer, self.names[peer])
        return _run("ip", "netns", "exec", where, *command, stdin=stdin)

    def _queue(self, device: str) -> dict[str, int]:
        shown = json.loads(_run("tc", "-n", self.hub, "-s", "-j", "qdisc", "show", "dev", device))
        return next(one for one in shown if one["kind"] == "tbf")

    # -- How it is built, and how it ends

    def _build(self) -> None:
        everywhere = range(len(self.names))
        for name in (self.hub, *self.names):
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
        _batch(
            self.hub,
            "ip",
            ["link add bridge0 type bridge mcast_snooping 0", "link set bridge0 up"]
            + [
                f"link add port{peer} type veth peer name eth0 netns {self.names[peer]} address {_mac(peer)}"
                for peer in everywhere
            ],
        )
        for peer in everywhere:
            self._no_offloads(self.hub, f"port{peer}")
            self._no_offloads(self.names[peer], "eth0")
            lines = ["link set lo up", "link set eth0 up", f"addr add {self.hosts[peer]}/24 dev eth0"]
            others = [other for other in everywhere if other != peer]
            # nothing is lost or late because an address is not known yet
            lines += [
                f"neigh add {self.hosts[one]} lladdr {_mac(one)} dev eth0 nud permanent" for one in others
            ]
            _batch(self.names[peer], "ip", lines)
        _batch(
            self.hub, "ip", [f"link set port{peer} up master bridge0" for peer in everywhere]
        )  # fmt: skip
        for group in self._behind.values():
            self._put_behind(group)
        if self._bucket or self._delayed:
            self._build_uplinks()
        if self._bucket:
            _batch(self.hub, "tc", [f"qdisc add dev port{peer} root {self._bucket}" for peer in self._linked])
        self.lose(*self._loss)

    def _router(self, first: int) -> str:
        return f"{self.mark}-router{first}"

    def _put_behind(self, group: Sequence[int]) -> None:
        """Move the first peer's card into a router's namespace, and give all of the group one behind it."""
        first, router = group[0], self._router(group[0])
        gate = f"{inner_host_of(first, first).rpartition('.')[0]}.1"
        _run("ip", "netns", "add", router)
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _run("ip", "-n", self.names[first], "link", "set", "eth0", "netns", router)
        others = [other for other in range(len(self.names)) if other != first]
        lines = ["link set lo up", "link set eth0 up", f"addr add {self.hosts[first]}/24 dev eth0"]
        lines += [f"neigh add {self.hosts[one]} lladdr {_mac(one)} dev eth0 nud permanent" for one in others]
        lines += ["link add inside type bridge", "link set inside up", f"addr add {gate}/24 dev inside"]
        _batch(router, "ip", lines)
        for peer in group:
            name, port = self.names[peer], f"inside{peer}"
            if peer != first:
                _run("ip", "-n", name, "link", "del", "eth0")
            made = f"link add {port} type veth peer name eth0 netns {name}"
            _batch(router, "ip", [made, f"link set {port} master inside up"])
            lines = ["link set eth0 up", f"addr add {inner_host_of(first, peer)}/24 dev eth0"]
            _batch(name, "ip", [*lines, f"route add default via {gate}"])
            self._no_offloads(router, port)
            self._no_offloads(name, "eth0")
        self._no_offloads(router, "eth0")
        how = " random,fully-random" if self._symmetric else ""
        _run("ip", "netns", "exec", router, "nft", "-f", "-", stdin=ROUTER.replace("@HOW@", how))

    def _build_uplinks(self) -> None:
        """What comes from a peer goes through late*, where it waits for its rate, and then to the bridge: by
        a cable (veth), or by the relay, which reads it and writes it back later.

        It is copied there and dropped, in place of redirected: a copy belongs to no socket. Else the sender's
        socket would count what waits in the hub against its buffer, and block: it would feel the bottleneck.
        """
        for peer in self._linked:
            late, port = f"late{peer}", f"port{peer}"
            back = late if self._delayed else f"back{peer}"
            made = (
                f"tuntap add dev {late} mode tap"
                if self._delayed
                else f"link add {late} type veth peer {back}"
            )
            flood = "learning off flood off mcast_flood off bcast_flood off"
            settings = [made, f"link set {late} txqueuelen 20000 up", f"link set {back} master bridge0 up"]
            _batch(self.hub, "ip", [*settings, f"link set {back} type bridge_slave {flood}"])
            # from here it comes to the bridge, but the way to the peer goes by its port
            _run("bridge", "-n", self.hub, "fdb", "replace", _mac(peer), "dev", port, "master", "static")
            self._no_offloads(self.hub, late, back)
            _run("tc", "-n", self.hub, "qdisc", "add", "dev", port, "ingress")
            match = [
                "filter",
                "add",
                "dev",
                port,
                "ingress",
                "protocol",
                "all",
                "bpf",
                "bytecode",
                ALL_FRAMES,
            ]
            _run("tc", "-n", self.hub, *match, *f"action mirred egress mirror dev {late} drop".split())
            if self._bucket:
                _run("tc", "-n", self.hub, *f"qdisc add dev {late} root {self._bucket}".split())
        if self._delayed:
            self._start_relay()

    def _no_offloads(self, where: str, *devices: str) -> None:
        off = [word for kind in ("tx", "rx", "tso", "gso", "gro") for word in (kind, "off")]
        for device in dict.fromkeys(devices) if not self.offloads else ():
            _run("ip", "netns", "exec", where, "ethtool", "-K", device, *off)

    def _start_relay(self) -> None:
        held_s = (self.delay_ms + self.jitter_ms) / 1e3
        # twice what such a line holds: more is there only while the relay itself is late
        held = round(2 * (self.rate_mbit or 1000.0) * 1e6 / 8 * held_s) + 64 * FRAME
        numbers = [str(one) for one in (len(self.names), self.delay_ms, self.jitter_ms, held)]
        command = ["ip", "netns", "exec", self.hub, sys.executable, str(RELAY), *numbers]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(self._relay)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise LabError("the relay that delays could not begin")

    def _kill(self) -> None:
        _kill_in([name for name in _listed() if name.startswith(f"{self.mark}-")])

    def _close(self) -> None:
        """End all that runs in it, and take it down; signals wait until that is done."""
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        )  # fmt: skip
        try:
            for process in self._processes:
                process.kill()
                process.wait()
            _remove(lambda name: name.startswith(f"{self.mark}-"))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def host_of(peer: int) -> str:
    """A peer's address, the same in every lab."""
    return f"10.203.47.{peer + 1}"


def inner_host_of(first: int, peer: int) -> str:
    """A peer's address in its own network, behind the router of a group that begins with ``first``."""
    return f"192.168.{first + 1}.{peer + 2}"


def why_not() -> str:
    """Why there can be no lab here; nothing if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        return f"commands are missing: install {', '.join(missing)}"
    name = f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-0-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except LabError as error:
        return f"this system lets nobody make network namespaces: {error}"
    return ""


def remove_left_over() -> list[str]:
    """Remove the namespaces of processes that are gone, and what runs in them; their names."""
    return _remove(lambda name: name.startswith(f"{PREFIX}-") and not _maker_lives(name))


def _remove(which: Callable[[str], bool]) -> list[str]:
    names = [name for name in _listed() if which(name)]
    _kill_in(names)
    for name in names:
        try:
            _run("ip", "netns", "del", name)
        except LabError:
            if name in _listed():  # else another one, that began at the same time, was faster
                raise
    return names


def _kill_in(names: Iterable[str]) -> None:
    for name in names:
        try:
            pids = _run("ip", "netns", "pids", name).split()
        except LabError:
            if name in _listed():
                raise
            continue
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _listed() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _maker_lives(name: str) -> bool:
    pid, start = name.split("-")[1:3]
    return _start_of(int(pid)) == int(start)


def _start_of(pid: int) -> int:
    """When a process began, in ticks since the machine did; -1: it is gone. Pids come again, pairs do not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


def _end_by_exception(undo: ExitStack) -> None:
    """SIGTERM and SIGHUP raise SystemExit, unless the program has handlers of its own. Only the main thread
    may set any.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            undo.callback(signal.signal, number, signal.SIG_DFL)
            signal.signal(number, end)


def _lossy(loss: float, burst: float | None) -> None:
    if not 0 <= loss < 1:
        raise ValueError(f"loss is a share from 0 to below 1, not {loss}")
    if burst is not None and (burst < 1 or loss > burst / (burst + 1)):
        raise ValueError(f"bursts of {burst} on average cannot lose {loss}")


def _rules(loss: float, burst: float | None, seed: int) -> str:
    """Rules for nftables. Bursts are drawn here and found by a count of packets. A set that rules add to and
    delete from would be simpler, but the kernel keeps what is deleted for a second, and then adds no more.
    """
    _lossy(loss, burst)
    if not loss:
        how = ""
    elif burst is None:
        how = INDEPENDENT.format(draws=DRAWS, share=round(loss * DRAWS))
    else:
        spans, period = _bursts(loss, burst, seed)
        how = BURSTS.format(period=period, lost=", ".join(f"{first}-{last}" for first, last in spans))
    return RULES.format(how=how)


def _bursts(loss: float, burst: float, seed: int) -> tuple[list[tuple[int, int]], int]:
    """First and last packets of bursts, and after how many they come again: a chain of two states."""
    draw = random.Random(seed)
    ends = 1 / burst
    begins = ends * loss / (1 - loss)
    spans: list[tuple[int, int]] = []
    at = 0
    while len(spans) < BURSTS_DRAWN and at < PERIOD:
        first = at + _geometric(begins, draw)
        at = first + _geometric(ends, draw)
        spans.append((first, at - 1))
    return spans, at


def _geometric(chance: float, draw: random.Random) -> int:
    """How many draws until the first that hits."""
    return 1 if chance >= 1 else 1 + int(math.log(1 - draw.random()) / math.log(1 - chance))


def _bucket(rate_mbit: float, queue_ms: float, queue_bytes: int | None) -> str:
    """A token bucket for tc. It holds a fifth of a millisecond, or three frames: no more goes at once."""
    bytes_ms = rate_mbit * 1e3 / 8
    limit = round(queue_ms * bytes_ms) if queue_bytes is None else queue_bytes
    burst = max(3 * FRAME, round(bytes_ms / 5))
    return f"tbf rate {round(rate_mbit * 1e6)}bit burst {burst} limit {max(limit, FRAME)}"


def _mac(peer: int) -> str:
    return f"02:72:74:00:00:{peer:02x}"


def _batch(name: str, tool: str, lines: list[str]) -> None:
    _run(tool, "-n", name, "-batch", "-", stdin="\n".join(lines) + "\n")


def _run(*command: str, stdin: str | None = None, timeout_s: float = COMMAND_S) -> str:
    try:
        done = subprocess.run(
            command, input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(command)}: not within {timeout_s} s") from error
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
