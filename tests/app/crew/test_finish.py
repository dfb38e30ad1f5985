"""Peers begin and end with one model, over drivers in one process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ragtag
from ragtag.app.crew import finish as ending
from ragtag.app.crew import peer as peer_module
from ragtag.app.crew.peer import Peer
from ragtag.app.crew.transport import DriverTransport, SoloTransport
from ragtag.app.environment import Place
from ragtag.app.environment.announce import Announcer, Reached, read_announcements
from ragtag.core.faults import Faults, Loss
from ragtag.core.types import Joined, OpenedTogether, Posted
from ragtag.protocols.crew.board import Notices
from ragtag.protocols.crew.standing import END
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.state.whole import Finished, Stand, digest_of, last_round
from tests.app.drivers import Train, all_at_once, transports
from tests.network.crew import PATIENCE_S, Crew

_SEEDED = threading.Lock()


def model_of(seed: int) -> nn.Sequential:
    with _SEEDED:  # torch's stream is the process's, and each peer has a thread of its own
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))


def optimizer_of(model: nn.Module, transport: DriverTransport, **options: Any) -> CrewOptimizer:
    return CrewOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), transport, model=model, **options)


def step(model: nn.Module, optimizer: CrewOptimizer, seed: int) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    floating = [t.flatten() for t in model.state_dict().values() if t.is_floating_point()]
    return torch.cat(floating).clone()


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_peers_that_begin_with_other_weights_take_the_lowest_peers(average: str) -> None:
    def work(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = model_of(seed=transport.me)
        first = weights(model)
        optimizer = optimizer_of(model, transport, average=average)
        begun = Stand(digest_of(model.parameters()))
        ending.begin_alike(transport, optimizer._averaged, begun, PATIENCE_S)
        return first, weights(model)

    with Crew(3) as crew:
        found = all_at_once(transports(crew), work)
    lowest = found[0][0]
    assert not torch.equal(found[1][0], lowest)
    assert all(torch.equal(after, lowest) for _, after in found.values())


@pytest.mark.parametrize(
    ("counted", "agreed"),
    [
        ({0: "013", 1: "0123", 2: "0123", 3: "0123"}, {0: "0123", 1: "0123", 2: "0123", 3: "0123"}),
        ({0: "013", 1: "013", 2: "0123", 3: "0123"}, {0: "0123", 1: "0123", 2: "0123", 3: "0123"}),
        ({0: "013", 1: "013", 2: "0123", 3: "013"}, {0: "013", 1: "013", 2: "2", 3: "013"}),
        ({0: "0123", 1: "0123", 2: "0123", 3: "0123"}, {0: "0123", 1: "0123", 2: "0123", 3: "0123"}),
    ],
)
def test_peers_that_end_agree_on_whom_they_count_on(
    counted: dict[int, str], agreed: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A peer froze as the others ended; those that counted on it waited for those that did not."""

    def work(transport: DriverTransport) -> frozenset[int]:
        return ending._agreed(transport, frozenset(map(int, counted[transport.me])), PATIENCE_S)

    began_s = time.monotonic()
    with Crew(4, faults=Faults(loss=Loss(0.1))) as crew:
        found = all_at_once(transports(crew), work)
    assert found == {peer: frozenset(map(int, peers)) for peer, peers in agreed.items()}
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert ("ends without peers 0, 1 and 3" in caplog.text) == (agreed[2] == "2")


