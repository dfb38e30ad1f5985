"""Matchmaking plus one Moshpit round among processes on loopback: Ragtag beside hivemind, in turns.

    python -m venv HM && HM/bin/pip install torch hivemind==1.1.12
    python benchmarks/hivemind_moshpit.py --hivemind-python HM/bin/python  # 8 peers, groups of 4, 40 MB
    python benchmarks/hivemind_moshpit.py --hivemind-python HM/bin/python --values 1e5 --rounds 3 --turns 1

Both sides: one process per peer, one vector each, all called at once (a gate on loopback opens when all have
come to it). A round takes from the call to the result at the slowest peer; the first ones warm up and do not
count. Ragtag: `optimizer.step()` of `crew.optimizer(..., averager=ragtag.Moshpit(group=4))`, started by
`ragtag run`; and with `ragtag.RandomGroups(group=4)`, since for 8 peers Moshpit's grid is 3 by 3: its groups
are of 2 and 3. hivemind: `DecentralizedAverager.step()`, as in its own benchmark of averaging.

hivemind's settings, to let it do its best:
- min_matchmaking_time: it waits for so long in each step, unless its group fills first. Its default of 5 s
  is for the internet. Each value of --matchmaking is tried, and the fastest whose groups all fill counts.
- request_timeout: 0.8 of that (it must be smaller).
- min_group_size = target_group_size, and group bits of one bit for two groups: groups are full or fail,
  and a grid of 2 by 4 as Moshpit All-Reduce wants it.
- no compression, its default part size, fork (it fails under spawn), all peers know the first one's DHT.
The result of every round is checked on every peer, once all have ended it: the mean over those that the
side says took part.
How large the groups were stands beside each figure: Ragtag's grid takes groups of at most the size asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from stored import how

RESULTS = Path(__file__).parent / "results" / "hivemind_moshpit.json"
DEADLINE_S = 180.0
HELLO = b"ragtag-hivemind-gate"
WARM_UP = 3
OURS = ("Moshpit", "RandomGroups")
WAYS = (*OURS, "hivemind")


class Gate:
    """Opens when all ``n`` peers have come; again and again. A server on loopback."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=n)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._listener.settimeout(DEADLINE_S)
        try:
            lines: list[socket.socket] = []
            while len(lines) < self._n:
                line = self._listener.accept()[0]
                line.settimeout(DEADLINE_S)
                if line.recv(len(HELLO), socket.MSG_WAITALL) == HELLO:
                    lines.append(line)
                else:  # a process of an earlier turn still looks for somebody at this port
                    line.close()
            while all(line.recv(1) for line in lines):
                for line in lines:
                    line.sendall(b"!")
        except OSError:  # a peer has ended: the others see the end of their line
            return
        finally:
            self._listener.close()


