"""Joining a crew: alone, with others, with the wrong ones, with none; and whole crews of processes."""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._dynamo  # joining imports it first, for seconds
from torch.utils.data import DataLoader, TensorDataset

import ragtag
from ragtag.app.crew.join import JoinError
from ragtag.app.crew.transport import SoloTransport
from ragtag.app.crew.way import Way
from ragtag.app.environment import VARIABLES, Place
from ragtag.app.invitation.token import decode, kept_token
from ragtag.app.join import join
from ragtag.app.launch import launch
from ragtag.app.launch.events import Ended, Event, Printed
from ragtag.app.report import report_json
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.core.channels import channel_of
from ragtag.core.types import Met
from ragtag.core.wire import VERSION, Identity
from ragtag.network.driver.driver import Driver
from ragtag.network.link.udp import PortInUse, UdpLink
from ragtag.protocols.crew.joining import read_hello
from ragtag.protocols.node import Node
from ragtag.protocols.sealing.sessions import CARD_BYTES
from ragtag.training.optimizer.optimizer import CrewOptimizer
from tests.network.crew import PATIENCE_S, until

SRC = Path(__file__).parents[3] / "src"
GIVE_UP_S = 1.0
CREW = "otters"
HELLO = {"ragtag": ragtag.__version__, "wire": VERSION, "size": 2, "seed": 5, "role": 0}


@pytest.fixture(autouse=True)
def nobody_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Others:
    """The rest of a crew of which this process becomes peer 0; it says what it is told to."""

    def __init__(self, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = n
        self._undo = ExitStack()
        self.mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._undo.callback(self.mine.close)
        self.mine.bind(("127.0.0.1", 0))
        self.endpoints = [UdpLink() for _ in range(n - 1)]
        self.addresses = [self.mine.getsockname(), *(endpoint.address for endpoint in self.endpoints)]
        for endpoint in self.endpoints:
            self._undo.callback(endpoint.close)
        self.fd = os.dup(self.mine.fileno())
        place = Place(0, n, CREW, seed=5, peers=tuple(self.addresses), socket_fd=self.fd)
        for name, value in place.variables().items():
            monkeypatch.setenv(name, value)

    def say(self, peer: int, blob: bytes) -> Any:
        """A peer starts, and tells ``blob`` first."""
        endpoint = self.endpoints[peer - 1]
        addresses = dict(enumerate(self.addresses))
        driver = Driver(Node(peer, self.n, 5), endpoint, Identity(CREW, peer), addresses)
        driver.start()
        self._undo.callback(driver.close, 0.0)
        return driver.meet(0, blob, PATIENCE_S)

    def close(self) -> None:
        self._undo.close()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    others = Others(2, monkeypatch)
    yield others
    others.close()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Others]:
    others = Others(3, monkeypatch)
    yield others
    others.close()


def hello(**other: object) -> bytes:
    return msgspec.json.encode({**HELLO, **other})


# -- Alone


def test_alone_a_script_trains_as_it_would_without() -> None:
    data = TensorDataset(torch.arange(12.0).reshape(12, 1))
    with ragtag.join() as crew:
        assert (crew.rank, crew.size, crew.live, crew.seed) == (0, 1, {0}, 0)
        model, plain = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        plain.load_state_dict(model.state_dict())
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
        ordinary = torch.optim.SGD(plain.parameters(), lr=1e-3)
        for (batch,) in crew.split(DataLoader(data, batch_size=4)):
            for this, by in ((model, optimizer), (plain, ordinary)):
                by.zero_grad()
                this(batch).square().mean().backward()
                by.step()
        assert torch.equal(model.weight, plain.weight)
        assert torch.equal(model.bias, plain.bias)
        crew.log_step(1.0, 4)
        with pytest.raises(RuntimeError, match="nobody can join this peer: start it by `ragtag run`"):
            crew.invitation()
    crew.leave()  # twice does no harm


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"deadline_s": "60"}, ValueError, "deadline_s is '60'; it is a number of seconds, above 0"),
        ({"deadline_s": -1}, ValueError, "deadline_s is -1; it is a number of seconds, above 0"),
        ({"deadline_s": math.nan}, ValueError, "deadline_s is nan; it is a number of seconds, above 0"),
        ({"client": "no"}, TypeError, "client is 'no'; it is True or False"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        ragtag.join(**options)


@pytest.mark.slow
def test_a_process_that_imports_the_script_of_a_peer_is_none(tmp_path: Path) -> None:
    """As a DataLoader's worker does under spawn. It had its parent's seat, or came as one peer more."""
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, ragtag\n"
        "crew = ragtag.join()\n"
        'if __name__ == "__main__":\n'
        '    worker = multiprocessing.get_context("spawn").Process(target=print)\n'
        "    worker.start()\n"
        "    worker.join()\n"
        "    print(worker.exitcode)\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAGTAG_")} | {"PYTHONPATH": str(SRC)}
    shown = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=True
    )
    assert shown.stdout == "1\n"
    assert "JoinError: ragtag.join() in a process that this script has started" in shown.stderr


