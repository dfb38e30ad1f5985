"""Split learning between peers in virtual time: the whole net's training, faults, deadlines, bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ragtag.core.faults import Crash, Faults, Freeze, Loss
from ragtag.core.seed import generator
from ragtag.core.wire import CHUNK_BYTES
from ragtag.privacy import SplitModel
from ragtag.privacy.split import (
    COPIES_SHARE,
    Cut,
    CutForm,
    ServerGone,
    SplitClient,
    SplitServer,
    split_bytes,
    state_values,
)
from ragtag.recipes.private.counted import SentTensors
from ragtag.simulation.cost import ComputeCost
from ragtag.simulation.link import OVERHEAD_BYTES
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport

INPUTS, WIDTH, OUTPUTS, CLASSES, BATCH = 10, 12, 9, 3, 8
PLAIN, U_SHAPED = CutForm(BATCH, (WIDTH,)), CutForm(BATCH, (WIDTH,), (OUTPUTS,))
STEP_S = 0.02
BATCHES = 20


def drawn(*shape: int, name: str) -> Tensor:
    return torch.from_numpy(generator(0, name).standard_normal(shape)).float()


def parts() -> list[nn.Module]:
    made: list[nn.Module] = [
        nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU()),
        nn.Sequential(nn.Linear(WIDTH, OUTPUTS), nn.Tanh()),
        nn.Linear(OUTPUTS, CLASSES),
    ]
    for i, part in enumerate(made):
        for j, p in enumerate(part.parameters()):
            p.data = 0.4 * drawn(*p.shape, name=f"part {i}, weight {j}")
    return made


def samples(client: int, n: int) -> tuple[Tensor, Tensor]:
    x = drawn(n, INPUTS, name=f"data of {client}")
    return x, (x[:, :CLASSES]).argmax(1)


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.ModuleList(modules).parameters(), 0.1)


class Split:
    """A server (peer 0) and clients that each take ``batches`` batches; what came of it, by peer.

    With ``server_values`` in the form the last ``standbys`` peers are standbys, the first of them the first.
    """

    def __init__(
        self, n: int, form: CutForm, batches: int, deadline_s: float = 5.0, standbys: int = 1, **faults: Any
    ) -> None:
        self.standbys = tuple(range(n - standbys, n)) if form.server_values else ()
        self.form, self.batches, self.deadline_s = form, batches, deadline_s
        lines = Faults(**{"latency_s": 0.001, "rate_bytes_per_s": 1e8, **faults})
        self.crew = SimulatedCrew(n, lines, seed=3, cost=ComputeCost(STEP_S))
        self.sent = SentTensors(self.crew, "split")
        self.losses: dict[int, list[float | None]] = {}
        self.ends_s: dict[int, float] = {}
        self.parts: dict[int, list[nn.Module]] = {}
        self.peers: dict[int, SplitClient | SplitServer] = {}
        self.gone: list[str] = []
        self.crew.run(self._train)

    def _train(self, peer: SimulatedTransport) -> None:
        front, middle, back = self.parts[peer.me] = parts()
        cut = Cut(peer, self.form, standby=self.standbys)
        if peer.me in (0, *self.standbys):
            above = middle if self.form.outputs is not None else nn.Sequential(middle, back)
            server = self.peers[peer.me] = SplitServer(cut, above, sgd(above))
            server.serve(self.deadline_s)
        else:
            end = back if self.form.outputs is not None else None
            client = SplitClient(cut, front, end, nopeek=0.3, deadline_s=self.deadline_s)
            self.peers[peer.me] = client
            self._client(peer, client, sgd(front, *([back] if end else [])))
        self.ends_s[peer.me] = peer.now_s()

    def _client(
        self, peer: SimulatedTransport, client: SplitClient, optimizer: torch.optim.Optimizer
    ) -> None:
        x, y = samples(peer.me, self.batches * BATCH)
        losses = self.losses[peer.me] = []
        try:
            for some, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
                peer.compute()
                loss = client.backward(some, labels)
                losses.append(None if loss is None else float(loss))
                if loss is not None:
                    optimizer.step()
                optimizer.zero_grad()
            client.finish()
        except ServerGone as error:
            self.gone.append(str(error))

    @property
    def server(self) -> SplitServer:
        return self.server_at(0)

    def server_at(self, peer: int) -> SplitServer:
        server = self.peers[peer]
        assert isinstance(server, SplitServer)
        return server

    def client(self, peer: int) -> SplitClient:
        client = self.peers[peer]
        assert isinstance(client, SplitClient)
        return client


@pytest.mark.parametrize("form", [PLAIN, U_SHAPED], ids=["plain", "U-shaped"])
def test_one_client_trains_as_in_one_process(form: CutForm) -> None:
    found = Split(2, form, 6)
    front, middle, back = parts()
    split = (
        SplitModel(front, nn.Sequential(middle, back), nopeek=0.3)
        if form.outputs is None
        else SplitModel(front, middle, back, nopeek=0.3)
    )
    optimizer, losses = sgd(front, middle, back), []
    for x, y in zip(*(v.split(BATCH) for v in samples(1, 6 * BATCH)), strict=True):
        losses.append(float(split.backward(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    assert found.losses[1] == pytest.approx(losses, rel=1e-6)
    assert (found.client(1).answered, found.client(1).missed) == (6, 0)
    trained = [found.parts[1][0], found.parts[0][1], found.parts[0 if form.outputs is None else 1][2]]
    for a, b in zip(trained, (front, middle, back), strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("form", [PLAIN, U_SHAPED], ids=["plain", "U-shaped"])
def test_what_is_counted_is_what_the_formula_says(form: CutForm) -> None:
    found = Split(3, form, 5)
    up = sum(found.client(peer).traffic.up_bytes for peer in (1, 2))
    n = 2 * 5 * BATCH
    expected = split_bytes(n, WIDTH if form is PLAIN else WIDTH + OUTPUTS)
    sent = found.sent.of_split(0, codes=BATCH * WIDTH, outputs_grad=BATCH * OUTPUTS)
    assert sent == (expected, 4 * n if form is PLAIN else 0)
    assert up + found.server.traffic.down_bytes == expected
    labels = [found.client(peer).traffic.label_bytes for peer in (1, 2)]
    assert labels == ([4 * 5 * BATCH] * 2 if form is PLAIN else [0, 0])
    assert found.server.served[1].requests == 5


def test_labels_are_counted_where_no_form_says_that_they_go_up(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Cut.send
    ways = {"codes": (WIDTH + 1,), "codes.grad": (WIDTH,), "outputs": (OUTPUTS,), "outputs.grad": (OUTPUTS,)}

    def leaking(
        cut: Cut, way: str, client: int, number: int, values: Tensor | None = None, loss: float = 0.0
    ) -> None:
        if way == "codes" and values is not None:
            values = torch.cat([values.detach(), torch.ones(len(values), 1)], 1)
        send(cut, way, client, number, values, loss)

    monkeypatch.setattr(CutForm, "ways", property(lambda form: ways))
    monkeypatch.setattr(Cut, "send", leaking)
    found, n = Split(3, U_SHAPED, 5), 2 * 5 * BATCH
    sent = found.sent.of_split(0, codes=BATCH * WIDTH, outputs_grad=BATCH * OUTPUTS)
    assert sent == (split_bytes(n, WIDTH + OUTPUTS), 4 * n)
    assert [found.client(peer).traffic.label_bytes for peer in (1, 2)] == [4 * n // 2] * 2


@pytest.mark.parametrize("form", [PLAIN, U_SHAPED], ids=["plain", "U-shaped"])
def test_lines_carry_each_message_once_and_word_of_it(form: CutForm) -> None:
    """Whatever else a message takes along, and under whatever name: each fits a datagram here."""
    lines = [
        [found.crew.world.traffic(peer) for peer in range(3)]
        for found in (Split(3, form, 5), Split(3, form, 7))
    ]
    few, many = (sum(line.bytes_sent for line in of_all) for of_all in lines)
    messages = 2 * (7 - 5) * len(form.ways)
    told = 2 * 2  # each other peer is told of its version, and answers
    least = messages * (1 + told) * (CHUNK_BYTES + OVERHEAD_BYTES)
    assert least <= many - few <= 1.05 * least, "word that crosses another's on its way is told again"


def test_lost_datagrams_delay_a_turn_and_change_nothing() -> None:
    calm, lossy = Split(2, PLAIN, BATCHES), Split(2, PLAIN, BATCHES, loss=Loss(0.2))
    assert lossy.ends_s[1] > calm.ends_s[1]
    assert lossy.client(1).answered + lossy.client(1).missed == BATCHES
    assert lossy.client(1).answered >= BATCHES - 2
    first = next((i for i, loss in enumerate(lossy.losses[1]) if loss is None), BATCHES)
    assert first > 0 and lossy.losses[1][:first] == calm.losses[1][:first]


def test_a_client_that_dies_stops_nobody() -> None:
    calm = Split(4, PLAIN, BATCHES)
    found = Split(4, PLAIN, BATCHES, crashes=(Crash(2, 0.3),))
    for peer in (1, 3):
        assert found.client(peer).answered == BATCHES
        assert found.ends_s[peer] < 1.1 * calm.ends_s[peer]
    served = found.server.served
    assert served[2].lost and not served[2].finished and 0 < served[2].requests < BATCHES
    assert served[1].finished and served[3].requests == BATCHES
    assert found.ends_s[0] < found.ends_s[1] + 2 * found.deadline_s


def test_a_client_that_freezes_is_passed_over_and_served_again() -> None:
    calm = Split(3, PLAIN, 30)
    found = Split(3, PLAIN, 30, freezes=(Freeze(2, 0.3, 0.4),))
    assert found.client(1).answered == 30
    assert found.ends_s[1] < 1.1 * calm.ends_s[1]
    assert found.server.served[2].finished
    assert found.client(2).answered >= 28


def test_a_server_that_freezes_costs_batches_which_are_counted() -> None:
    found = Split(3, PLAIN, 40, freezes=(Freeze(0, 0.3, 0.5),))
    for peer in (1, 2):
        client = found.client(peer)
        assert client.missed > 0 and client.answered + client.missed == 40
        assert found.losses[peer].count(None) == client.missed
        assert client.answered >= 20, "once it is back it answers"


def test_a_server_that_dies_is_told_of() -> None:
    found = Split(3, U_SHAPED, 400, deadline_s=1.0, crashes=(Crash(0, 0.3),))
    assert len(found.gone) == 2
    assert "peer 0 has answered nothing for" in found.gone[0]
    assert all(found.client(peer).missed < 100 for peer in (1, 2))


@pytest.mark.parametrize("form", [PLAIN, U_SHAPED], ids=["plain", "U-shaped"])
def test_layers_of_the_server_that_are_frozen_stay_as_they_are(form: CutForm) -> None:
    before: list[Tensor] = []
    after: list[Tensor] = []

    def train(peer: SimulatedTransport) -> None:
        front, middle, back = parts()
        cut = Cut(peer, form)
        if peer.me == 0:
            frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            for p in frozen.parameters():
                p.data = 0.4 * drawn(*p.shape, name="frozen")
            above = nn.Sequential(frozen, middle if form.outputs is not None else nn.Sequential(middle, back))
            before.extend(p.detach().clone() for p in above.parameters())
            SplitServer(cut, above, sgd(above)).serve(2.0)
            after.extend(p.detach() for p in above.parameters())
            return
        client = SplitClient(cut, front, back if form.outputs is not None else None)
        for x, y in zip(*(v.split(BATCH) for v in samples(1, 4 * BATCH)), strict=True):
            peer.compute()
            client.backward(x, y)
        client.finish()

    SimulatedCrew(2, Faults(latency_s=0.001), seed=3, cost=ComputeCost(STEP_S)).run(train)
    same = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert same == [True, True] + [False] * (len(same) - 2)


@pytest.mark.parametrize(
    "part", [slice(None), slice(1, None)], ids=["all layers learn", "one has no optimizer"]
)
@pytest.mark.parametrize("form", [PLAIN, U_SHAPED], ids=["plain", "U-shaped"])
def test_codes_that_would_spoil_the_server_are_refused(form: CutForm, part: slice) -> None:
    """One client's are finite, and so large that losses or gradients are not."""
    spoilt: dict[int, Tensor] = {}
    served: list[SplitServer] = []

    def train(peer: SimulatedTransport) -> None:
        front, middle, back = parts()
        middle = nn.Sequential(middle[0], nn.Linear(OUTPUTS, OUTPUTS))  # no tanh to keep codes finite
        cut = Cut(peer, form)
        if peer.me == 0:
            above = middle if form.outputs is not None else nn.Sequential(*middle, back)
            served.append(SplitServer(cut, above, sgd(*above[part])))
            served[0].serve(2.0)
            spoilt[0] = torch.cat([p.detach().flatten() for p in above.parameters()])
            return
        client = SplitClient(cut, front, back if form.outputs is not None else None, deadline_s=0.5)
        for x, y in zip(*(v.split(BATCH) for v in samples(peer.me, 4 * BATCH)), strict=True):
            peer.compute()
            try:
                client.backward(x * (1e38 if peer.me == 1 else 1.0), y)
            except ServerGone:
                return
        client.finish()

    SimulatedCrew(3, Faults(latency_s=0.001), seed=3, cost=ComputeCost(STEP_S)).run(train)
    assert spoilt[0].isfinite().all()
    assert served[0].served[2].requests == 4 and served[0].served[2].refused == 0
    bad = served[0].served[1]
    assert bad.requests == 0 and bad.refused > 0


