"""A split as train loader of other frameworks, with an optimizer of a crew; where they are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ragtag.app.environment import VARIABLES
from ragtag.app.launch import launch
from ragtag.app.launch.events import Event, Printed
from ragtag.app.tracefile import read_run
from ragtag.core import trace

SRC = Path(__file__).parents[3] / "src"
SAMPLES, EPOCHS = 320, 3
BEGIN = f"""
import os, torch, ragtag
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
draw = torch.Generator().manual_seed(3)
x = torch.randn({SAMPLES}, 4, generator=draw)
y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]])
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
net = torch.nn.Linear(4, 1)
seen = 0
"""
LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self, crew):
        super().__init__()
        self.net, self.crew = net, crew

    def training_step(self, batch, at):
        global seen
        seen += len(batch[0])
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = self.crew.optimizer(torch.optim.SGD(net.parameters(), lr=0.05), model=net)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}

class Whole:
    def __init__(self, split):
        self.split = split

    def __iter__(self):
        return iter(self.split)

with ragtag.join(deadline_s=60.0) as crew:
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", devices=1, default_root_dir=os.environ["FOLDER"],
    )
    trainer.fit(Module(crew), Whole(crew.split(loader)))
    saved = os.path.join(os.environ["FOLDER"], f"{crew.rank}.ckpt")
    trainer.save_checkpoint(saved)
    assert trainer.optimizers[0]._averaged.progress[0] == trainer.global_step == seen // 16
    print("seen", seen, "loss", float(torch.nn.functional.mse_loss(net(x), y).detach()))
"""
ACCELERATE = """
from accelerate import Accelerator

with ragtag.join(deadline_s=60.0) as crew:
    accelerator = Accelerator(cpu=True)
    optimizer = crew.optimizer(torch.optim.SGD(net.parameters(), lr=0.05), model=net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    model, wrapped, scheduler = accelerator.prepare(net, optimizer, scheduler)
    for epoch in range(EPOCHS):
        for inputs, targets in crew.split(loader):
            seen += len(inputs)
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            wrapped.step()
            scheduler.step()
            wrapped.zero_grad()
    assert optimizer._averaged.progress[0] == seen // 16
    print("seen", seen, "loss", float(torch.nn.functional.mse_loss(net(x), y).detach()))
"""
TRANSFORMERS = """
import transformers

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, at):
        return {"inputs": x[at], "labels": y[at]}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, inputs, labels):
        global seen
        seen += len(inputs)
        found = self.net(inputs)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}

class OfCrew(transformers.Trainer):
    def get_train_dataloader(self):
        return crew.split(DataLoader(self.train_dataset, 16, shuffle=True))

with ragtag.join(deadline_s=60.0) as crew:
    steps = SAMPLES * EPOCHS // 16 // crew.size
    args = transformers.TrainingArguments(
        os.path.join(os.environ["FOLDER"], str(crew.rank)), max_steps=steps, report_to=[], use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=5.0,
    )
    optimizer = crew.optimizer(torch.optim.SGD(net.parameters(), lr=0.05), model=net)
    trainer = OfCrew(model=Net(), args=args, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    assert trainer.state.global_step == seen // 16 <= steps
    print("seen", seen, "loss", float(torch.nn.functional.mse_loss(net(x), y).detach()))
"""
FRAMEWORKS = {"lightning": LIGHTNING, "accelerate": ACCELERATE, "transformers": TRANSFORMERS}


def trained(framework: str, text: str, n: int, folder: Path) -> tuple[list[tuple[int, float]], list[Any]]:
    """What each of ``n`` peers has seen, its loss at the end, and the records of their run."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    script = folder / "peer.py"
    script.write_text(BEGIN + text.replace("SAMPLES", str(SAMPLES)).replace("EPOCHS", str(EPOCHS)))
    events: list[Event] = []
    env = {"PYTHONPATH": str(SRC), "FOLDER": str(folder)}
    result = launch(n, [str(script)], on_event=events.append, env=env, run_folder=folder / "run")
    assert not any(end.failed for end in result.ends), [e.text for e in events if isinstance(e, Printed)]
    said = [e.text.split() for e in events if isinstance(e, Printed) and e.text.startswith("seen ")]
    return [(int(words[1]), float(words[3])) for words in said], list(read_run(folder / "run").records())


@pytest.mark.parametrize(("framework", "text"), FRAMEWORKS.items())
@pytest.mark.parametrize("n", [1, 2])
def test_it_trains_with_a_crew(
    framework: str, text: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*VARIABLES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    peers, records = trained(framework, text, n, tmp_path)
    assert len(peers) == n
    left_out = 16 * n * (framework == "transformers")  # Trainer stops by its steps, not by epochs
    missed = SAMPLES * EPOCHS - sum(seen for seen, _ in peers)
    assert 0 <= missed <= left_out, "together they use each sample once an epoch"
    assert all(loss < 0.05 for _, loss in peers)
    left = [record for record in records if isinstance(record, trace.Leave) and record.peer >= 0]
    assert sorted(record.samples for record in left) == sorted(seen for seen, _ in peers)
    rounds = [record for record in records if isinstance(record, trace.Round)]
    assert max(record.contributors for record in rounds) == n
    told = any(isinstance(record, trace.Step) and isinstance(record.loss, float) for record in records)
    assert told is (framework == "lightning")  # its closure returns the loss