@pytest.mark.parametrize("resync", [0, 1000])
def test_differences_are_to_the_weights_that_all_took(resync: int) -> None:
    compress = ragtag.TopK(0.05, values="fp32", resync=resync, bypass=False)

    def work(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = model_of(seed=transport.me)
        optimizer = optimizer_of(model, transport, compress=compress)
        begun = Stand(digest_of(model.parameters()))
        ending.begin_alike(transport, optimizer._averaged, begun, PATIENCE_S)
        first = weights(model)
        for _ in range(2):
            optimizer.average()
        return first, weights(model)

    with Crew(3) as crew:
        found = all_at_once(transports(crew), work)
    for first, after in found.values():
        assert torch.equal(first, found[0][0])
        assert torch.equal(after, found[0][1])
        torch.testing.assert_close(after, first, rtol=0.0, atol=1e-6)  # nobody took a step


class Headed(nn.Module):
    """A frozen backbone with features in an order of its own, and a head."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, features), nn.BatchNorm1d(features)).requires_grad_(False)
        self.head = nn.Linear(features, 2)
        self.register_buffer("order", torch.randperm(features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs)[:, self.order])  # type: ignore[no-any-return, index]


def headed(seed: int, **options: Any) -> Headed:
    with _SEEDED:
        torch.manual_seed(seed)
        return Headed(**options)


def crew_of(transport: DriverTransport) -> ragtag.Crew:
    place = Place(transport.me, transport.n, "test", seed=1)
    return ragtag.Crew(Peer(place, transport, None, None, 0.0))


def begins(transport: DriverTransport, model: nn.Module, given: bool) -> ragtag.Crew:
    """A crew's optimizer of what is to be trained, as a script makes it, and its first average."""
    crew = crew_of(transport)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    optimizer = crew.optimizer(inner, model=model if given else None, average="gradients")
    if not given:
        step(model, optimizer, seed=1)
    return crew


@pytest.mark.parametrize("given", [True, False])
def test_peers_begin_with_one_frozen_backbone(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    crews: list[ragtag.Crew] = []

    def work(transport: DriverTransport) -> tuple[Headed, Headed]:
        first, model = headed(transport.me), headed(transport.me)
        if transport.me == 2:  # the lowest peer's, all but what is frozen
            model.head.load_state_dict(headed(0).head.state_dict())
        crews.append(begins(transport, model, given))
        return first, model

    with Crew(3) as crew, caplog.at_level(logging.INFO):
        found = all_at_once(transports(crew), work)
    lowest = found[0][0]
    for first, model in found.values():
        for name, value in model.body.state_dict().items():
            if "running" not in name and "tracked" not in name:
                assert torch.equal(value, lowest.body.state_dict()[name]), name
        assert torch.equal(model.order, lowest.order if given else first.order)  # type: ignore[arg-type]
        assert torch.equal(model.head.weight, found[0][1].head.weight)
    assert not torch.equal(found[1][0].order, lowest.order)  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("different weights: peer 1 takes those of peer 0." in text for text in said), said
    assert any(
        "different frozen parameters" in t and "peers 1 and 2 take those of peer 0." in t for t in said
    )
    for one in crews:
        one._peer.left = True


@pytest.mark.parametrize("given", [True, False])
def test_peers_begin_with_one_head_that_no_optimizer_has_and_are_told(
    given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the model is found only when it runs, the head may have been trained: it stays as it is."""
    crews: list[ragtag.Crew] = []

    def work(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = model_of(seed=transport.me)
        first = model[2].weight.detach().clone()
        crews.append(crew := crew_of(transport))
        sgd = torch.optim.SGD(model[0].parameters(), lr=0.05)
        optimizer = crew.optimizer(sgd, model=model if given else None)
        for seed in range(2):
            step(model, optimizer, seed)
        return first, model[2].weight.detach()

    with Crew(3) as crew, caplog.at_level(logging.INFO):
        found = all_at_once(transports(crew), work)
    for first, after in found.values():
        assert torch.equal(after, found[0][0] if given else first)
    beside = "different frozen parameters, others that are not averaged, or integers"
    assert (beside in caplog.text) == given
    said = [text for record in caplog.records if "no optimizer" in (text := record.getMessage())]
    assert said == [
        "4 parameters of the model need a gradient and are in no optimizer of the crew ('1.weight', "
        "'1.bias', '2.weight' and '2.bias'): what trains them is not averaged, and peers grow apart. Give "
        "them to crew.optimizer, or freeze them by requires_grad_(False)"
    ]
    for one in crews:
        one._peer.left = True


def test_what_another_optimizer_has_is_left_to_it_where_optimizers_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two optimizers share a model; the second one is made when the first one's part has been trained."""
    crews: list[ragtag.Crew] = []

    def work(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = model_of(seed=1)
        crews.append(crew := crew_of(transport))
        front, rest = model[0].parameters(), [*model[1].parameters(), *model[2].parameters()]
        made = [crew.optimizer(torch.optim.SGD(front, lr=0.05), model=model)]
        with torch.no_grad():
            model[0].bias += 1.0 + transport.me
        trained = model[0].bias.detach().clone()
        made.append(crew.optimizer(torch.optim.SGD(rest, lr=0.05), model=model))
        after = model[0].bias.detach().clone()
        for optimizer in made:
            step(model, optimizer, seed=1)
        return trained, after

    with Crew(2) as crew, caplog.at_level(logging.INFO):
        found = all_at_once(transports(crew), work)
    assert not torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(trained, after) for trained, after in found.values())
    assert "no optimizer" not in caplog.text and "different" not in caplog.text
    for one in crews:
        one._peer.left = True


def test_an_optimizer_that_is_made_in_the_first_pass_of_the_loop_has_no_forgotten_parameters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As by a script that makes each optimizer where it first needs it: after the first one's first step."""
    crews: list[ragtag.Crew] = []

    def work(transport: DriverTransport) -> None:
        model = model_of(seed=1)
        crews.append(crew := crew_of(transport))
        made: dict[str, CrewOptimizer] = {}
        for seed in range(3):
            for name, part in [("front", model[0]), ("rest", model[1:])]:
                if name not in made:
                    sgd = torch.optim.SGD(part.parameters(), lr=0.05)
                    made[name] = crew.optimizer(sgd, model=model, name=name)
                step(model, made[name], seed)

    with Crew(2) as crew, caplog.at_level(logging.INFO):
        all_at_once(transports(crew), work)
    assert "no optimizer" not in caplog.text
    for one in crews:
        one._peer.left = True


def test_buffers_of_other_forms_stay_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    crews: list[ragtag.Crew] = []

    def work(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor]:
        model = headed(seed=1)
        model.register_buffer("words", torch.arange(3 + transport.me))
        before = model.words.clone()  # type: ignore[operator, union-attr]
        crews.append(begins(transport, model, given=True))
        return before, model.words  # type: ignore[return-value]

    with Crew(2) as crew, caplog.at_level(logging.INFO):
        found = all_at_once(transports(crew), work)
    assert all(torch.equal(before, after) for before, after in found.values())
    assert "peer 1 had others than peer 0, and of other names, types or shapes none are taken" in caplog.text
    for one in crews:
        one._peer.left = True


def test_statistics_that_differ_are_taken_with_weights_that_do_not() -> None:
    crews: list[ragtag.Crew] = []

    def work(transport: DriverTransport) -> torch.Tensor:
        model = model_of(seed=1)
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(transport.me)))
        crews.append(begins(transport, model, given=True))
        return weights(model)

    with Crew(2) as crew:
        found = all_at_once(transports(crew), work)
    assert torch.equal(found[0], found[1])
    for one in crews:
        one._peer.left = True


class Large(SoloTransport):
    """Peer 0 of a crew of 65, of which it meets peer 3."""

    def __init__(self) -> None:
        super().__init__(0)
        self.n = 65

    def meet(self, meeting: str, blob: bytes, *_: Any, **__: Any) -> dict[int, bytes]:
        told = msgspec.msgpack.decode(blob, type=dict[str, Stand])
        assert meeting == "begin/model", "nobody takes anything"
        return {3: msgspec.msgpack.encode(told | {"model": Stand("another")})}


def test_a_crew_too_large_to_begin_alike_says_so(caplog: pytest.LogCaptureFixture) -> None:
    transport, model = Large(), model_of(seed=1)
    optimizer = optimizer_of(model, transport)  # type: ignore[arg-type]
    before = weights(model)
    ending.begin_alike(transport, optimizer._averaged, optimizer._averaged.stand(), PATIENCE_S)
    assert torch.equal(before, weights(model))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "peer 3 had others than peer 0, and in a crew of more than 64 nobody takes" in record.getMessage()


def test_peers_that_begin_alike_average_nothing_for_it() -> None:
    def work(transport: DriverTransport) -> bool:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport)
        ending.begin_alike(transport, optimizer._averaged, Stand(digest_of(model.parameters())), PATIENCE_S)
        return list(transport._opened) == [optimizer._averaged.channel]

    with Crew(2) as crew:
        assert all(all_at_once(transports(crew), work).values())