def test_optimizers_are_told_apart_by_name_or_by_the_order_in_which_they_are_made() -> None:
    def made(crew: ragtag.Crew, name: str | None = None) -> CrewOptimizer:
        model = torch.nn.Linear(2, 2)
        return crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, name=name)

    with ragtag.join() as crew:
        optimizers = [made(crew, name) for name in (None, "critic", None, "model 3", None)]
        assert [o.name for o in optimizers] == ["model", "critic", "model 2", "model 3", "model 4"]
        assert [o._averaged.channel for o in optimizers] == [channel_of(o.name) for o in optimizers]
        for name in ("critic", "model"):
            with pytest.raises(ValueError, match=f"'{name}' is averaged already: .* a name of its own"):
                made(crew, name)
        for name in ("", "a/b", "x" * 65):
            with pytest.raises(ValueError, match="give 1 to 64 printable characters without a slash"):
                made(crew, name)


def test_channels_beside_a_sparse_optimizers_own_are_none_that_who_joins_anew_waits_on() -> None:
    """They may be quiet until models are averaged, or for good."""
    model = torch.nn.Linear(8, 8)
    with ragtag.join() as crew:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = crew.optimizer(sgd, model=model, compress=ragtag.TopK())
        transport = crew._peer.transport
        assert isinstance(transport, SoloTransport)
        names = ("model", "model/models", "model/whole")
        assert set(transport._node.channels) == {channel_of(name) for name in names}
        assert crew._peer._entered == [optimizer._averaged.channel]


def test_one_loader_is_split_once_and_counts_its_epochs() -> None:
    loader = DataLoader(TensorDataset(torch.arange(9)), batch_size=3, shuffle=True)
    with ragtag.join() as crew:
        split = crew.split(loader)
        orders = []
        for epoch in range(3):
            again = crew.split(loader)
            assert again is split
            assert again.epoch == epoch
            orders.append(torch.cat([batch for (batch,) in again]).tolist())
        assert all(sorted(order) == list(range(9)) for order in orders)
        assert orders[0] != orders[1] != orders[2]
        assert crew.split(DataLoader(loader.dataset)) is not split
        for again_with in ({"seed": 3}, {"shards": [[0, 1]]}):
            with pytest.raises(ValueError, match="split already"):
                crew.split(loader, **again_with)  # type: ignore[arg-type]
        sized = DataLoader(loader.dataset, batch_size=3)
        first = crew.split(sized, sizes=ragtag.BatchSizes(most=6), seed=1)
        assert crew.split(sized, sizes=ragtag.BatchSizes(most=6), seed=1) is first  # as in a loop over epochs
        with pytest.raises(ValueError, match="by other sizes"):
            crew.split(sized, sizes=ragtag.BatchSizes(most=4))


def test_a_crew_of_one_writes_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(0, 1, CREW, seed=7, run_folder=tmp_path, peers=(("127.0.0.1", 4000),))
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="no more fish"), ragtag.join() as crew:
        assert (crew.size, crew.seed) == (1, 7)
        crew.log_step(0.5, 32)
        crew.log_step(0.25, 32)
        raise RuntimeError("no more fish")
    records = list(read_run(tmp_path).records())
    assert [type(record) for record in records] == [
        trace.Join, trace.Step, trace.Step, trace.Error, trace.Leave,
    ]  # fmt: skip
    assert isinstance(records[3], trace.Error)
    assert records[3].what == "RuntimeError: no more fish"
    assert isinstance(records[4], trace.Leave)
    assert (records[4].steps, records[4].samples, records[4].failed) == (2, 64, True)


