"""Split training is the whole net's, and what crosses the cut is what the formulas say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ragtag.core.seed import generator
from ragtag.privacy import SplitModel, distance_correlation
from ragtag.privacy.split import (
    VALUE_BYTES,
    crossover_clients,
    federated_bytes,
    hand_over,
    large_batch_bytes,
    split_bytes,
)

N, INPUTS, WIDTH, CLASSES, BATCH = 48, 10, 12, 3, 8


def drawn(*shape: int, name: str) -> Tensor:
    return torch.from_numpy(generator(0, name).standard_normal(shape)).float()


X, Y = drawn(N, INPUTS, name="x"), torch.arange(N) % CLASSES


def parts() -> list[nn.Module]:
    front = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    middle = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh())
    made: list[nn.Module] = [front, middle, nn.Linear(9, CLASSES)]
    for i, part in enumerate(made):
        for j, p in enumerate(part.parameters()):
            p.data = 0.4 * drawn(*p.shape, name=f"part {i}, weight {j}")
    return made


def batches() -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(BATCH), Y.split(BATCH), strict=True))


def split_of(made: list[nn.Module], u_shaped: bool, nopeek: float = 0.0) -> SplitModel:
    front, middle, back = made
    if u_shaped:
        return SplitModel(front, middle, back, nopeek=nopeek)
    return SplitModel(front, nn.Sequential(middle, back), nopeek=nopeek)


@pytest.mark.parametrize("u_shaped", [False, True])
@pytest.mark.parametrize("nopeek", [0.0, 0.8])
def test_it_trains_as_the_whole_net_does(u_shaped: bool, nopeek: float) -> None:
    whole, made = nn.Sequential(*parts()), parts()
    split = split_of(made, u_shaped, nopeek)
    of_whole = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    of_client = torch.optim.SGD(
        [*made[0].parameters(), *(made[2].parameters() if u_shaped else [])], 0.1, 0.9
    )
    of_server = torch.optim.SGD(
        [*made[1].parameters(), *([] if u_shaped else made[2].parameters())], 0.1, 0.9
    )
    for _ in range(3):
        for x, y in batches():
            codes = whole[0](x)
            loss = F.cross_entropy(whole[2](whole[1](codes)), y)
            (loss + nopeek * distance_correlation(x, codes)).backward()
            found = split.backward(x, y)
            assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
            for optimizer in (of_whole, of_client, of_server):
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(whole.state_dict().values(), nn.Sequential(*made).state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    whole.eval()
    for part in made:
        part.eval()
    torch.testing.assert_close(whole(X), split.predict(X), rtol=1e-5, atol=1e-6)


def test_nothing_but_values_crosses_the_cut() -> None:
    """The server's part of a plain split holds no way back to the client's input."""
    made = parts()
    seen: list[Tensor] = []
    made[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    split_of(made, u_shaped=False).backward(X, Y)
    assert seen[0].is_leaf and seen[0].grad_fn is None
    assert seen[0].untyped_storage().data_ptr() != made[0](X).untyped_storage().data_ptr()


@pytest.mark.parametrize("u_shaped", [False, True])
def test_an_epoch_sends_what_the_formula_says(u_shaped: bool) -> None:
    split = split_of(parts(), u_shaped)
    for x, y in batches():
        split.backward(x, y)
    traffic = split.traffic
    width = WIDTH + 9 if u_shaped else WIDTH
    assert traffic.bytes == split_bytes(N, width)
    assert traffic.up_bytes == traffic.down_bytes
    assert traffic.label_bytes == (0 if u_shaped else 8 * N)
    assert traffic.messages == (4 if u_shaped else 2) * len(batches())


def test_clients_that_hand_weights_on_send_the_formulas_bytes() -> None:
    """Four clients in turn, as one that has all the data: each goes on with the weights of the one before."""
    clients = 4
    front, middle, back = parts()
    alone, above = copy.deepcopy(front), copy.deepcopy(nn.Sequential(middle, back))
    fronts = [copy.deepcopy(front) for _ in range(clients)]
    server = nn.Sequential(middle, back)
    handed, shares = 0, list(zip(X.split(N // clients), Y.split(N // clients), strict=True))
    splits = [SplitModel(front, server) for front in fronts]
    single = SplitModel(alone, above)

    def step(*modules: nn.Module) -> None:
        for p in nn.ModuleList(modules).parameters():
            assert p.grad is not None
            p.data -= 0.1 * p.grad
            p.grad = None

    for turn in range(clients):
        splits[turn].backward(*shares[turn])
        step(fronts[turn], server)
        single.backward(*shares[turn])
        step(alone, above)
        handed += hand_over(fronts[turn], fronts[(turn + 1) % clients])
    for a, b in zip(alone.state_dict().values(), fronts[0].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    below = sum(value.numel() for value in front.state_dict().values())
    parameters = below + sum(p.numel() for p in server.parameters())
    formula = split_bytes(N, WIDTH, clients=clients, parameters=parameters, share=below / parameters)
    counted = sum(split.traffic.bytes for split in splits) + handed
    assert counted == pytest.approx(formula, rel=0.01)  # BatchNorm's count of batches takes 8 bytes


def test_the_formulas_by_hand() -> None:
    assert federated_bytes(10, 1000) == 2 * 10 * 1000 * VALUE_BYTES
    assert large_batch_bytes(7, 1000) == 2 * 7 * 1000 * VALUE_BYTES
    samples, width, parameters = 50_000, 256, 1_000_000
    clients = crossover_clients(samples, width, parameters)
    assert clients == 12.8
    assert federated_bytes(13, parameters) > split_bytes(samples, width) > federated_bytes(12, parameters)


def test_a_front_without_parameters_is_no_error() -> None:
    server = nn.Linear(INPUTS, CLASSES)
    SplitModel(nn.Identity(), server).backward(X, Y)
    assert server.weight.grad is not None


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="nopeek is -1"):
        SplitModel(nn.Identity(), nn.Identity(), nopeek=-1.0)


def test_a_batch_of_one_has_no_distances() -> None:
    front, seen = nn.Linear(INPUTS, WIDTH), list[Tensor]()
    server = nn.Linear(WIDTH, CLASSES)
    server.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with pytest.raises(ValueError, match="drop_last=True"):
        SplitModel(front, server, nopeek=1.0).backward(X[:1], Y[:1])
    assert not seen
    SplitModel(front, server).backward(X[:1], Y[:1])
