"""What the meters of a cut report: of held-out samples only, by the decoder that reads most."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ragtag.core.errors import NotFinite
from ragtag.core.seed import generator
from ragtag.privacy import distance_correlation, leakage, meters


def drawn(*shape: int, name: str) -> Tensor:
    return torch.from_numpy(generator(0, name).standard_normal(shape)).float()


TRAIN, HELD = drawn(240, 1, 3, 4, name="training").sigmoid(), drawn(80, 1, 3, 4, name="held out").sigmoid()


def small(codes: int, values: int) -> nn.Module:
    return nn.Sequential(nn.Linear(codes, 32), nn.Tanh(), nn.Linear(32, values))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "EPOCHS", 50)


def measured(cut: meters.Cut, train: Tensor = TRAIN, held: Tensor = HELD) -> meters.Leakage:
    return leakage(cut, train, held, network=small)


def test_codes_that_are_the_sample_tell_all() -> None:
    found = measured(lambda x: 3 * x)
    assert found.dcor == pytest.approx(1.0, abs=1e-6)
    assert found.mse < 1e-3 * found.blind_mse and found.decoder == "linear"
    assert found.hidden < 1e-3
    assert found.ssim == pytest.approx(1.0, abs=1e-3)
    assert (found.held, found.pairs, found.shared) == (80, 240, 0)


def test_codes_that_are_constant_tell_nothing() -> None:
    found = measured(lambda x: torch.ones(len(x), 5))
    assert found.dcor == 0.0 == found.independent_dcor
    assert found.hidden == pytest.approx(1.0, abs=0.05)
    assert found.blind_mse == pytest.approx(float((HELD - TRAIN.mean(0)).square().mean()), rel=1e-5)
    assert found.ssim == pytest.approx(found.blind_ssim, abs=0.05)


def test_codes_beside_other_samples_show_how_low_it_gets() -> None:
    found = measured(lambda x: x.flatten(1)[:, :6])
    shuffled = float(distance_correlation(HELD.double(), drawn(80, 6, name="noise").double()))
    assert found.independent_dcor == pytest.approx(shuffled, abs=0.1)
    assert found.dcor > found.independent_dcor + 0.2


def test_what_training_samples_show_is_no_result() -> None:
    """A cut that is silent on what it was trained on, and tells all of what it was not."""
    known = {x.numpy().tobytes() for x in TRAIN}

    def cut(x: Tensor) -> Tensor:
        seen = torch.tensor([row.numpy().tobytes() in known for row in x])
        return torch.where(seen[:, None], torch.zeros(()), x.flatten(1))

    assert measured(cut).dcor == pytest.approx(1.0, abs=1e-6)
    assert measured(lambda x: x.flatten(1) - cut(x)).dcor == 0.0


def test_held_out_samples_that_were_trained_on_are_left_out() -> None:
    found = measured(lambda x: x, held=torch.cat([TRAIN[:50], HELD]))
    assert (found.held, found.shared) == (80, 50)
    assert found.dcor == measured(lambda x: x).dcor
    with pytest.raises(ValueError, match="0 held out \\(240 more were trained on\\)"):
        measured(lambda x: x, held=TRAIN)


def test_a_decoder_reads_what_distance_correlation_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some codes lie far out: distances tell little of the samples, and each code all of its own."""
    monkeypatch.setattr(meters, "EPOCHS", 200)

    def cut(x: Tensor) -> Tensor:
        far = torch.where(x.flatten(1)[:, :1] > 0.85, 300.0, 1.0)
        return torch.cat([x.flatten(1) * far, far], 1)

    found = measured(cut)
    assert found.dcor < found.independent_dcor + 0.05
    assert found.hidden < 0.3


def test_the_better_of_both_decoders_counts() -> None:
    found = measured(lambda x: (4 * x.flatten(1) - 2) ** 5)
    assert found.decoder == "network"
    assert found.mse == found.mse_by["network"] < found.mse_by["linear"]