@pytest.mark.parametrize(("error", "failed"), [("RuntimeError('no more fish')", True), ("SystemExit", False)])
def test_a_script_that_an_error_ends_has_failed_also_where_no_with_says_so(
    tmp_path: Path, error: str, failed: bool
) -> None:
    place = Place(0, 1, CREW, run_folder=tmp_path, peers=(("127.0.0.1", 4000),))
    env = dict(os.environ) | place.variables() | {"PYTHONPATH": str(SRC)}
    code = f"import ragtag; crew = ragtag.join(); raise {error}"
    subprocess.run([sys.executable, "-c", code], env=env, timeout=PATIENCE_S, capture_output=True)
    records = list(read_run(tmp_path).records())
    (leave,) = [record for record in records if isinstance(record, trace.Leave)]
    assert leave.failed == failed
    said = [record.what for record in records if isinstance(record, trace.Error)]
    assert said == (["RuntimeError: no more fish"] if failed else [])


@pytest.mark.parametrize(
    ("error", "what"),
    [(SystemExit(0), ""), (SystemExit(), ""), (KeyboardInterrupt(), ""), (SystemExit(3), "SystemExit: 3")],
)
def test_what_is_no_failure_is_not_recorded_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, what: str
) -> None:
    place = Place(0, 1, CREW, run_folder=tmp_path, peers=(("127.0.0.1", 4000),))
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(type(error)), ragtag.join():
        raise error
    records = list(read_run(tmp_path).records())
    assert [record.what for record in records if isinstance(record, trace.Error)] == ([what] if what else [])
    assert [record.failed for record in records if isinstance(record, trace.Leave)] == [bool(what)]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), SystemExit(0), RuntimeError("no more fish")])
def test_only_a_training_that_came_to_its_end_has_a_final_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    place = Place(0, 1, CREW, run_folder=tmp_path, peers=(("127.0.0.1", 4000),))
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(2, 1)
    with nullcontext() if error is None else pytest.raises(type(error)), ragtag.join() as crew:
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if error is not None:
            raise error
    (leave,) = [record for record in read_run(tmp_path).records() if isinstance(record, trace.Leave)]
    assert bool(leave.digest) == (error is None)
    assert leave.failed == isinstance(error, RuntimeError)


def test_where_a_launcher_listens_an_error_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    place = Place(0, 1, CREW, run_folder=tmp_path, peers=(("127.0.0.1", 4000),), ready_fd=write)
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="no more fish"), ragtag.join():
        raise RuntimeError("no more fish")
    os.close(read)
    os.close(write)
    assert [type(record) for record in read_run(tmp_path).records()] == [trace.Join, trace.Leave]


# -- The others


def test_peers_that_agree_meet(two: Others) -> None:
    heard = two.say(1, hello())
    with join(deadline_s=PATIENCE_S) as crew:
        assert (crew.rank, crew.size, crew.live, crew.seed) == (0, 2, {0, 1}, 5)
    met = heard.result(PATIENCE_S)
    assert isinstance(met, Met)
    assert msgspec.json.decode(met.blobs[0]) == HELLO


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"size": 3}, "peer 1 has another number of peers: 3 there, 2 here"),
        ({"seed": 6}, "peer 1 has another seed: 6 there, 5 here"),
        ({"ragtag": "0.0.9"}, f"peer 1 has another version of Ragtag: 0.0.9 there, {ragtag.__version__}"),
    ],
)
def test_a_peer_of_another_crew_is_not_joined(two: Others, other: dict[str, Any], said: str) -> None:
    two.say(1, hello(**other))
    with pytest.raises(JoinError, match=said):
        join(deadline_s=PATIENCE_S)


def test_the_larger_party_goes_on_without_one_of_another_seed(
    three: Others, caplog: pytest.LogCaptureFixture
) -> None:
    three.say(1, hello(size=3))
    three.say(2, hello(size=3, seed=6))
    with caplog.at_level(logging.WARNING, "ragtag"), join(deadline_s=PATIENCE_S) as crew:
        until(lambda: crew.live == {0, 1}, "peer 2 is left out")
    refused = "peer 2 is refused: peer 2 has another seed: 6 there, 5 here; make them equal"
    assert refused in caplog.messages