def test_a_guard_holds_in_the_last_mean_too() -> None:
    def work(transport: DriverTransport) -> tuple[float, Finished]:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport, every=10, guard=ragtag.TrimmedMean(0.2))
        step(model, optimizer, transport.me)
        if transport.me == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1e6)
        found = ending.finish(transport, [optimizer._averaged], PATIENCE_S, 0.0)
        return float(weights(model).abs().max()), found

    with Crew(4) as crew:
        ends = all_at_once(transports(crew), work)
    for largest, found in ends.values():
        assert largest < 10, "all four end with what three of them have learned"
        assert found.alike
        assert len(found.peers) == 4


def test_the_last_local_steps_are_in_one_agreed_mean() -> None:
    def work(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor, Finished]:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport, every=10)
        for at in range(14):
            step(model, optimizer, 100 * transport.me + at)
        apart = weights(model)
        return apart, weights_after(transport, model, optimizer), ending.Finished()

    def weights_after(transport: DriverTransport, model: nn.Module, optimizer: CrewOptimizer) -> torch.Tensor:
        found = ending.finish(transport, [optimizer._averaged], PATIENCE_S, 1.0)
        assert (found.alike, found.peers) == (True, (0, 1, 2))
        assert found.moved > 0
        return weights(model)

    with Crew(3) as crew:
        found = all_at_once(transports(crew), work)
    before = torch.stack([apart for apart, _, _ in found.values()])
    after = [own for _, own, _ in found.values()]
    assert not torch.equal(before[0], before[1])
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])
    assert torch.allclose(after[0], before.mean(0), atol=1e-6)