@pytest.mark.parametrize("form", [PLAIN, U_SHAPED], ids=["plain", "U-shaped"])
def test_a_sample_alone_that_batch_norm_does_not_take_stops_nobody(form: CutForm) -> None:
    """The last batch of a loader whose samples are one more than its batches hold."""
    served: list[SplitServer] = []
    missed: dict[int, int] = {}

    def train(peer: SimulatedTransport) -> None:
        front, middle, back = parts()
        cut = Cut(peer, form)
        if peer.me == 0:
            middle = nn.Sequential(middle, nn.BatchNorm1d(OUTPUTS))
            above = middle if form.outputs is not None else nn.Sequential(middle, back)
            served.append(SplitServer(cut, above, sgd(above)))
            served[0].serve(2.0)
            return
        client = SplitClient(cut, front, back if form.outputs is not None else None, deadline_s=2.0)
        for x, y in zip(*(v.split(BATCH) for v in samples(peer.me, 3 * BATCH + peer.me % 2)), strict=True):
            peer.compute()
            client.backward(x, y)
        client.finish()
        missed[peer.me] = client.missed

    SimulatedCrew(3, Faults(latency_s=0.001), seed=3, cost=ComputeCost(STEP_S)).run(train)
    assert missed == {1: 1, 2: 0}
    odd, even = served[0].served[1], served[0].served[2]
    assert (odd.requests, odd.refused, even.requests, even.refused) == (3, 1, 3, 0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="all sizes must be 1 or more"):
        CutForm(0, (3,))

    def train(peer: SimulatedTransport) -> None:
        front, middle, back = parts()
        cut = Cut(peer, PLAIN)
        if peer.me == 0:
            with pytest.raises(ValueError, match="peer 0 is the server"):
                SplitClient(cut, front)
            with pytest.raises(ValueError, match="server 7 of 2 peers"):
                Cut(peer, PLAIN, server=7)
            SplitServer(cut, middle, sgd(middle)).serve(0.1)
            return
        with pytest.raises(ValueError, match="peer 0 is the server, not peer 1"):
            SplitServer(cut, middle, sgd(middle))
        with pytest.raises(ValueError, match="a back and the form's outputs"):
            SplitClient(cut, front, back)
        with pytest.raises(ValueError, match="has no room for that"):
            SplitClient(cut, front).backward(*samples(1, BATCH + 1))

    SimulatedCrew(2, Faults(latency_s=0.001), seed=3, cost=ComputeCost(STEP_S)).run(train)