def test_of_the_smaller_party_the_one_that_differs_is_named(three: Others) -> None:
    three.say(1, hello(size=3, seed=6))
    three.say(2, hello(size=3, seed=6))
    with pytest.raises(JoinError, match="peer 1 has another seed: 6 there, 5 here"):
        join(deadline_s=PATIENCE_S)


@pytest.mark.parametrize(
    "blob", [b"", b"\xff\xfe", b"[" * 5000, b"{}", hello(seed="five"), b"GET / HTTP/1.1"]
)
def test_what_is_no_hello_is_refused(two: Others, blob: bytes) -> None:
    with pytest.raises(ValueError):
        read_hello(blob)
    two.say(1, blob)
    with pytest.raises(JoinError, match="peer 1 says no hello that can be read"):
        join(deadline_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("host", "seal", "seals"),
    [
        ("10.1.2.3", None, True), ("fd00::2", None, True), ("127.0.0.1", None, False), ("::1", None, False),
        ("10.1.2.3", False, False), ("127.0.0.1", True, True),
    ],
)  # fmt: skip
def test_a_peer_seals_unless_its_address_is_loopback_or_it_is_told_otherwise(
    host: str, seal: bool | None, seals: bool
) -> None:
    way = Way(Place(0, 2, CREW, seal=seal), None, 0.0, GIVE_UP_S)
    assert len(way.card(host)) == (CARD_BYTES if seals else 0)


def test_a_peer_that_does_not_answer_is_left_out(three: Others, caplog: pytest.LogCaptureFixture) -> None:
    three.say(1, hello(size=3))
    with caplog.at_level(logging.WARNING, "ragtag"), join(deadline_s=GIVE_UP_S) as crew:
        assert crew.size == 3
    assert f"peer 2 did not answer within {GIVE_UP_S:g} s; going on without" in caplog.messages


def test_nobody_answers(three: Others) -> None:
    began_s = time.monotonic()
    with pytest.raises(JoinError) as error:
        join(deadline_s=GIVE_UP_S)
    assert GIVE_UP_S <= time.monotonic() - began_s < PATIENCE_S
    assert str(error.value) == (
        "none of the other 2 peers of crew 'otters' answered within 1 s; are they started, with the same "
        "crew name, and does the firewall let UDP through?"
    )


