"""A server that trains the cut for its own ends reads digits, whether the client adds NoPeek or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ragtag.core.errors import NotFinite
from ragtag.core.faults import Faults
from ragtag.core.seed import generator
from ragtag.privacy import Hijacker, SplitModel, hijacked, hijacking
from ragtag.privacy.split import Cut, CutForm, SplitClient, SplitServer
from ragtag.recipes.nopeek.training import Samples
from ragtag.simulation.transport import SimulatedCrew, SimulatedTransport


def front() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def drawn(n: int = 8) -> Tensor:
    return torch.from_numpy(generator(0, "samples").uniform(size=(n, 1, 8, 8))).float()


@pytest.mark.slow
@pytest.mark.parametrize("nopeek", [0.0, 10.0])
def test_a_hijacked_client_gives_digits_away_and_nopeek_does_not_stop_it(nopeek: float) -> None:
    digits, client = Samples.of(None), front()
    before = [p.clone() for p in client.parameters()]
    found = hijacking(client, digits.train_x, digits.held_x, nopeek=nopeek, steps=180, batch=32)
    assert found.hidden < 0.6, "0.4 of the variance at least, by a server that saw no sample of the client's"
    assert found.ssim is not None and found.blind_ssim is not None and found.ssim > found.blind_ssim + 0.2
    assert (found.samples, found.public, found.steps) == (1024, 360, 180)
    assert all(torch.equal(p, old) for p, old in zip(client.parameters(), before, strict=True)), "a copy"


def test_what_goes_down_is_the_servers_pull_alone() -> None:
    server = Hijacker(drawn(), (8, 4, 4), positive=True, pull=7.0)
    model = SplitModel(front(), server, criterion=hijacked)
    model.backward(drawn(5), torch.zeros(0))
    seen = front()(drawn(5)).detach().requires_grad_()
    (7.0 * -server.critic(seen).mean()).backward()
    again = front()
    again(drawn(5)).backward(seen.grad)
    for p, wanted in zip(model.front.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p.grad, wanted.grad)


def test_the_critic_learns_from_its_own_loss_and_not_from_the_pull() -> None:
    gradients = []
    for pull in (1.0, 100.0):
        server = Hijacker(drawn(), (8, 4, 4), pull=pull)
        server(front()(drawn(5)).detach()).backward()
        gradients.append([p.grad for p in server.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_codes_that_are_no_maps_and_the_same_seed() -> None:
    def flat() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    first, again = (hijacking(flat(), drawn(), drawn(6).flip(0), steps=2, batch=4) for _ in range(2))
    assert first == again and first != replace(first, mse=0.0)
    assert hijacking(flat(), drawn(), drawn(6), steps=2, batch=4, seed=1).mse != first.mse


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"private samples are \[8, 1, 8, 8\], public \[2, 3\]"):
        hijacking(front(), drawn(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="no parameters that learn"):
        hijacking(nn.Flatten(), drawn(), drawn())
    with pytest.raises(ValueError, match="all samples are equal"):
        hijacking(front(), torch.ones(4, 1, 8, 8), drawn())
    with pytest.raises(NotFinite, match="NaN or infinity in samples"):
        hijacking(front(), drawn() * float("nan"), drawn())
    with pytest.raises(ValueError, match="1 public samples"):
        Hijacker(drawn(1), (8, 4, 4))


def test_that_labels_stay_is_no_protection() -> None:
    """In the U-shaped form the client's codes get the gradients that they get in the plain one."""
    x, fronts = drawn(), (front(), front())
    shape = tuple(fronts[0](x).shape[1:])
    labels = torch.arange(len(x)) % 3
    plain = SplitModel(fronts[0], Hijacker(drawn(6), shape), criterion=hijacked)
    plain.backward(x, torch.zeros(0))
    back = nn.Linear(5, 3)
    SplitModel(fronts[1], Hijacker(drawn(6), shape, outputs=(5,)), back).backward(x, labels)
    assert back.weight.grad is not None
    for a, b in zip(fronts[0].parameters(), fronts[1].parameters(), strict=True):
        assert a.grad is not None and a.grad.abs().max() > 0
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("u_shaped", [False, True])
def test_a_split_server_in_a_crew_may_be_one(u_shaped: bool) -> None:
    served: list[int] = []

    def train(peer: SimulatedTransport) -> None:
        client = front()
        shape = tuple(client(drawn(2)).shape[1:])
        outputs = (5,) if u_shaped else None
        cut = Cut(peer, CutForm(8, shape, outputs))
        if peer.me == 0:
            server = Hijacker(drawn(6), shape, outputs=outputs)
            criterion = nn.functional.cross_entropy if u_shaped else hijacked
            learns = torch.optim.Adam(server.parameters())
            served.append(SplitServer(cut, server, learns, criterion=criterion).serve(5.0)[1].requests)
            return
        before = [p.detach().clone() for p in client.parameters()]
        split, own = SplitClient(cut, client, nn.Linear(5, 3) if u_shaped else None), client.parameters()
        optimizer = torch.optim.SGD(own, 0.1)
        for _ in range(3):
            assert split.backward(drawn(), torch.arange(8) % 3) is not None
            optimizer.step()
        split.finish()
        assert all(not torch.equal(a, b) for a, b in zip(before, client.parameters(), strict=True))

    SimulatedCrew(2, Faults(latency_s=0.001), seed=3).run(train)
    assert served == [3]