# -- A standby


def guarded(form: CutForm) -> CutForm:
    """The same form with a standby."""
    _, middle, back = parts()
    above = middle if form.outputs is not None else nn.Sequential(middle, back)
    return replace(form, server_values=state_values(above))


def weights(server: SplitServer) -> Tensor:
    return torch.cat([value.flatten() for value in server.middle.state_dict().values()])


BOTH = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(
        U_SHAPED, id="U-shaped", marks=pytest.mark.slow
    ),  # two answers to a batch, else the same code
]


@pytest.mark.parametrize("form", BOTH)
def test_a_standby_goes_on_where_the_server_dies(form: CutForm) -> None:
    found = Split(4, guarded(form), 60, crashes=(Crash(0, 0.7),))
    assert not found.gone
    standby = found.server_at(3)
    assert standby.took_over_s is not None and standby.took_over_s > 0.7
    for peer in (1, 2):
        client = found.client(peer)
        assert client.answered + client.missed == 60
        assert 0 < client.missed < 12, "requests while nobody served"
        assert found.losses[peer][-20:].count(None) == 0
        assert standby.served[peer].finished and standby.served[peer].requests > 20
    losses = [[loss for loss in found.losses[peer] if loss is not None] for peer in (1, 2)]
    for mine in losses:
        assert sum(mine[-10:]) < sum(mine[:10]), "the standby went on from what was learned"