class Founder(DriverTransport):
    """Tells when it opens something together with others."""

    opens = threading.Event()

    def configure(self, *what: Any, together: OpenedTogether | None = None) -> None:
        if together is not None:
            self.opens.set()
        super().configure(*what, together=together)


class Late(DriverTransport):
    """Of a peer that came when the others had begun. It opens nothing before they do: where they had it open
    already, they would have averaged without it.
    """

    late = True

    def configure(self, *what: Any, together: OpenedTogether | None = None) -> None:
        if together is not None:
            Founder.opens.wait(3.0)
        super().configure(*what, together=together)


def test_the_last_local_steps_of_one_that_came_later_are_in_that_mean_too() -> None:
    """The others began apart, so they have averaged before, to take the lowest peer's weights."""
    made: dict[int, tuple[nn.Module, CrewOptimizer]] = {}

    def begin(transport: DriverTransport) -> None:
        model = model_of(seed=transport.me)
        made[transport.me] = model, optimizer_of(model, transport, every=10)
        averaged = made[transport.me][1]._averaged
        if not transport.late:
            ending.begin_alike(transport, averaged, Stand(digest_of(model.parameters())), PATIENCE_S)

    def end(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor, Finished]:
        model, optimizer = made[transport.me]
        for at in range(4):
            step(model, optimizer, 100 * transport.me + at)
        apart = weights(model)
        found = ending.finish(transport, [optimizer._averaged], 10.0, 1.0)
        return apart, weights(model), found

    with Crew(3, absent=(2,)) as crew:
        founders = {peer: Founder(driver, PATIENCE_S) for peer, driver in crew.drivers.items()}
        for driver in crew.drivers.values():
            driver.leave(2)
        assert all_at_once(founders, begin) == {0: None, 1: None}
        Founder.opens.clear()
        for driver in list(crew.drivers.values()):
            driver.call(partial(driver.engine.step, event=Joined(2)))
        newcomer = Late(crew.start(2, crew.endpoints[2]), PATIENCE_S)
        begin(newcomer)
        found = all_at_once(founders | {2: newcomer}, end)
    mean = torch.stack([apart for apart, _, _ in found.values()]).mean(0)
    for _, after, said in found.values():
        assert (said.alike, said.peers) == (True, (0, 1, 2))
        assert torch.allclose(after, mean, atol=1e-6)


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_a_peer_that_pauses_near_the_end_takes_the_others_model(average: str) -> None:
    paused, over = threading.Event(), threading.Barrier(2)

    def goes_on(transport: DriverTransport) -> tuple[torch.Tensor, Finished]:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport, average=average)
        for at in range(40):
            step(model, optimizer, 100 * transport.me + at)
        over.wait(PATIENCE_S)
        paused.set()
        found = ending.finish(transport, [optimizer._averaged], PATIENCE_S, 1.0)
        return weights(model), found

    def pauses(transport: DriverTransport) -> tuple[torch.Tensor, Finished]:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport, average=average)
        for at in range(5):
            step(model, optimizer, 100 * transport.me + at)
        assert paused.wait(PATIENCE_S)
        stale = weights(model)
        found = ending.finish(transport, [optimizer._averaged], PATIENCE_S, 1.0)
        assert not torch.equal(stale, weights(model))
        return weights(model), found

    works: dict[int, Train] = {0: goes_on, 1: goes_on, 2: pauses}
    with Crew(3) as crew:
        found = all_at_once(transports(crew), works)
    assert all(torch.equal(own, found[0][0]) for own, _ in found.values())
    for _, said in found.values():
        assert said.alike
        assert said.peers == (0, 1, 2)
        assert said.behind[2] >= 30
        assert said.digest == found[0][1].digest
    assert found[2][1].moved > 0
    assert found[0][1].moved == 0 or average == "models"