class Peer:
    """One peer's side of the gate, and what it measures."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(1)
        self.rank, self._rounds = rank, WARM_UP + arguments.rounds
        self.known = torch.randn(arguments.values, generator=torch.Generator().manual_seed(0))
        self._line = socket.create_connection(("127.0.0.1", arguments.gate), timeout=DEADLINE_S)
        self._line.sendall(HELLO)
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def wait(self) -> None:
        """Until all have come to the gate."""
        self._line.sendall(b"?")
        if self._line.recv(1) != b"!":
            raise RuntimeError("another peer has ended")

    def measure(self, vector, step, out: Path) -> None:
        """``step()`` averages ``vector()`` and says whose mean it is now (``None``: it failed)."""
        import torch

        rounds = []
        for _ in range(self._rounds):
            torch.mul(self.known, self.rank + 1, out=vector())
            self.wait()
            began_s = time.perf_counter()
            members = step()
            took_s = time.perf_counter() - began_s
            self.wait()  # what follows, on few cores, would slow those that still average
            scale = statistics.fmean(m + 1 for m in members) if members else self.rank + 1
            error = float((vector() - scale * self.known).abs().max())
            rounds.append({"took_s": took_s, "members": members, "error": error})
        self.wait()
        out.with_suffix(".part").write_text(json.dumps(rounds))
        out.with_suffix(".part").rename(out)


# -- Ragtag: this file is the script of `ragtag run`


def ragtag_peer(arguments: argparse.Namespace) -> None:
    """One peer."""
    import torch

    import ragtag

    crew = ragtag.join()
    peer = Peer(crew.rank, arguments)
    parameter = torch.nn.Parameter(peer.known.clone())
    outcomes = []
    optimizer = crew.optimizer(
        torch.optim.SGD([parameter], lr=0.0),
        averager=getattr(ragtag, arguments.side)(group=arguments.group),
        on_outcome=outcomes.append,
    )

    def step() -> list[int] | None:
        optimizer.step()
        outcome = outcomes.pop()
        whole = outcome.heard == (1 << len(outcome.members)) - 1  # per chunk: all of the group are in it
        return sorted(outcome.members) if outcome.members and whole.all() else None

    peer.measure(lambda: parameter.data, step, arguments.out / f"{crew.rank}.json")
    crew.leave()


def run_ragtag(averager: str, arguments: argparse.Namespace, out: Path, gate: Gate) -> None:
    """All peers, by the launcher that users have."""
    command = [sys.executable, "-m", "ragtag.app.cli.main", "run", "-n", str(arguments.n), "--no-watch"]
    command += ["-o", str(out / "run"), __file__, *_side(averager, arguments, out, gate)]
    subprocess.run(command, check=True, timeout=_limit_s(arguments), stdout=sys.stderr)


# -- hivemind: this file in its own Python


def hivemind_peer(rank: int, arguments: argparse.Namespace, first, others) -> None:
    """One peer; runs in a forked process that has imported nothing yet."""
    import hivemind

    known = [] if rank == 0 else others.get(timeout=DEADLINE_S)
    dht = hivemind.DHT(initial_peers=known, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if rank == 0:
        first.put([str(address) for address in dht.get_visible_maddrs()])
    peer = Peer(rank, arguments)
    vector = peer.known.clone()
    bits = max(0, (arguments.n // arguments.group - 1).bit_length())
    averager = hivemind.averaging.DecentralizedAverager(
        [vector],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=arguments.group,
        min_group_size=arguments.group,
        initial_group_bits=format(rank // arguments.group, f"0{bits}b") if bits else "",
        min_matchmaking_time=arguments.wait_s,
        request_timeout=0.8 * arguments.wait_s,
    )

    def step() -> list[int] | None:
        try:
            group = averager.step(gather=rank, timeout=DEADLINE_S / 3)
        except Exception as error:  # what it raises is its own; the round counts as failed
            print(f"hivemind peer {rank}: {error!r}", file=sys.stderr)
            return None
        return sorted(group.values()) if group else None

    peer.measure(lambda: vector, step, arguments.out / f"{rank}.json")
    averager.shutdown()
    dht.shutdown()


def hivemind_crew(arguments: argparse.Namespace) -> None:
    """All peers."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    first, others = context.Queue(), context.Queue()
    peers = [
        context.Process(target=hivemind_peer, args=(rank, arguments, first, others))
        for rank in range(arguments.n)
    ]
    for peer in peers:
        peer.start()
    known = first.get(timeout=DEADLINE_S)
    for _ in peers[1:]:
        others.put(known)
    for peer in peers:
        peer.join(_limit_s(arguments))
        if peer.is_alive():
            peer.kill()


def run_hivemind(arguments: argparse.Namespace, out: Path, gate: Gate, wait_s: float) -> None:
    """All peers, in the Python that has it. It is told to use one thread, as the others."""
    command = [arguments.hivemind_python, __file__, *_side("hivemind", arguments, out, gate)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [*command, "--wait-s", str(wait_s)],
        check=True,
        timeout=_limit_s(arguments),
        stdout=sys.stderr,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )


# -- Both


def _side(side: str, arguments: argparse.Namespace, out: Path, gate: Gate) -> list[str]:
    told = {"side": side, "out": out, "gate": gate.port, "n": arguments.n, "group": arguments.group}
    told |= {"values": arguments.values, "rounds": arguments.rounds}
    return [part for name, value in told.items() for part in (f"--{name}", str(value))]


def _limit_s(arguments: argparse.Namespace) -> float:
    return DEADLINE_S + (WARM_UP + arguments.rounds) * DEADLINE_S / 3


def one_turn(side: str, arguments: argparse.Namespace, wait_s: float = 0.0) -> list[dict]:
    """Rounds of one side, without those that warm up: each with all peers' measurements."""
    with tempfile.TemporaryDirectory(prefix="ragtag-hivemind-") as folder:
        gate, out = Gate(arguments.n), Path(folder)
        if side in OURS:
            run_ragtag(side, arguments, out, gate)
        else:
            run_hivemind(arguments, out, gate, wait_s)
        peers = [json.loads((out / f"{rank}.json").read_text()) for rank in range(arguments.n)]
    rounds = []
    for number in range(WARM_UP, WARM_UP + arguments.rounds):
        told = [peer[number] for peer in peers]
        groups = {tuple(one["members"]) if one["members"] else None for one in told}
        rounds.append(
            {
                "took_s": max(one["took_s"] for one in told),
                "groups": sorted(list(group) for group in groups if group),
                "whole": _whole([one["members"] for one in told]),
                "error": max(one["error"] for one in told),
            }
        )
    return rounds