def test_a_standby_goes_on_from_the_newest_copy() -> None:
    """What it begins with is what the server had at its last copy, and not what it was made with."""
    begins: list[Tensor] = []
    real = SplitServer._stand_by

    def noted(self: SplitServer, deadline_s: float) -> bool:
        over = real(self, deadline_s)
        begins.append(weights(self).clone())
        return over

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitServer, "_stand_by", noted)
        found = Split(3, guarded(PLAIN), 60, crashes=(Crash(0, 0.7),))
    middle, back = parts()[1:]
    first = torch.cat([p.flatten() for part in (middle, back) for p in part.state_dict().values()])
    dead = weights(found.server)
    assert torch.dist(begins[0], dead) < 0.3 * torch.dist(first, dead)


@pytest.mark.parametrize("form", BOTH)
def test_a_server_that_comes_back_hears_that_it_was_replaced(form: CutForm) -> None:
    found = Split(4, guarded(form), 60, freezes=(Freeze(0, 0.5, 0.7),))
    assert found.server.replaced and found.server.took_over_s is None
    standby = found.server_at(3)
    assert standby.took_over_s and all(standby.served[peer].finished for peer in (1, 2))
    assert found.ends_s[0] < found.ends_s[1], "it does not wait for clients that are no longer its own"


def test_a_standby_that_was_not_needed_has_the_last_weights() -> None:
    found = Split(4, guarded(PLAIN), BATCHES)
    standby = found.server_at(3)
    assert standby.took_over_s is None and not found.server.replaced
    torch.testing.assert_close(weights(standby), weights(found.server), rtol=0, atol=0)
    assert found.client(1).missed == 0
    size = found.form.server_values
    copies = found.server.traffic.copy_bytes / (4 * size)
    assert copies == int(copies) >= 2