def test_with_the_model_peers_agree_on_the_crews_step() -> None:
    """One is behind, and one adds a round or two alone at its end; schedulers and checkpoints follow it."""
    paused, ended, over = threading.Event(), threading.Event(), threading.Barrier(2)
    crews: list[ragtag.Crew] = []

    def work(transport: DriverTransport) -> tuple[int, int, int]:
        model, crew = model_of(seed=1), crew_of(transport)
        crews.append(crew)
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
        for at in range(5 if transport.me == 2 else 40):
            step(model, optimizer, 100 * transport.me + at)
        if transport.me == 2:
            assert paused.wait(PATIENCE_S)
        else:
            over.wait(PATIENCE_S)
            paused.set()
        if transport.me == 1:
            for _ in range(3):
                optimizer.average()
            ended.set()
        assert ended.wait(PATIENCE_S)
        before = crew.step
        crew.finish()
        return before, crew.step, crew._peer.data.epochs.state_dict()["step"]

    with Crew(3) as crew:
        found = all_at_once(transports(crew), work)
    before = [steps for steps, _, _ in found.values()]
    assert before[2] < before[0] < before[1]
    assert [own for _, *own in found.values()] == [[before[1]] * 2] * 3
    for one in crews:
        one._peer.left = True


def test_one_that_tells_a_far_round_moves_nobodys_step() -> None:
    rounds = [70, 75, 73, 1 << 50]
    assert last_round({peer: Stand("", current=last, round=last) for peer, last in enumerate(rounds)}) == 75


def test_one_that_ends_waits_for_one_that_comes_back_and_trains_on() -> None:
    done, ready = threading.Event(), threading.Event()

    def first(transport: DriverTransport) -> torch.Tensor:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport)
        for at in range(40):
            step(model, optimizer, at)
        done.set()
        assert ready.wait(PATIENCE_S)
        assert ending.finish(transport, [optimizer._averaged], PATIENCE_S, 1.0).alike
        return weights(model)

    def alone(transport: DriverTransport) -> torch.Tensor:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport)
        for at in range(12):
            step(model, optimizer, 100 + at)
        assert done.wait(PATIENCE_S)
        for at in range(4):
            step(model, optimizer, 200 + at)
        ready.set()
        assert ending.finish(transport, [optimizer._averaged], PATIENCE_S, 1.0).alike
        return weights(model)

    works: dict[int, Train] = {0: first, 1: alone}
    with Crew(2) as crew:
        found = all_at_once(transports(crew), works)
    assert torch.equal(found[0], found[1])


def test_a_peer_that_never_ends_is_waited_for_until_the_deadline() -> None:
    over = threading.Event()

    def ends(transport: DriverTransport) -> tuple[float, Finished]:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport)
        for at in range(5):
            step(model, optimizer, at + 100 * transport.me)
        began_s = time.monotonic()
        found = ending.finish(transport, [optimizer._averaged], 1.5, 1.0)
        if transport.me == 0:
            over.set()
        return time.monotonic() - began_s, found

    def hangs(transport: DriverTransport) -> tuple[float, Finished]:
        model = model_of(seed=1)
        optimizer = optimizer_of(model, transport)
        for at in range(5):
            step(model, optimizer, at)
        assert over.wait(PATIENCE_S)
        return 0.0, Finished()

    works: dict[int, Train] = {0: ends, 1: ends, 2: hangs}
    with Crew(3) as crew:
        found = all_at_once(transports(crew), works)
    for peer in (0, 1):
        took_s, said = found[peer]
        assert took_s >= 1.5
        assert (said.alike, said.peers) == (True, (0, 1))


