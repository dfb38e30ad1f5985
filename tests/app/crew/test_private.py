"""``crew.private``: its epsilon in checkpoints, trace and report, and what does not go beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ragtag
from ragtag.app.environment import Place
from ragtag.app.report import build_report
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace
from ragtag.privacy import PrivacyLedger, PrivateTraining

pytest.importorskip("opacus")
X = torch.linspace(-1, 1, 40).reshape(20, 2)
HOW: dict[str, Any] = {"noise_multiplier": 1.5, "max_grad_norm": 1.0, "delta": 1e-3, "seed": 1}


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=5)


def trained(crew: ragtag.Crew, ledger: PrivacyLedger, folder: Path, epochs: int) -> PrivateTraining:
    """Resumes, trains, saves."""
    model = nn.Linear(2, 1)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    private = crew.private(model, optimizer, loader(), ledger=ledger, **HOW)
    crew.resume(folder)
    for _ in range(epochs):
        for x, y in private:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    crew.save(folder)
    return private


def test_who_resumes_has_the_epsilon_that_it_had(tmp_path: Path) -> None:
    """By its checkpoint alone: its ledger has no file here."""
    with ragtag.join() as crew:
        before = trained(crew, PrivacyLedger("A"), tmp_path, 2)
    with ragtag.join() as crew:
        again = trained(crew, PrivacyLedger("A"), tmp_path, 0)
        assert again.epsilon == before.epsilon > 0
    with ragtag.join() as crew:
        longer = trained(crew, PrivacyLedger("A"), tmp_path, 1)
        assert longer.ledger.steps == before.ledger.steps + 4 == 12
    with ragtag.join() as crew:
        assert trained(crew, PrivacyLedger("B"), tmp_path, 0).ledger.steps == 0, "other samples"


@pytest.mark.parametrize("resumed", ["after crew.private", "before it", "as a late peer"])
def test_the_newest_checkpoint_is_anothers_and_epsilon_is_what_ones_own_says(
    tmp_path: Path, resumed: str
) -> None:
    """Peers of one folder go on from the newest checkpoint of any of them, which has its writer's ledger."""
    with ragtag.join() as crew:
        trained(crew, PrivacyLedger("A"), tmp_path, 2)
    with ragtag.join() as crew:
        trained(crew, PrivacyLedger("B"), tmp_path, 1)
    with ragtag.join() as crew:
        ledger, model = PrivacyLedger("A"), nn.Linear(2, 1)
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        if resumed == "before it":
            crew.resume(tmp_path)
        crew.private(model, optimizer, loader(), ledger=ledger, **HOW)
        if resumed == "after crew.private":
            crew.resume(tmp_path)
        if resumed == "as a late peer":  # it has the crew's state, of which its own ledger is no part
            crew._peer.keeper.look_back(tmp_path)
        assert ledger.steps == 8


def test_trace_and_report_tell_what_was_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    place = Place(0, 1, "crew", seed=7, run_folder=run, peers=(("127.0.0.1", 4000),))
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)
    with ragtag.join() as crew:
        private = trained(crew, PrivacyLedger("hospital A"), tmp_path, 2)
    lines = (run / peer_file(0)).read_bytes().splitlines()
    told = [record for record in map(trace.decode, lines) if isinstance(record, trace.Privacy)]
    assert len(told) == 2, "one at first, one at the end"
    assert (told[-1].steps, told[-1].holder) == (8, "hospital A")
    assert told[-1].epsilon == pytest.approx(private.epsilon)
    with TraceWriter(run / peer_file(trace.CREW)) as writer:
        writer.write(trace.Run(t=0.0, world="live", name="run", seed=1, peers=1, method="rps", config={}))
    page = build_report(run).read_text(encoding="utf-8")
    section = page[page.index("<h2>Differential privacy</h2>") :]
    row = section[section.index("hospital A") : section.index("</table>")]
    assert [cell.partition("<")[0] for cell in row.split('<td class="num">')[1:]] == [
        f"{private.epsilon:.4g}", "0.001", "8", "1.5", "25 %",
    ]  # fmt: skip


def test_kfac_and_a_second_private_model_are_refused() -> None:
    with ragtag.join() as crew:
        model = nn.Linear(2, 1)
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        crew.private(model, optimizer, loader(), ledger=PrivacyLedger("A"), **HOW)
        with pytest.raises(ValueError, match="its factors are of samples"):
            crew.kfac(model, optimizer)
        with pytest.raises(ValueError, match="one model privately already"):
            crew.private(nn.Linear(2, 1), optimizer, loader(), ledger=PrivacyLedger("A"), **HOW)
    with ragtag.join() as crew:
        model = nn.Linear(2, 1)
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        crew.kfac(model, optimizer).close()
        with pytest.raises(ValueError, match="K-FAC averages factors of samples"):
            crew.private(model, optimizer, loader(), ledger=PrivacyLedger("A"), **HOW)


def test_layers_that_are_averaged_without_noise_are_refused() -> None:
    """A body with noise and a head without: the head would tell the samples."""
    with ragtag.join() as crew:
        body, head = nn.Linear(2, 2), nn.Linear(2, 1)
        first, second = (
            crew.optimizer(torch.optim.SGD(m.parameters(), lr=0.1), model=m) for m in (body, head)
        )
        with pytest.raises(ValueError, match="'model 2' is averaged, too, without noise"):
            crew.private(body, first, loader(), ledger=PrivacyLedger("A"), **HOW)
        crew.private(body, first, loader(), ledger=PrivacyLedger("A"), beside=[second], **HOW)
        with pytest.raises(ValueError, match="make it before that"):
            crew.optimizer(torch.optim.SGD(head.parameters(), lr=0.1), model=head)