def test_copies_take_a_share_of_the_time_and_change_nothing_of_what_is_learned() -> None:
    found, alone = Split(3, guarded(PLAIN), 30), Split(2, PLAIN, 30)
    assert found.losses == alone.losses
    copies = found.server.traffic.copy_bytes / (4 * found.form.server_values)
    least_s = 2 * 0.001  # a question and an answer over the line
    assert copies < 1.2 * COPIES_SHARE * found.ends_s[0] / least_s


def test_a_standby_of_a_server_that_never_came_serves_after_the_deadline() -> None:
    served: dict[int, float | None] = {}

    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, guarded(PLAIN), standby=2)
        if peer.me == 0:
            peer.pause(20.0)
            return
        front, middle, back = parts()
        if peer.me == 2:
            above = nn.Sequential(middle, back)
            server = SplitServer(cut, above, sgd(above))
            assert server.serve(2.0)[1].requests == 1
            served[2] = server.took_over_s
            return
        client = SplitClient(cut, front, deadline_s=10.0)
        assert client.backward(*samples(1, BATCH)) is not None
        client.finish()

    SimulatedCrew(3, Faults(latency_s=0.001), seed=3, cost=ComputeCost(STEP_S)).run(train)
    assert served[2] == pytest.approx(2.0, abs=0.1)


@pytest.mark.slow
def test_a_standby_that_dies_stops_nobody() -> None:
    found = Split(4, guarded(PLAIN), BATCHES, crashes=(Crash(3, 0.2),))
    assert all(found.client(peer).answered == BATCHES for peer in (1, 2))
    assert not found.server.replaced
    assert found.ends_s[0] < found.ends_s[1] + 2 * found.deadline_s


# -- Several standbys: peers 3 and 4, behind server 0


def test_one_server_after_the_other_may_die() -> None:
    found = Split(5, guarded(PLAIN), 100, standbys=2, crashes=(Crash(0, 0.7), Crash(3, 1.7)))
    assert not found.gone
    first, second = found.server_at(3), found.server_at(4)
    assert first.took_over_s is not None and 0.7 < first.took_over_s < 1.7
    assert second.took_over_s is not None and second.took_over_s > 1.7
    for peer in (1, 2):
        assert first.served[peer].requests > 10 and second.served[peer].requests > 20
        assert second.served[peer].finished
        assert found.client(peer).missed < 20 and found.losses[peer][-20:].count(None) == 0
        losses = [loss for loss in found.losses[peer] if loss is not None]
        assert sum(losses[-10:]) < sum(losses[10:20]), "what the first standby learned is not lost"