class Ends(SoloTransport):
    """Peer 0 of three that has come to its end after round 89, in virtual time.

    ends: when each other peer's post comes, and its last round.
    heard: when the first message of a round comes.
    trained_s: how long the others have trained.
    """

    def __init__(
        self, ends: dict[int, tuple[float, int]], heard: dict[float, int], trained_s: float = 10.0
    ) -> None:
        super().__init__(0)
        self._trained_s = trained_s
        self._ends, self._heard, self._now_s = ends, {0.0: 89} | heard, 0.0
        self.met: list[tuple[float, frozenset[int] | None]] = []

    def now_s(self) -> float:
        return self._now_s

    def pause(self, for_s: float) -> None:
        self._now_s += for_s

    def heard_of(self, channel: int) -> int:
        return max(round_ for at_s, round_ in self._heard.items() if at_s <= self._now_s)

    def notices(self, topic: int) -> Notices:
        posts = dict(super().notices(topic).posts)
        for peer, (at_s, round_) in self._ends.items():
            if at_s <= self._now_s:
                blob = msgspec.msgpack.encode(ending.TrainingOver(round_, self._trained_s))
                posts[peer] = Posted(peer, topic, 1, blob)
        return Notices(frozenset({1, 2}), posts, dict.fromkeys(posts, 1), frozenset())

    def meet(
        self,
        name: str,
        blob: bytes,
        deadline_s: float,
        meanwhile: Callable[[], None] = lambda: None,
        there: frozenset[int] | None = None,
    ) -> dict[int, bytes]:
        self.met.append((deadline_s, there))
        return dict.fromkeys(self.notices(END).posts.keys() - {self.me}, blob)


def ended(ends: dict[int, tuple[float, int]], heard: dict[float, int]) -> tuple[float, Finished]:
    """How long that peer, which holds what all hold, has waited for 30 s at most, and how it ends."""
    return _ended(Ends(ends, heard))


def _ended(transport: Ends) -> tuple[float, Finished]:
    whole = SimpleNamespace(copy=list, moved=lambda values: 0.0)
    stand = Stand("one", current=89, round=89)
    model: Any = SimpleNamespace(
        name="model", whole=whole, stand=lambda: stand, settle=lambda: None, counters=None
    )
    found = ending.finish(transport, [model], 30.0, 10.0)
    return transport.now_s(), found


@pytest.mark.parametrize("heard_s", [0.1, 0.5])
def test_the_last_round_of_one_that_ends_is_no_sign_that_another_trains(heard_s: float) -> None:
    """It may come before the post of that end, or after: one that pauses is waited for all the same."""
    waited_s, found = ended({2: (0.3, 90), 1: (20.0, 50)}, {heard_s: 90})
    assert found.peers == (0, 1, 2)
    assert 20.0 <= waited_s < 20.1


def test_peers_that_have_ended_give_up_together_on_one_that_does_not() -> None:
    """The one that ended last has just begun to wait when the first one has waited for all its time."""
    waited_s, found = ended({2: (25.0, 90)}, {})
    assert found.peers == (0, 2)
    assert 55.0 <= waited_s < 55.1


def test_all_that_have_ended_are_met_where_another_one_was_given_up() -> None:
    """One of them may learn later than the others that a peer is dead, and wait for its end until then."""
    transport = Ends({2: (0.3, 90)}, {})
    _ended(transport)
    assert transport.met == [(30.0, {0, 2})] * 2  # to agree on these, and to tell where each stands


def test_one_that_stood_still_as_others_ended_is_met_where_one_of_them_counts_on_it() -> None:
    class Counts(Ends):
        def meet(self, name: str, blob: bytes, *args: Any, **there: Any) -> dict[int, bytes]:
            told = super().meet(name, blob, *args, **there)
            return {2: msgspec.msgpack.encode([0, 1, 2])} if name.startswith("finish/ended") else told

    transport = Counts({2: (0.3, 90)}, {})
    _ended(transport)
    assert transport.met[0] == (30.0, {0, 2})
    assert transport.met[-1] == (30.0, {0, 1, 2})


def test_the_last_mean_is_of_those_that_have_ended_and_no_others() -> None:
    """One that trains on came to it later. Its model was averaged with old ones, and the others waited."""
    of: list[object] = []
    whole = SimpleNamespace(
        copy=list, moved=lambda values: 0.0, mix=lambda weight, together: of.append(together.peers)
    )
    stand = Stand("one", current=89, since=1, round=89)
    model: Any = SimpleNamespace(
        name="model", whole=whole, stand=lambda: stand, settle=lambda: None, counters=None
    )
    ending.finish(Ends({2: (0.3, 90)}, {}), [model], 30.0, 10.0)
    assert of == [{0, 2}]


def test_the_wait_that_is_kept_is_told_anew_when_another_one_ends(caplog: pytest.LogCaptureFixture) -> None:
    ended({2: (25.0, 90)}, {})
    assert [record.getMessage() for record in caplog.records] == [
        "this peer is done; it waits for peers 1 and 2, 30 s at most",
        "this peer is done; it waits for peer 1, 30 s at most",
        "this peer ends without peer 1: no sign of an end there",
    ]