def test_more_codes_than_pairs_are_solved_all_the_same() -> None:
    wide = drawn(12, 600, name="wide")
    found = measured(lambda x: x.flatten(1) @ wide)
    assert found.mse_by["linear"] < 1e-3 * found.blind_mse


def test_a_module_is_measured_as_it_evaluates_and_put_back() -> None:
    frozen = nn.BatchNorm2d(1).eval()
    cut = nn.Sequential(frozen, nn.Dropout(0.9), nn.Flatten())
    cut[1].train()
    found = measured(cut)
    assert found.dcor == pytest.approx(1.0, abs=1e-6)
    assert cut.training and cut[1].training and not frozen.training
    assert cut[0].num_batches_tracked == 0


def test_one_seed_gives_one_result_and_leaves_torchs_stream_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = measured(lambda x: x.flatten(1).abs())
    assert torch.equal(before, torch.random.get_rng_state())
    assert measured(lambda x: x.flatten(1).abs()) == first


def test_samples_that_are_no_images_have_no_ssim() -> None:
    found = measured(lambda x: x, TRAIN.flatten(1), HELD.flatten(1))
    assert found.ssim is None and found.blind_ssim is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="same values in a sample"):
        measured(lambda x: x, held=HELD[:, :, :2])
    with pytest.raises(ValueError, match="it takes 16 and 2"):
        measured(lambda x: x, train=TRAIN[:9])
    with pytest.raises(NotFinite, match="in codes"):
        measured(lambda x: x / 0)
    with pytest.raises(ValueError, match="all samples are equal"):
        measured(lambda x: x, torch.ones(20, 4), torch.zeros(2, 4))


# -- SSIM


def by_the_paper(x: np.ndarray, y: np.ndarray, span: float, side: int) -> float:
    """Equations 13 to 17, pixel by pixel."""
    r = np.arange(side) - side // 2
    w = np.exp(-(r[:, None] ** 2 + r**2) / (2 * 1.5**2))
    w /= w.sum()
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    found = []
    for i in range(x.shape[0] - side + 1):
        for j in range(x.shape[1] - side + 1):
            u, v = x[i : i + side, j : j + side], y[i : i + side, j : j + side]
            mu, mv = (w * u).sum(), (w * v).sum()
            su, sv = (w * (u - mu) ** 2).sum(), (w * (v - mv) ** 2).sum()
            suv = (w * (u - mu) * (v - mv)).sum()
            found.append((2 * mu * mv + c1) * (2 * suv + c2) / ((mu**2 + mv**2 + c1) * (su + sv + c2)))
    return float(np.mean(found))


@pytest.mark.parametrize(("height", "width", "side"), [(14, 16, 11), (8, 8, 7), (9, 30, 9), (1, 5, 1)])
def test_ssim_is_the_papers(height: int, width: int, side: int) -> None:
    x = drawn(2, 3, height, width, name="image").double()
    y = 0.8 * x + 0.3 * drawn(2, 3, height, width, name="error")
    expected = [
        np.mean([by_the_paper(x[i, c].numpy(), y[i, c].numpy(), 4.0, side) for c in range(3)])
        for i in range(2)
    ]
    assert meters.ssim(x, y, 4.0).tolist() == pytest.approx(expected, rel=1e-9)


def test_ssim_by_hand() -> None:
    """Of plain grey images only the first factor is left: (2 * .5 * .25 + .0001) / (.25 + .0625 + .0001)."""
    grey = torch.full((1, 1, 12, 12), 0.5)
    assert float(meters.ssim(grey, grey / 2, 1.0)) == pytest.approx(0.2501 / 0.3126, rel=1e-9)
    assert float(meters.ssim(grey, grey, 1.0)) == 1.0
    checks = (torch.arange(144) % 2).double().reshape(1, 1, 12, 12)
    assert float(meters.ssim(checks, 1 - checks, 1.0)) < -0.9, "of the inverse it is below 0"


def test_ssim_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="both must be"):
        meters.ssim(HELD, HELD[:, :, :2], 1.0)
    with pytest.raises(ValueError, match="above 0"):
        meters.ssim(HELD, HELD, 0.0)