def test_a_standby_that_died_before_is_passed_over() -> None:
    found = Split(5, guarded(PLAIN), 60, standbys=2, crashes=(Crash(3, 0.3), Crash(0, 0.9)))
    assert not found.gone and found.server_at(3).took_over_s is None
    second = found.server_at(4)
    assert second.took_over_s is not None and second.took_over_s > 0.9
    assert all(second.served[peer].finished for peer in (1, 2))


def test_a_standby_that_was_frozen_hears_that_it_was_passed_over() -> None:
    found = Split(5, guarded(PLAIN), 80, standbys=2, crashes=(Crash(0, 0.7),), freezes=(Freeze(3, 0.6, 0.8),))
    first, second = found.server_at(3), found.server_at(4)
    assert second.took_over_s is not None and first.replaced
    assert all(second.served[peer].finished for peer in (1, 2))
    assert found.ends_s[3] < found.ends_s[1], "it does not wait for clients that are not its own"


def test_all_standbys_have_the_last_weights_and_the_server_copies_for_one() -> None:
    found, one = Split(5, guarded(PLAIN), BATCHES, standbys=2), Split(4, guarded(PLAIN), BATCHES)
    for peer in (3, 4):
        assert found.server_at(peer).took_over_s is None
        torch.testing.assert_close(weights(found.server_at(peer)), weights(found.server), rtol=0, atol=0)
    assert found.server.traffic.copy_bytes <= 1.2 * one.server.traffic.copy_bytes
    handed_on = found.server_at(3).traffic.copy_bytes / (4 * found.form.server_values)
    assert handed_on >= 3, "all along, and not in the end only"
    assert found.losses == one.losses


# -- Several servers


class Shared(Split):
    """Peers 0 and 1 are both servers."""

    @staticmethod
    def middle_of(middle: nn.Module) -> nn.Module:
        """A server's layers."""
        return middle

    def _train(self, peer: SimulatedTransport) -> None:
        front, middle, back = self.parts[peer.me] = parts()
        cut = Cut(peer, self.form, server=(0, 1))
        if peer.me in (0, 1):
            above = middle if self.form.outputs is not None else nn.Sequential(middle, back)
            above = self.middle_of(above)
            self.peers[peer.me] = server = SplitServer(cut, above, sgd(above))
            server.serve(self.deadline_s)
        else:
            end = back if self.form.outputs is not None else None
            client = self.peers[peer.me] = SplitClient(cut, front, end, deadline_s=self.deadline_s)
            self._client(peer, client, sgd(front, *([back] if end else [])))
        self.ends_s[peer.me] = peer.now_s()


@pytest.mark.parametrize("form", BOTH)
def test_several_servers_train_one_part_together(form: CutForm) -> None:
    found = Shared(6, guarded(form), 40)
    mine, others = found.server_at(0), found.server_at(1)
    assert {peer: mine.served[peer].requests for peer in range(2, 6)} == {2: 40, 3: 0, 4: 40, 5: 0}
    assert {peer: others.served[peer].requests for peer in range(2, 6)} == {2: 0, 3: 40, 4: 0, 5: 40}
    assert not any(served.lost for server in (mine, others) for served in server.served.values())
    assert all(found.client(peer).missed == 0 for peer in range(2, 6))
    torch.testing.assert_close(weights(mine), weights(others), rtol=0, atol=0)
    x, y = samples(7, 400)
    with torch.no_grad():
        for client in range(2, 6):
            front = found.parts[client][0]
            for server in (0, 1):
                made = found.server_at(server).middle(front(x))
                made = made if form.outputs is None else found.parts[client][2](made)
                assert float((made.argmax(1) == y).float().mean()) > 0.7


class Normed(Shared):
    """Their layers begin with one that keeps statistics of codes."""

    @staticmethod
    def middle_of(middle: nn.Module) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(WIDTH), middle)


@pytest.mark.parametrize("u_shaped", [False, True], ids=["plain", "U-shaped"])
def test_several_servers_may_have_layers_that_keep_statistics(u_shaped: bool) -> None:
    """Layers are mixed while a turn of the U-shaped form waits for its gradient."""
    form, (_, middle, back) = U_SHAPED if u_shaped else PLAIN, parts()
    above = Normed.middle_of(middle if u_shaped else nn.Sequential(middle, back))
    found = Normed(6, replace(form, server_values=state_values(above)), 20)
    assert all(found.client(peer).answered == 20 for peer in range(2, 6))
    torch.testing.assert_close(weights(found.server), weights(found.server_at(1)), rtol=0, atol=0)
    norm = found.server.middle[0]  # type: ignore[index]
    assert isinstance(norm, nn.BatchNorm1d) and int(norm.num_batches_tracked or 0) > 0
    codes = torch.cat([found.parts[peer][0](samples(peer, 20 * BATCH)[0]) for peer in range(2, 6)]).detach()
    assert torch.dist(norm.running_mean, codes.mean(0)) < 0.4 * codes.mean(0).norm()