def test_a_crew_of_another_name_is_no_answer(two: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGTAG_CREW", "beavers")
    two.say(1, hello())
    with pytest.raises(JoinError, match="the other peer of crew 'beavers' did not answer within 1 s"):
        join(deadline_s=GIVE_UP_S)


def test_another_wire_format_is_named(two: Others) -> None:
    newer = bytearray(64)
    newer[0] = VERSION + 1
    newer[2:4] = Identity(CREW, 1).crew_id.to_bytes(2, "little")
    two.endpoints[0].send_short(bytes(newer), two.addresses[0])
    with pytest.raises(JoinError, match=f"peer 1 of crew 'otters' speaks another wire .* {VERSION};"):
        join(deadline_s=GIVE_UP_S)


def test_a_port_in_use_is_named(two: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGTAG_FD")
    port = two.addresses[0][1]
    with pytest.raises(PortInUse, match=f"UDP port {port} on 127.0.0.1 is in use by another program"):
        join(deadline_s=GIVE_UP_S)


def test_a_failed_join_gives_its_port_back(two: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGTAG_FD")
    two.mine.close()
    os.close(two.fd)
    for _ in range(2):
        with pytest.raises(JoinError, match="did not answer within"):
            join(deadline_s=0.2)


def test_what_a_store_does_not_answer_is_a_join_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(JoinError, match=f"torchrun's store at 127.0.0.1:{port} did not answer"):
        join(deadline_s=GIVE_UP_S)


# -- Whole crews of processes

SCRIPT = """
import os, signal, sys, time
import torch, ragtag
crew = ragtag.join(deadline_s=GIVE_UP_S)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(crew.rank))
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
"""
TRAIN = """
with crew:
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    for at in range(8):
        if at == 5 and crew.rank == 2:
            raise RuntimeError("the otter is asleep")
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if at == 3 and crew.rank == 1:
            model[1].weight.data[0, 2] = float("inf")
        optimizer.step()
        print(bin(int(optimizer.outcome.heard[0])))
    print("weights", torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes().hex())
"""
AVERAGE = """
with crew:
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    optimizer.step()
    host, _ = crew._peer.driver.own_member_address
    print(bin(int(optimizer.outcome.heard[0])), host)
"""
DIE = """
if crew.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
began_s = time.monotonic()
with crew:
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    for _ in range(5):
        model(inputs).square().mean().backward()
        optimizer.step()
    print(time.monotonic() - began_s, bin(int(optimizer.outcome.heard[0])), sorted(crew.live))
"""


def launched(
    folder: Path, n: int, text: str, give_up_s: float, **options: Any
) -> tuple[list[Event], dict[int, Ended]]:
    script = folder / "peer.py"
    script.write_text(SCRIPT.replace("GIVE_UP_S", str(give_up_s)) + text)
    events: list[Event] = []
    env = {"PYTHONPATH": str(SRC)}
    result = launch(n, [str(script)], on_event=events.append, env=env, seed=3, **options)
    return events, {end.peer: end for end in result.ends}


def lines(events: list[Event], peer: int) -> list[str]:
    return [e.text for e in events if isinstance(e, Printed) and e.peer == peer and not e.error]


@pytest.mark.slow
def test_a_peer_with_infinity_and_one_that_raises_end_and_the_others_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    events, ends = launched(tmp_path, 4, TRAIN, PATIENCE_S, on_error="continue", run_folder=run)
    assert {peer: end.failed for peer, end in ends.items()} == {0: False, 1: True, 2: True, 3: False}, events
    assert "NotFinite: parameter '1.weight'" in ends[1].error.splitlines()[-1]
    assert ends[2].error.splitlines()[-1] == "RuntimeError: the otter is asleep"
    shown = [
        e.text for e in events if isinstance(e, Printed) and e.text == "RuntimeError: the otter is asleep"
    ]
    assert len(shown) == ends[2].shown  # at its end, or before where it took long to end: once
    assert lines(events, 0)[:3] == ["0b1111"] * 3
    assert lines(events, 0)[-2] == "0b1001"
    assert lines(events, 0)[-1].startswith("weights ")
    assert lines(events, 0)[-1] == lines(events, 3)[-1]
    run_trace = read_run(run)
    records = list(run_trace.records())
    errors = [record for record in records if isinstance(record, trace.Error)]
    assert sorted(record.peer for record in errors) == [1, 2]  # each once, by the launcher
    (asleep,) = [record for record in errors if record.peer == 2]
    assert asleep.what == "RuntimeError: the otter is asleep"
    assert asleep.detail == ends[2].error
    left = {record.peer: record.failed for record in records if isinstance(record, trace.Leave)}
    assert left == {trace.CREW: False, 0: False, 1: True, 2: True, 3: False}
    assert run_trace.run is not None
    assert run_trace.run.method == "allreduce"
    said = report_json(run)
    assert {p["peer"]: p["state"] for p in said["per_peer"]} == {
        0: "ended", 1: "failed", 2: "failed", 3: "ended",
    }  # fmt: skip
    assert (said["method"], said["errors"], said["damage"]) == ("allreduce", 2, [])


@pytest.mark.slow
def test_torchrun_with_a_master_of_ipv6_on_machines_of_one_peer_each(tmp_path: Path) -> None:
    """Sockets are of the family that the addresses have, for data and for membership."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as taken:
        try:
            taken.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 loopback here: {error}")
        port = taken.getsockname()[1]
    script = tmp_path / "peer.py"
    script.write_text(SCRIPT.replace("GIVE_UP_S", str(PATIENCE_S)) + AVERAGE)
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": str(port)}
    env = {**os.environ, **told, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    peers = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for peer in peers:
            out, error = peer.communicate(timeout=2 * PATIENCE_S)
            assert peer.returncode == 0, error
            assert out.split() == ["0b11", "::1"]
    finally:
        for peer in peers:
            peer.kill()


@pytest.mark.slow  # in one process: test_transport
def test_a_peer_killed_before_its_first_average_holds_nobody_up_for_long(tmp_path: Path) -> None:
    give_up_s = 8.0  # as long as importing torch may take one peer longer than another
    events, ends = launched(tmp_path, 3, DIE, give_up_s)
    assert ends[2].status == -9
    for peer in (0, 1):
        assert not ends[peer].failed, ends[peer].error
        took_s, heard, live = lines(events, peer)[-1].split(maxsplit=2)
        assert heard == "0b11"
        assert live in ("[0, 1]", f"[{peer}]")  # the other one may have left since
        assert float(took_s) < 1.75 * give_up_s  # membership has declared it dead long before


# -- Again

AGAIN = """
for k in range(3):
    torch.manual_seed(crew.rank)
    model = torch.nn.Linear(3, 1)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    for _ in range(2 + 20 * (crew.rank == k)):  # one is late for the next crew
        optimizer.average()
        time.sleep(0.01)
    print(k, crew.rank, sorted(crew.live | {crew.rank}), optimizer.outcome.round, model.weight.tolist())
    crew.leave()
    if k < 2:
        crew = ragtag.join(deadline_s=30.0)
"""


@pytest.mark.slow
def test_peers_that_have_left_form_a_crew_again_and_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    events, ends = launched(tmp_path, 2, AGAIN, PATIENCE_S, run_folder=run)
    assert not any(end.failed for end in ends.values()), events
    for peer in range(2):
        said = lines(events, peer)
        assert [line.split()[:2] for line in said] == [[str(k), str(peer)] for k in range(3)]
    names = []
    for folder in (run, run / "crew-2", run / "crew-3"):
        found = read_run(folder)
        assert found.run is not None
        records = list(found.records())
        token = decode(kept_token(folder))
        assert not token.number  # it is the crew's own, of which invitations can be made
        names.append(token.crew)
        joined = [r for r in records if isinstance(r, trace.Join)]
        assert sorted((r.peer, r.others) for r in joined) == [(0, 1), (1, 1)], folder
        assert any(r.contributors == 2.0 for r in records if isinstance(r, trace.Round)), folder
    assert names == [names[0], f"{names[0]}.2", f"{names[0]}.3"]


DIED = """
if crew.rank == 2:
    os.kill(os.getpid(), 9)
give_up_s = time.monotonic() + GIVE_UP_S
while 2 in crew.live:
    assert time.monotonic() < give_up_s
    time.sleep(0.01)
for k in range(2):
    crew.leave()
    began_s = time.monotonic()
    crew = ragtag.join(deadline_s=GIVE_UP_S)
    torch.manual_seed(0)
    optimizer = crew.optimizer(torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1))
    optimizer.average()
    print(time.monotonic() - began_s, bin(int(optimizer.outcome.heard[0])))
"""


@pytest.mark.slow
def test_who_died_in_an_earlier_crew_is_not_waited_for_in_later_ones(tmp_path: Path) -> None:
    events, ends = launched(tmp_path, 3, DIED.replace("GIVE_UP_S", str(PATIENCE_S)), PATIENCE_S)
    for peer in (0, 1):
        assert not ends[peer].failed, events
        said = [line.split() for line in lines(events, peer)]
        assert [heard for _, heard in said] == ["0b11"] * 2
        assert all(float(took_s) < PATIENCE_S / 2 for took_s, _ in said), said


def test_a_crew_that_was_not_left_is_not_joined_again(two: Others) -> None:
    two.say(1, hello())
    with join(deadline_s=PATIENCE_S) as crew:
        with pytest.raises(JoinError, match=r"peer 0 of its crew already: .*leave\(\) before joining again"):
            join(deadline_s=GIVE_UP_S)
        assert crew.live == {0, 1}


def test_the_lowest_peer_warns_once_what_batches_come_to_together(
    two: Others, caplog: pytest.LogCaptureFixture
) -> None:
    two.say(1, hello())
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=8)
    with join(deadline_s=PATIENCE_S) as crew:
        for _ in range(2):
            crew.split(loader)
        crew.split(DataLoader(loader.dataset))
    said = [message for message in caplog.messages if message.startswith("2 peers with batches of 8")]
    assert len(said) == 1
    caplog.clear()
    for name in VARIABLES:
        os.environ.pop(name, None)
    with join() as alone:
        alone.split(loader)
    assert not caplog.messages


def test_alone_any_number_of_crews_may_be_joined() -> None:
    crews = [join() for _ in range(3)]
    for crew in crews:
        assert crew.live == {0}
        crew.leave()
    assert not join().left


def test_a_later_crew_has_a_name_and_a_key_of_its_own() -> None:
    place = Place(1, 2, "otters", key=bytes(32), run_folder=Path("run"), name="peer-1")
    assert place.of_crew(1) == place
    second, third = place.of_crew(2), place.of_crew(3)
    assert (second.crew, second.run_folder) == ("otters.2", Path("run/crew-2"))
    assert len({place.key, second.key, third.key}) == 3
    assert second.key == replace(place, rank=0).of_crew(2).key
    invited = replace(place, token="a token")
    assert (invited.of_crew(2).crew, invited.of_crew(2).key) == (place.crew, place.key)
    assert invited.of_crew(2).name == "peer-1.2"


# -- Clocks

CLOCKS = """
import time as clock
away_s = OFFSETS[int(os.environ["RAGTAG_RANK"])]
true = clock.time
clock.time = lambda: true() + away_s
with ragtag.join(deadline_s=GIVE_UP_S) as crew:
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    for at in range(30):
        if at == 10:
            away_s -= STEP
        model(inputs).square().mean().backward()
        optimizer.step()
        crew.log_step(0.0, 1)
        clock.sleep(0.02)
    print(bin(int(optimizer.outcome.heard[0])))
"""


def clocked(folder: Path, offsets: tuple[float, ...], step_s: float) -> tuple[list[Event], dict[int, Ended]]:
    """A crew whose machines' clocks are so far apart, and are set back by ``step_s`` while it trains."""
    text = CLOCKS.replace("OFFSETS", repr(offsets)).replace("STEP", repr(step_s))
    script = SCRIPT.replace("crew = ragtag.join(deadline_s=GIVE_UP_S)\n", "")
    script = script.replace("manual_seed(crew.rank)", 'manual_seed(int(os.environ["RAGTAG_RANK"]))')
    path = folder / "peer.py"
    path.write_text((script + text).replace("GIVE_UP_S", str(PATIENCE_S)))
    events: list[Event] = []
    env = {"PYTHONPATH": str(SRC)}
    run = folder / "run"
    result = launch(len(offsets), [str(path)], on_event=events.append, env=env, run_folder=run)
    return events, {end.peer: end for end in result.ends}


def times_of(folder: Path, peer: int) -> list[float]:
    path = folder / "run" / f"peer-{peer:02d}.jsonl"
    return [trace.decode(line).t for line in path.read_text().splitlines()]


def test_a_script_that_a_peer_starts_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits the environment, and no file but the standard ones."""
    read, write = os.pipe()
    for fd in (read, write):
        os.close(fd)
    for name, value in Place(1, 2, CREW, socket_fd=read, peers=(("127.0.0.1", 1),) * 2).variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JoinError, match="has the environment of peer 1, and not its socket: a script that"):
        join()


@pytest.mark.slow
def test_a_clock_that_is_set_back_moves_no_record(tmp_path: Path) -> None:
    events, ends = clocked(tmp_path, (0.0, 0.0), 3600.0)
    assert all(end.status == 0 for end in ends.values()), events
    for peer in (0, 1):
        times = times_of(tmp_path, peer)
        assert times[0] > 0.0 and times[-1] < 2 * PATIENCE_S
        assert all(b >= a - 0.1 for a, b in pairwise(times))


@pytest.mark.slow
def test_peers_whose_clocks_are_thirty_years_apart_train_together(tmp_path: Path) -> None:
    years_s = 30 * 365.25 * 86_400
    events, ends = clocked(tmp_path, (0.0, -years_s / 2, years_s / 2), 0.0)
    assert all(end.status == 0 for end in ends.values()), events
    for peer in range(3):
        assert lines(events, peer) == ["0b111"], events
    assert len(list(read_run(tmp_path / "run").records())) > 90  # of each peer the steps and the rounds