def test_peers_that_train_on_are_waited_for_by_what_was_trained(caplog: pytest.LogCaptureFixture) -> None:
    waited_s, found = ended({2: (0.3, 89)}, {1.0 * at: 89 + at for at in range(1, 100)})
    assert found.peers == (0, 2)
    assert 5.0 <= waited_s < 5.1
    assert [record.getMessage() for record in caplog.records] == [
        "this peer is done; it waits for peer 1, 4 s at most, as others still train",
        "this peer ends without peer 1: no sign of an end there",
    ]


def test_a_newcomer_waits_for_those_that_train_on_as_long_as_the_one_that_has_trained_longest() -> None:
    """Else it would end with a model of its own, while that one still waits for another."""
    transport = Ends({2: (0.3, 89)}, {1.0 * at: 89 + at for at in range(1, 100)}, trained_s=200.0)
    _, found = _ended(transport)
    assert found.peers == (0, 2)
    assert 21.0 <= transport.now_s() < 21.1  # a tenth of 200 s, from the first sign that one trains on


@pytest.mark.parametrize(
    "blob",
    [b"", b"\xc1", b"\x05", *map(msgspec.msgpack.encode, ({"round": -2}, {"trained_s": float("nan")}))],
)
def test_an_end_that_cannot_be_read_is_an_end_all_the_same(
    blob: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert ending._end_of(3, blob) == ending.TrainingOver()
    assert "what peer 3 tells of its end cannot be read" in caplog.text


def test_two_models_end_alike_and_have_one_digest() -> None:
    def work(transport: DriverTransport) -> tuple[torch.Tensor, torch.Tensor, Finished]:
        one, other = model_of(seed=1), model_of(seed=2)
        optimizers = [
            optimizer_of(one, transport, name="one", every=3),
            optimizer_of(other, transport, name="two"),
        ]
        for at in range(7):
            for model, optimizer in zip((one, other), optimizers, strict=True):
                step(model, optimizer, at + 100 * transport.me)
        found = ending.finish(transport, [optimizer._averaged for optimizer in optimizers], PATIENCE_S, 1.0)
        return weights(one), weights(other), found

    with Crew(2) as crew:
        found = all_at_once(transports(crew), work)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])
    assert found[0][2].digest == found[1][2].digest


def test_any_number_of_models_end_alike() -> None:
    """What peers tell of so many has no room in a post; they tell it as they meet."""
    many = 24

    def work(transport: DriverTransport) -> tuple[torch.Tensor, Finished]:
        models = [nn.Linear(2, 1) for _ in range(many)]
        with torch.no_grad():
            for at, model in enumerate(models):
                model.weight.fill_(at + transport.me)
                model.bias.fill_(0.0)
        # no average before the last one: peers that are busy with so many might miss it
        made = [optimizer_of(model, transport, name=f"{at}", every=9) for at, model in enumerate(models)]
        for model, optimizer in zip(models, made, strict=True):
            for _ in range(4):
                optimizer.zero_grad()
                (0.0 * model(torch.ones(1, 2))).sum().backward()
                optimizer.step()
        ended = ending.finish(transport, [optimizer._averaged for optimizer in made], PATIENCE_S, 1.0)
        return torch.stack([weights(model) for model in models]), ended

    with Crew(3) as crew:
        found = all_at_once(transports(crew), work)
    first, ended = found[0]
    assert torch.equal(first[:, 0], torch.arange(many) + 1.0)
    assert all(torch.equal(values, first) for values, _ in found.values())
    assert (ended.alike, ended.peers, len({also.digest for _, also in found.values()})) == (
        True,
        (0, 1, 2),
        1,
    )


def test_peers_of_which_one_has_a_model_more_do_not_end_with_the_same() -> None:
    """As where a name of an optimizer differs, or one has not begun."""

    def work(transport: DriverTransport) -> tuple[torch.Tensor, Finished]:
        models = [model_of(seed=1), model_of(seed=2)]
        made = [optimizer_of(model, transport, name=f"{at}") for at, model in enumerate(models)]
        ours = [optimizer._averaged for optimizer in made[: 2 - transport.me]]
        return weights(models[0]), ending.finish(transport, ours, PATIENCE_S, 1.0)

    with Crew(2) as crew:
        found = all_at_once(transports(crew), work)
    assert torch.equal(found[0][0], found[1][0])
    assert [str(ended).split(";")[0] for _, ended in found.values()] == [
        "2 peers end with different models"
    ] * 2