def test_layers_of_several_servers_do_not_part_while_they_train() -> None:
    apart: list[float] = []
    real = SplitServer._settle

    def noted(self: SplitServer, deadline_s: float) -> None:
        ends.append(weights(self).clone())
        real(self, deadline_s)

    for keeps in (False, True):
        ends: list[Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SplitServer, "_settle", noted)
            if keeps:
                patch.setattr(SplitServer, "_mix", lambda self, answered: None)
            Shared(6, guarded(PLAIN), 40)
        apart.append(float(torch.dist(*ends)))
    assert apart[0] < 0.3 * apart[1]


def test_clients_of_one_of_several_servers_that_dies_are_the_others() -> None:
    found = Shared(6, guarded(PLAIN), 80, crashes=(Crash(0, 0.7),))
    assert not found.gone
    left = found.server_at(1)
    for peer in range(2, 6):
        assert found.losses[peer][-20:].count(None) == 0 and left.served[peer].finished
    assert all(found.client(peer).missed == 0 for peer in (3, 5))
    assert all(found.client(peer).missed < 12 and left.served[peer].requests > 20 for peer in (2, 4))
    ends_s = [found.ends_s[peer] for peer in range(1, 6)]
    assert max(ends_s) < max(ends_s[1:]) + 2.1 * found.deadline_s, "the other server is given up in the end"


def test_a_server_of_several_that_was_frozen_goes_on_with_the_clients_that_it_has() -> None:
    found = Shared(6, guarded(PLAIN), 80, freezes=(Freeze(0, 0.7, 0.6),))
    assert not found.gone
    for peer in range(2, 6):
        assert found.losses[peer][-20:].count(None) == 0
        assert found.server_at(1).served[peer].finished
    torch.testing.assert_close(weights(found.server), weights(found.server_at(1)), rtol=0, atol=0)
    assert max(found.ends_s.values()) < max(found.ends_s[peer] for peer in range(2, 6)) + 0.5


def test_what_several_servers_cannot_be_is_refused() -> None:
    def train(peer: SimulatedTransport) -> None:
        with pytest.raises(ValueError, match="leave the standby out"):
            Cut(peer, guarded(PLAIN), server=(0, 1), standby=2)
        with pytest.raises(ValueError, match="give state_values"):
            Cut(peer, PLAIN, server=(0, 1))
        for server in ((0, 0), (0, 1, 2), (), (0, 5)):
            with pytest.raises(ValueError, match="it takes a client and a server"):
                Cut(peer, guarded(PLAIN), server=server)

    SimulatedCrew(3, Faults(latency_s=0.001), seed=3).run(train)


# -- What does not fit


FITS_NOT = [
    (CutForm(BATCH, (WIDTH,)), {"front": nn.Linear(INPUTS, WIDTH - 1)}, r"the form says \[8, 12\]"),
    (CutForm(BATCH, (WIDTH,)), {"x": samples(1, 0)[0], "y": samples(1, 0)[1]}, "this batch has 0"),
    (CutForm(BATCH, (WIDTH,)), {"x": samples(1, 9)[0], "y": samples(1, 9)[1]}, "a batch of 9 samples"),
    (CutForm(BATCH, (WIDTH,)), {"y": torch.zeros(BATCH - 1, dtype=torch.int64)}, "7 labels for 8 samples"),
    (CutForm(BATCH, (WIDTH,)), {"y": torch.zeros(BATCH, 3)}, r"give CutForm labels=\(3,\)"),
    (CutForm(BATCH, (WIDTH,)), {"y": torch.zeros(BATCH)}, "labels are torch.float32; the form says"),
    (CutForm(BATCH, (WIDTH,)), {"y": torch.full((BATCH,), 1 << 25)}, "a label beyond"),
    (CutForm(BATCH, (WIDTH,)), {"x": samples(1, 1)[0], "y": samples(1, 1)[1]}, "drop_last=True"),
]