def _whole(members: list[list[int] | None]) -> bool:
    """Whether every peer has averaged in a group of two or more, and all in it say so."""
    return all(mine and len(mine) > 1 and all(members[other] == mine for other in mine) for mine in members)


def summary(rounds: list[dict]) -> dict:
    """Of the rounds of all turns."""
    times = [one["took_s"] for one in rounds]
    return {
        "rounds": len(rounds),
        "median_s": statistics.median(times),
        "quartiles_s": statistics.quantiles(times, n=4) if len(times) > 1 else times,
        "slowest_s": max(times),
        "group_mean": statistics.fmean(len(group) for one in rounds for group in one["groups"] or [[]]),
        "whole_share": statistics.fmean(one["whole"] for one in rounds),
        "largest_error": max((one["error"] for one in rounds if one["whole"]), default=None),
    }


def best_wait_s(arguments: argparse.Namespace) -> tuple[float, dict[str, dict]]:
    """hivemind's fastest min_matchmaking_time whose groups all fill; else the one with most whole groups."""
    tried = {}
    for wait_s in arguments.matchmaking:
        tried[wait_s] = summary(one_turn("hivemind", arguments, wait_s))
        print(f"  hivemind, min_matchmaking_time {wait_s:g} s: {_line(tried[wait_s])}", flush=True)
    best = min(tried, key=lambda wait_s: (-tried[wait_s]["whole_share"], tried[wait_s]["median_s"]))
    return best, {f"{wait_s:g}": result for wait_s, result in tried.items()}


def _line(result: dict) -> str:
    error = "" if result["largest_error"] is None else f", error {result['largest_error']:.1e}"
    groups = f"groups of {result['group_mean']:.1f}, whole in {result['whole_share']:.0%} of rounds"
    return f"median {result['median_s']:.3f} s, {groups}{error}"


def parsed() -> argparse.Namespace:
    """The command line; those of a side are for the processes that this one starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hivemind-python", help="the Python of an environment that has hivemind")
    parser.add_argument("-n", "--n", type=int, default=8, help="peers")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument(
        "--values", type=lambda text: int(float(text)), default=10_000_000, help="float32 each"
    )
    parser.add_argument("--rounds", type=int, default=10, help="in each turn")
    parser.add_argument("--turns", type=int, default=3, help="of each side")
    parser.add_argument(
        "--matchmaking",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.25, 0.5, 1.0, 2.0],
        help="hivemind's min_matchmaking_time to choose from, in seconds",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--side", choices=WAYS, help=argparse.SUPPRESS)  # these are for the peers
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--wait-s", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is None and arguments.hivemind_python is None:
        parser.error("give --hivemind-python: the Python of an environment that has hivemind")
    return arguments


def main() -> None:
    """Turns of both sides, and the ratio of the medians."""
    arguments = parsed()
    if arguments.side in OURS:
        ragtag_peer(arguments)
        return
    if arguments.side == "hivemind":
        hivemind_crew(arguments)
        return
    made = how()
    megabytes = arguments.values * 4 / 1e6
    print(f"{arguments.n} peers, groups of {arguments.group}, {megabytes:g} MB, matchmaking and one round:")
    best, tried = best_wait_s(arguments)
    rounds: dict[str, list[dict]] = {way: [] for way in WAYS}
    for turn in range(arguments.turns):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            rounds[way] += one_turn(way, arguments, best)
            print(f"  turn {turn + 1}, {way}: {_line(summary(rounds[way]))}", flush=True)
    results = {way: summary(found) for way, found in rounds.items()}
    theirs_s = results["hivemind"]["median_s"]
    ratios = {way: theirs_s / results[way]["median_s"] for way in OURS}
    version = "import hivemind, torch; print(hivemind.__version__, torch.__version__)"
    asked = subprocess.run(
        [arguments.hivemind_python, "-c", version],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    figures = {
        **made,
        "command": made["command"].replace(arguments.hivemind_python, "HM/bin/python"),
        "hivemind": dict(zip(("version", "torch"), asked.stdout.split()[-2:], strict=True)),
        "peers": arguments.n,
        "group": arguments.group,
        "values": arguments.values,
        "min_matchmaking_time_s": best,
        "tried": tried,
        "results": results,
        "hivemind_takes_times": ratios,
        "rounds": rounds,
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(figures, indent=1) + "\n")
    for way, result in results.items():
        times = f"; hivemind takes {ratios[way]:.1f} times as long" if way in OURS else ""
        print(f"{way:<13} {_line(result)}{times}")


if __name__ == "__main__":
    main()
