"""Named tensors under training code, in virtual time: averages, owners, who stands in, snapshots."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ragtag
from ragtag.app.crew.transport import SoloTransport
from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.schema import SchemaMismatch
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport
from ragtag.training.named import NamedTensors, Newest, Share
from ragtag.training.optimizer.optimizer import CrewOptimizer

STEP_S = 0.05


def crew(n: int, **faults: Any) -> SimulatedCrew:
    lines = Faults(**{"latency_s": 0.001, "rate_bytes_per_s": 1e8, **faults})
    return SimulatedCrew(n, lines, seed=3, cost=ComputeCost(STEP_S), check=True)


class InverseRoots:
    """An optimizer's preconditioner in a few lines: it averages squares of gradients, and the owner of each
    parameter computes 1 / (root + eps) for all.
    """

    def __init__(self, tensors: NamedTensors, model: nn.Module, every: int) -> None:
        self.tensors, self.every, self.steps = tensors, every, 0
        self.params = dict(model.named_parameters())
        self.squares = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.ages: list[int] = []

    @staticmethod
    def names(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
        params = dict(model.named_parameters())
        return {
            "averaged": {f"{name}.square": p.detach() for name, p in params.items()},
            "computed": {f"{name}.root": p.detach() for name, p in params.items()},
        }

    def step(self) -> None:
        for name, p in self.params.items():
            assert p.grad is not None
            self.squares[name] += p.grad.square()
        mean = self.tensors.average({f"{n}.square": v for n, v in self.squares.items()}).result()
        if self.steps % self.every == 0:
            of = {f"{name}.root": name for name in self.params}
            own = self.tensors.mine()
            self.tensors.publish({n: 1 / (mean[f"{of[n]}.square"].sqrt() + 1e-3) for n in own})
        self.steps += 1
        for name, p in self.params.items():
            root = self.tensors.newest(f"{name}.root")
            if root is not None:
                assert p.grad is not None
                self.ages.append(root.age_rounds)
                p.grad *= root.tensor


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def preconditioned(peer: SimulatedTransport, steps: int, every: int = 4, **options: Any) -> dict[str, Any]:
    model = model_of()
    optimizer = CrewOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3), peer, model=model, average="gradients"
    )
    tensors = NamedTensors(peer, "roots", **InverseRoots.names(model), seed=3, **options)
    pre = InverseRoots(tensors, model, every)
    samples = torch.Generator().manual_seed(peer.me)
    losses, late_s = [], []
    for _ in range(steps):
        peer.compute()
        x = torch.randn(16, 6, generator=samples)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        began_s = peer.now_s()
        pre.step()
        late_s.append(peer.now_s() - began_s)
        optimizer.step()
        losses.append(loss.item())
    values = {name: tensors.newest(name) for name in InverseRoots.names(model)["computed"]}
    return {
        "losses": losses,
        "ages": pre.ages,
        "values": values,
        "owners": tensors.owners(),
        "late_s": late_s,
    }


def test_a_preconditioner_trains_with_what_owners_compute() -> None:
    made = [found for found in crew(4).run(lambda peer: preconditioned(peer, 40)) if found is not None]
    assert len(made) == 4
    for found in made:
        assert found["losses"][-1] < 0.1 * found["losses"][0]
        assert 0 <= max(found["ages"]) <= 4 + 1, "nothing is older than a turn and a step"
        assert found["owners"] == made[0]["owners"]
        for name, newest in found["values"].items():
            assert torch.equal(newest.tensor, made[0]["values"][name].tensor)
            assert newest.peer == found["owners"][name].first
    assert len({pair.first for pair in made[0]["owners"].values()}) == 4  # four tensors, four peers


def test_when_a_peer_dies_its_names_move_and_nothing_stops() -> None:
    """And the same seed gives the same run."""

    def once() -> list[dict[str, Any] | None]:
        return crew(3, crashes=(Crash(1, 30.3 * STEP_S),)).run(
            lambda peer: preconditioned(peer, 120, every=3)
        )

    made = once()
    assert made[1] is None
    for found in (made[0], made[2]):
        assert found is not None
        assert {newest.peer for newest in found["values"].values()} == {0, 2}
        assert max(found["ages"]) <= 3 * 3 + 2
        assert max(newest.age_rounds for newest in found["values"].values()) <= 4
        assert sorted(found["late_s"])[-3] < STEP_S, "a death costs two deadlines at most"
        assert found["losses"][-1] < 0.1 * found["losses"][0]
    again = once()
    assert made[0] is not None and again[0] is not None and again[0]["losses"] == made[0]["losses"]


def test_the_second_owner_computes_for_a_first_that_lives_and_is_silent() -> None:
    """Peer 1 trains on, and publishes nothing from its 10th turn to its 30th."""

    def train(peer: SimulatedTransport) -> list[tuple[int, int, int]]:
        tensors = NamedTensors(peer, "t", {"a": (4,)}, {f"b{i}": (300,) for i in range(6)}, seed=1)
        seen = []
        theirs = [name for name, pair in tensors.owners().items() if pair.first == 1]
        second = tensors.owners()[theirs[0]].second
        for turn in range(45):
            peer.pause(STEP_S)
            tensors.average({"a": torch.ones(4)}).result()
            names = tensors.mine()
            if not (peer.me == 1 and 10 <= turn < 30):
                tensors.publish({name: torch.full((300,), float(turn)) for name in names})
            peer.pause(STEP_S)
            newest = tensors.newest(theirs[0])
            assert newest is not None and newest.missed == max(0, newest.age_rounds - 1)
            seen.append((turn, newest.peer, newest.age_rounds))
        assert second != 1
        return [(turn, who == second, age) for turn, who, age in seen]

    made = crew(3).run(train)
    for seen in made:
        assert seen is not None
        assert [age for turn, _, age in seen if turn < 10] == [0] * 10
        stood_in = [turn for turn, second, _ in seen if second]
        assert stood_in and stood_in[0] == 12 and stood_in[-1] in (29, 30), (
            "after two missed turns, until it is back"
        )
        assert max(age for *_, age in seen) == 2
        assert [age for turn, _, age in seen if turn > 31] == [0] * 13


def test_a_frozen_owner_stops_nobody() -> None:
    """Peer 0 stands still for 2 s, forty steps."""
    made = crew(3, freezes=(Freeze(0, 20.2 * STEP_S, 2.0),)).run(
        lambda peer: preconditioned(peer, 100, every=2)
    )
    for found in made[1:]:
        assert found is not None
        assert sorted(found["late_s"])[-4] < STEP_S
        assert max(found["ages"]) <= 3 * 2 + 3


def test_loss_keeps_whole_values_and_shares_say_what_came() -> None:
    def train(peer: SimulatedTransport) -> list[float]:
        tensors = NamedTensors(peer, "t", {"a": (3000,), "b": (5,)}, {"c": (5000,)}, seed=1)
        arrived = []
        for turn in range(30):
            peer.pause(STEP_S)
            given = {"a": torch.full((3000,), 1.0 + peer.me), "b": torch.zeros(5)}
            mean = tensors.average(given, weight=1 + peer.me).result()
            assert set(mean.shares) == {"a", "b"} and mean.round == turn
            arrived.append(mean.shares["a"].arrived)
            assert 1 <= mean.shares["a"].contributors <= 3
            if tensors.owners()["c"].first == peer.me:
                tensors.publish({"c": torch.full((5000,), float(turn))})
            newest = tensors.newest("c")
            assert newest is None or len(newest.tensor.unique()) == 1, "a mixture"
        return arrived

    for arrived in crew(3, loss=Loss(0.2)).run(train):
        assert arrived is not None and 0.5 < float(np.mean(arrived)) < 1


def test_weights_count() -> None:
    def train(peer: SimulatedTransport) -> float:
        tensors = NamedTensors(peer, "t", {"a": (7, 3)})
        mean = tensors.average({"a": torch.full((7, 3), float(peer.me))}, weight=10.0**peer.me).result()
        assert (
            mean["a"].shape == (7, 3)
            and mean.shares["a"].arrived == 1.0
            and mean.shares["a"].contributors == 3
        )
        return mean["a"].mean().item()

    assert crew(3).run(train) == pytest.approx([(0 + 10 + 200) / 111] * 3, rel=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_codecs_and_a_state_that_is_taken_back(codec: str) -> None:
    made = torch.linspace(-1, 1, 2500).reshape(50, 50)

    def first(peer: SimulatedTransport) -> dict[str, Any]:
        tensors = NamedTensors(peer, "t", {"a": (2,)}, {"m": (50, 50), "never": (3,)}, codec=codec)  # type: ignore[arg-type]
        for _ in range(5):
            tensors.average({"a": torch.zeros(2)}).result()
        if tensors.owners()["m"].first == peer.me:
            tensors.publish({"m": made})
        peer.pause(1.0)
        return tensors.state_dict()

    states = crew(2).run(first)
    assert states[0] is not None and states[1] is not None
    assert torch.equal(states[0]["values"]["m"], states[1]["values"]["m"])
    assert torch.allclose(states[0]["values"]["m"], made, atol=1e-2)

    def second(peer: SimulatedTransport) -> Newest:
        tensors = NamedTensors(peer, "t", {"a": (2,)}, {"m": (50, 50), "never": (3,)}, codec=codec)  # type: ignore[arg-type]
        if peer.me == 1:
            tensors.load_state_dict(states[1])
        assert states[1] is not None and (states[1]["clock"], states[1]["base"]) == (5, 0)
        peer.pause(1.0)
        assert tensors.newest("never") is None
        tensors.average({"a": torch.zeros(2)}).result()
        newest = tensors.newest("m")
        assert newest is not None
        return newest

    found = crew(2).run(second)
    assert all(newest is not None and newest.age_rounds == 1 and newest.version == 5 for newest in found)
    assert torch.allclose(found[0].tensor, made, atol=2e-2)  # type: ignore[union-attr]


def test_a_damaged_state_is_refused_or_left_out() -> None:
    tensors = NamedTensors(SoloTransport(1), "t", computed={"m": (4,)})
    tensors.publish({"m": torch.ones(4)})
    good = tensors.state_dict()
    other = NamedTensors(SoloTransport(1), "t", computed={"m": (4,)})
    mixed = good | {"values": {"m": torch.tensor([1.0, 1.0, 0.0, 1.0])}}
    other.load_state_dict(mixed)
    assert other.newest("m") is None
    for bad in ({}, good | {"clock": -1}, good | {"values": {"n": torch.ones(4)}}, good | {"versions": 3}):
        with pytest.raises(ValueError, match="the state of 't'"):
            other.load_state_dict(bad)
    with pytest.raises(ValueError, match="give floats of shape"):
        other.load_state_dict(good | {"values": {"m": torch.ones(5)}})
    other.load_state_dict(good)
    newest = other.newest("m")
    assert newest is not None and torch.equal(newest.tensor, torch.ones(4))


def test_alone_it_works_too() -> None:
    tensors = NamedTensors(SoloTransport(1), "t", {"a": (2, 2)}, {"m": torch.zeros(3)})
    assert tensors.newest("m") is None and tensors.mine() == ["m"]
    mean = tensors.average({"a": torch.ones(2, 2)}).result()
    assert torch.equal(mean["a"], torch.ones(2, 2)) and mean.shares["a"] == Share(1.0, 1.0)
    tensors.publish({"m": torch.arange(3.0)})
    newest = tensors.newest("m")
    assert newest is not None and newest.tensor.tolist() == [0, 1, 2]
    assert (newest.age_rounds, newest.peer, newest.missed) == (0, 0, 0) and 0 <= newest.age_s < 60


def test_a_peer_with_other_names_is_told_which() -> None:
    def train(peer: SimulatedTransport) -> None:
        NamedTensors(peer, "t", computed={"m": (3 + peer.me,)})

    with pytest.raises(SchemaMismatch, match="'m'"):
        crew(2).run(train)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "no named tensors"),
        ({"averaged": {"a": (2, 0)}}, "'a' has shape"),
        ({"averaged": {"a": (2,)}, "computed": {"a": (2,)}}, "averaged and computed"),
        ({"averaged": {"a": (1 << 29,)}}, "at most 1,073,741,824"),
        ({"computed": {str(i): (1,) for i in range(2000)}}, "2000 computed tensors; at most"),
        ({"computed": {"": (1,)}}, "1 to 512 characters"),
        ({"averaged": {"a": (1,)}, "method": "moshpit"}, "all at once"),
        ({"averaged": {"a": (1,)}, "codec": "fp8"}, "codec is 'fp8'; it is one of"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NamedTensors(SoloTransport(1), "t", **options)


def test_what_is_given_wrongly_is_refused() -> None:
    tensors = NamedTensors(SoloTransport(1), "t", {"a": (2,), "b": (1,)}, {"m": (3,)})
    one, two = torch.ones(1), torch.ones(2)
    for asked, says in (
        (lambda: tensors.average({"a": two}), "'b' of 't' is missing"),
        (lambda: tensors.average({"a": two, "b": two}), r"'b' of 't' is \(2,\)"),
        (lambda: tensors.average({"a": two, "b": one}, weight=math.nan), "weight of this peer is nan"),
        (lambda: tensors.average({"a": two, "b": one}, weight=1e30), "use a larger unit"),
        (lambda: tensors.publish({"a": two}), "no tensor 'a' of that kind"),
        (lambda: tensors.publish({"m": torch.ones(3, dtype=torch.int64)}), "int64; give floats"),
        (lambda: tensors.newest("a"), "no computed tensor 'a'"),
        (lambda: tensors.owners({"m": 0.0}), "cost of 'm' is 0"),
        (lambda: tensors.owners({}), "'m'"),
        (lambda: tensors.only(["a"]), "no computed tensor 'a'"),
    ):
        with pytest.raises(ValueError, match=says):
            asked()
    makers: Any = {"m": lambda: torch.ones(3)}
    for wrong, says in (
        (lambda: tensors.publish(makers), "'m' of 't' is a function; give a dense tensor of shape"),
        (lambda: tensors.publish({"m": torch.ones(3).to_sparse()}), "'m' of 't' is torch.sparse_coo"),
        (lambda: tensors.average(two), "values of 't' are a Tensor"),  # type: ignore[arg-type]
        (lambda: NamedTensors(SoloTransport(1), "t", computed=makers), "'m' has as its shape a function"),
        (lambda: NamedTensors(SoloTransport(1), "t", computed=["m"]), "named tensors are a list"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=says):
            wrong()
    for bad in (torch.tensor([1.0, math.nan, 0.0]), torch.tensor([1.0, 1e300, 0.0], dtype=torch.float64)):
        with pytest.raises(ragtag.NotFinite, match="'m' of 't'"):
            tensors.publish({"m": bad})
    assert tensors.newest("m") is None, "nothing was published"