@pytest.mark.parametrize(("form", "given", "why"), FITS_NOT)
def test_what_does_not_fit_is_refused_before_anything_leaves(
    form: CutForm, given: dict[str, Any], why: str
) -> None:
    """A front of another width would have put codes where the server reads labels."""
    x, y = samples(1, BATCH)

    def train(peer: SimulatedTransport) -> None:
        front, middle, back = parts()
        cut = Cut(peer, form)
        if peer.me == 0:
            above = nn.Sequential(middle, back)
            served = SplitServer(cut, above, sgd(above)).serve(0.1)
            assert served[1].requests == 0
            return
        client = SplitClient(cut, given.get("front", front), nopeek=0.3)
        before = cut.traffic.messages
        with pytest.raises(ValueError, match=why):
            client.backward(given.get("x", x), given.get("y", y))
        assert cut.traffic.messages == before

    SimulatedCrew(2, Faults(latency_s=0.001), seed=3, cost=ComputeCost(STEP_S)).run(train)


SERVERS = [
    (PLAIN, nn.Linear(WIDTH + 1, CLASSES), None, "middle does not take the form's codes"),
    (
        PLAIN,
        nn.Linear(WIDTH, CLASSES),
        nn.functional.binary_cross_entropy_with_logits,
        "criterion does not take outputs",
    ),
    (PLAIN, nn.Linear(WIDTH, CLASSES), lambda made, y: made, "must make a scalar"),
    (U_SHAPED, nn.Linear(WIDTH, OUTPUTS + 1), None, "makes outputs .10. of a sample; the form says .9."),
    (replace(PLAIN, server_values=7), nn.Linear(WIDTH, CLASSES), None, "has 39 values of weights"),
]


@pytest.mark.parametrize(("form", "above", "criterion", "why"), SERVERS)
def test_a_server_that_does_not_fit_is_refused_before_clients_send(
    form: CutForm, above: nn.Module, criterion: Any, why: str
) -> None:
    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, form, standby=2 if form.server_values else None)
        if peer.me == 0:
            with pytest.raises(ValueError, match=why):
                SplitServer(cut, above, sgd(above), **({"criterion": criterion} if criterion else {}))

    SimulatedCrew(3, Faults(latency_s=0.001), seed=3).run(train)


def test_looking_whether_layers_fit_leaves_no_trace() -> None:
    above = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Linear(WIDTH, CLASSES))
    above[1].eval()
    before = {name: value.clone() for name, value in above.state_dict().items()}

    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, PLAIN)
        if peer.me == 0:
            SplitServer(cut, above, sgd(above))

    SimulatedCrew(2, Faults(latency_s=0.001), seed=3).run(train)
    assert all(torch.equal(before[name], value) for name, value in above.state_dict().items())
    assert [part.training for part in above] == [True, False, True]


def test_a_back_that_would_tell_the_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="labels stay with clients: leave labels out"):
        CutForm(BATCH, (WIDTH,), (OUTPUTS,), labels=(3,))

    def train(peer: SimulatedTransport) -> None:
        cut = Cut(peer, U_SHAPED)
        if peer.me == 1:
            front, _, back = parts()
            with pytest.raises(ValueError, match="tells the labels"):
                SplitClient(cut, front, nn.Identity())
            with pytest.raises(ValueError, match="tells the labels"):
                SplitClient(cut, front, back.requires_grad_(False))
            with pytest.raises(ValueError, match="back does not take the form's outputs"):
                SplitClient(cut, front, nn.Linear(OUTPUTS + 1, CLASSES))

    SimulatedCrew(2, Faults(latency_s=0.001), seed=3).run(train)


def test_a_standby_that_cannot_be_is_refused() -> None:
    def train(peer: SimulatedTransport) -> None:
        with pytest.raises(ValueError, match="standby 0 of 3 peers beside server 0"):
            Cut(peer, guarded(PLAIN), standby=0)
        with pytest.raises(ValueError, match="give state_values"):
            Cut(peer, PLAIN, standby=1)
        with pytest.raises(ValueError, match="give state_values"):
            Cut(peer, guarded(PLAIN))
        cut = Cut(peer, guarded(PLAIN), standby=2)
        if peer.me == 2:
            with pytest.raises(ValueError, match="peer 2 is the standby"):
                SplitClient(cut, parts()[0])
        for standbys in ((1, 1), (1, 2), (0, 1)):  # twice the same, no client left, the server
            with pytest.raises(ValueError, match="it takes a client, a server and other peers"):
                Cut(peer, guarded(PLAIN), standby=standbys)

    SimulatedCrew(3, Faults(latency_s=0.001), seed=3).run(train)
