"""The NoPeek recipe: what is trained, what is judged, and that it can fail."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from ragtag.privacy import meters
from ragtag.privacy.correlation import distance_correlation
from ragtag.privacy.meters import Leakage
from ragtag.recipes.cache import ResultCache
from ragtag.recipes.nopeek import recipe, training
from ragtag.recipes.nopeek.training import CutResult, CutSetup, Samples, cut_net, measure_cut, trained


def result(weight: float, seed: int, dcor: float, mse: float) -> CutResult:
    leak = Leakage(dcor, 0.1, mse, 0.1, 0.9, 0.3, "linear", {"linear": mse}, 360, 1437, 0)
    return CutResult(CutSetup(weight, seed, 60), 0.95, 1.0, 0.1, leak)


WELL = [
    result(0.0, 0, 0.95, 0.01),
    result(10.0, 0, 0.3, 0.03),
    result(0.0, 1, 0.91, 0.01),
    result(10.0, 1, 0.34, 0.02),
]


def test_what_is_to_come_out_passes() -> None:
    rows = recipe.judged(WELL)
    assert [row.ok for row in rows] == [True] * 3
    assert [row.measured for row in rows] == pytest.approx([0.91, 0.34, 2.0])


@pytest.mark.parametrize(
    ("at", "worse", "row"),
    [
        (2, result(0.0, 1, 0.89, 0.01), 0),
        (3, result(10.0, 1, 0.36, 0.02), 1),
        (3, result(10.0, 1, 0.34, 0.019), 2),
    ],
)
def test_one_seed_that_misses_is_enough_to_fail(at: int, worse: CutResult, row: int) -> None:
    rows = recipe.judged([*WELL[:at], worse, *WELL[at + 1 :]])
    assert [found.ok for found in rows] == [i != row for i in range(3)]


def test_table_and_figure_have_every_weight() -> None:
    table = recipe.by_weight(WELL)
    assert [line[0] for line in table.rows] == ["0", "10"]
    assert table.columns[-1] == "trained" and "held out" in table.title
    figure = recipe.trade_off(WELL, "digits")
    assert figure.svg.count("trained on: no result") == 1
    assert "means over 2 seeds" in figure.caption


def test_nopeek_lowers_dcor_at_the_cut_in_a_few_epochs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(meters, "EPOCHS", 1)
    counts = []

    def counted(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        return distance_correlation(x, z)

    monkeypatch.setattr(training, "distance_correlation", counted)
    plain, hidden = (measure_cut(CutSetup(weight, 0, 1), None) for weight in (0.0, 10.0))
    assert plain.leak.dcor > 0.9
    assert hidden.leak.dcor < plain.leak.dcor - 0.1
    assert plain.accuracy > 0.5 and plain.leak.held == 360
    assert counts == [hidden.leak.held] * 2, "dCor falls with the number of samples"
    cache = ResultCache(tmp_path)
    cache.store(measure_cut, (hidden.setup, None), hidden)
    assert cache.find(measure_cut, (hidden.setup, None)) == (True, hidden)


def test_one_seed_trains_one_net() -> None:
    samples = Samples.of(None)
    few = replace(samples, train_x=samples.train_x[:256], train_y=samples.train_y[:256])
    first, again, other = (trained(CutSetup(1.0, seed, 1), few)[0] for seed in (0, 0, 1))
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert not first.training


def test_larger_images_have_a_net_of_their_own() -> None:
    below, above = cut_net((3, 32, 32), 0)
    codes = below(torch.zeros(2, 3, 32, 32))
    assert codes.shape == (2, 16, 16, 16) and above(codes).shape == (2, 10)


def test_an_archive_of_images_is_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(meters, "EPOCHS", 1)
    monkeypatch.setattr(meters, "HIDDEN", 8)
    monkeypatch.setattr(training, "BATCH", 16)
    monkeypatch.setattr(recipe, "FEWER", (0.0, recipe.JUDGED))
    monkeypatch.setattr(recipe, "CIFAR_EPOCHS", 1)
    source = tmp_path / "images"
    noise = torch.Generator().manual_seed(0)
    for part, count in (("train", 12), ("test", 4)):
        for label in ("cat", "dog"):
            (source / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (32, 32, 3), generator=noise, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(source / part / label / f"{i}.png")
    archive = tmp_path / "images.tar"
    with tarfile.open(archive, "w") as tar:
        for path in sorted(source.rglob("*.png")):
            tar.add(path, path.relative_to(source).as_posix())
    report = recipe.reproduce(quick=True, data=archive, out=tmp_path / "out", jobs=1)
    assert report.settings["task"] == "CIFAR-10"
    assert [line[0] for line in report.tables[0].rows] == ["0", "10"]
    assert (tmp_path / "out" / "trade_off.svg").exists()


@pytest.mark.slow
def test_the_quick_form_passes(tmp_path: Path) -> None:
    report = recipe.reproduce(quick=True, out=tmp_path, jobs=2)
    assert report.ok, [row for row in report.rows if not row.ok]