def test_alone_there_is_nothing_to_agree_on() -> None:
    transport = SoloTransport(0)
    model = model_of(seed=1)
    optimizer = optimizer_of(model, transport)  # type: ignore[arg-type]
    step(model, optimizer, 1)
    before = weights(model)
    found = ending.finish(transport, [optimizer._averaged], 0.0, 1.0)
    assert torch.equal(before, weights(model))
    assert (found.alike, found.peers) == (True, (0,))
    assert str(found).startswith("this peer ends alone, with model ")
    assert ending.finish(transport, [], 0.0, 1.0).digest == ""


class Last(SoloTransport):
    """Of three peers, of which two have left."""

    def __init__(self) -> None:
        super().__init__(2)
        self.n = 3


@pytest.mark.parametrize("steps", [0, 1])
def test_one_that_others_left_with_the_model_that_it_began_with_is_told(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    transport: Any = Last()
    crew, model = ragtag.Crew(Peer(Place(2, 3, "test"), transport, None, None, 0.0)), model_of(seed=1)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
    for at in range(steps):
        step(model, optimizer, at)
    crew.finish()
    assert ("with the model that it began with" in caplog.text) is (steps == 0)


def test_a_launcher_is_told_of_an_average_where_the_last_one_is_the_only_one() -> None:
    pipes = [os.pipe() for _ in range(2)]

    def told(peer: int) -> list[Reached]:
        return [announcement.reached for announcement in read_announcements(os.read(pipes[peer][0], 1 << 10))]

    def work(transport: DriverTransport) -> list[Reached]:
        me, (_, write) = transport.me, pipes[transport.me]
        place, tells = Place(me, 2, "test", seed=1), Announcer(me, write)
        crew = ragtag.Crew(Peer(place, transport, None, None, 0.0, announcer=tells))
        model = model_of(seed=0)
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model, every=5)
        step(model, optimizer, me)
        os.write(write, b"0 ready\n")  # so that there is something to read
        before = told(me)
        crew.finish()
        os.close(write)
        return before

    with Crew(2) as crew:
        before = all_at_once(transports(crew), work)
    for peer, (read, _) in enumerate(pipes):
        assert Reached.AVERAGED not in before[peer]
        assert told(peer) == [Reached.AVERAGED]
        os.close(read)


@pytest.mark.parametrize("steps", [(3, 5, 5), (4, 4, 6)])
def test_what_a_model_has_counted_is_the_same_on_all_at_the_end(steps: tuple[int, ...]) -> None:
    def work(transport: DriverTransport) -> tuple[int, Finished]:
        model = model_of(seed=0)
        optimizer = optimizer_of(model, transport, every=2)
        for at in range(steps[transport.me]):
            step(model, optimizer, at)
        found = ending.finish(transport, [optimizer._averaged], PATIENCE_S, 1.0)
        return int(model.state_dict()["1.num_batches_tracked"]), found

    with Crew(3) as crew:
        found = all_at_once(transports(crew), work)
    counted = {count for count, _ in found.values()}
    assert len(counted) == 1 and counted <= set(steps)
    assert all(said.alike for _, said in found.values())


def test_what_one_that_ends_had_claimed_is_used_while_it_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, real = threading.Event(), peer_module.finish
    samples = 200

    def finishing(*given: Any) -> Finished:
        waits.set()
        return real(*given)

    monkeypatch.setattr(peer_module, "finish", finishing)

    def work(transport: DriverTransport) -> int:
        crew = crew_of(transport)
        model = model_of(seed=0)
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model=model)
        optimizer.average()
        split = crew.split(DataLoader(TensorDataset(torch.arange(float(samples))), batch_size=2))
        drew = 0
        if transport.me == 1:
            assert waits.wait(PATIENCE_S)
        for (batch,) in split:
            drew += len(batch)
            if transport.me == 0 and drew >= samples // 4:
                break
        crew.leave()
        return drew

    with Crew(2) as crew:
        drew = all_at_once(transports(crew), work)
    assert sum(drew.values()) == samples


def test_a_crew_finishes_when_it_is_left(tmp_path: Any) -> None:
    with ragtag.join() as crew:
        model = model_of(seed=1)
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        step(model, optimizer, 1)
        found = crew.finish()
        assert crew.finish() is found
    assert crew.left
