"""What a script meets first: names, arguments, texts, and errors that say what to write."""

from __future__ import annotations

import builtins
import gc
import importlib
import inspect
import operator
import pkgutil
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ragtag
import ragtag.privacy.encrypted
import ragtag.ray
from ragtag.app.crew.crew import Crew
from ragtag.app.environment import VARIABLES
from ragtag.hooks.alone import alone
from ragtag.protocols.channel.averager import Averager
from ragtag.training.named import Averaging
from ragtag.training.optimizer.optimizer import CrewOptimizer
from ragtag.training.samples.split import Split

ROOT = Path(__file__).parents[3]
OF_THE_CREW = {"transport", "samples", "siblings", "on_ready", "on_note", "on_step", "seed"}
"""What a crew tells its optimizers by itself."""


@pytest.fixture(autouse=True)
def nobody_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# -- Names


def test_dir_shows_what_is_for_users_and_nothing_else() -> None:
    assert dir(ragtag) == sorted(ragtag.__all__)
    assert {"join", "RPS", "schedules"} <= set(dir(ragtag))


def test_names_are_shown_before_torch_is_imported() -> None:
    code = "import ragtag, sys; assert 'join' in dir(ragtag); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_messages_and_documents_say_to_write_is_there() -> None:
    said = [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        (name, path.name)
        for path in said
        for name in re.findall(r"\bragtag\.((?:[a-z]\w*\.)?[A-Z]\w*)\(", path.read_text(encoding="utf-8"))
    }
    assert {"schedules.SSP", "RPS"} <= {name for name, _ in named}
    missing = set()
    for name, where in sorted(named):
        try:
            operator.attrgetter(name)(ragtag)
        except AttributeError:
            missing.add(f"{where}: ragtag.{name}")
    assert not missing


CREW = (
    "rank size live seed left invitation",
    "optimizer tensors cut secure_average private kfac split epochs step keep save resume",
    "log log_step log_eval",
    "finish leave",
)
"""What an editor shows after ``crew.``: what the README tells of, and nothing of how it is done."""
TENSORS = ("name average publish newest", "mine owners only clock", "state_dict load_state_dict")
SHOWN = {
    "a crew": (Crew, " ".join(CREW)),
    "an optimizer": (CrewOptimizer, "inner name average outcome samples"),
    "a split": (Split, "dataset batch_size epoch samples"),
    "named tensors": (ragtag.NamedTensors, " ".join(TENSORS)),
    "a round of named tensors": (Averaging, "over result"),
    "a hook's state": (ragtag.hooks.CrewState, "name outcome behind average_models"),
    "a sparse hook's state": (ragtag.hooks.SparseState, "stats state_dict load_state_dict"),
    "a model in a hook's DDP": (DistributedDataParallel, ""),
}
"""What an editor shows of each thing that a script holds; of torch's own kinds, beyond what these show."""


def held() -> dict[str, object]:
    """One of each thing that a script holds, in use."""
    crew, model = ragtag.join(), torch.nn.Linear(2, 1)
    optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    split = crew.split(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    for (inputs,) in split:
        model(inputs).sum().backward()
        optimizer.step()
    tensors = crew.tensors("factors", averaged={"a": (2,)}, computed={"b": (2,)})
    averaging = tensors.average({"a": torch.ones(2)})
    averaging.result()
    state = ragtag.hooks.CrewState(crew, torch.nn.Linear(2, 1))
    return {
        "a crew": crew,
        "an optimizer": optimizer,
        "a split": split,
        "named tensors": tensors,
        "a round of named tensors": averaging,
        "a hook's state": state,
        "a sparse hook's state": ragtag.hooks.SparseState(ratio=0.1),
        "a model in a hook's DDP": ragtag.hooks.ddp(torch.nn.Linear(2, 1), crew),
    }


def shown(it: object) -> set[str]:
    return {name for name in dir(it) if not name.startswith("_")}


def test_what_a_script_holds_shows_what_is_for_users_and_nothing_else() -> None:
    model = torch.nn.Linear(2, 1)
    torchs: dict[str, object] = {
        "an optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "a model in a hook's DDP": DistributedDataParallel(model, process_group=alone(), init_sync=False),
    }
    found = held()
    assert found.keys() == SHOWN.keys()
    for what, it in found.items():
        kind, names = SHOWN[what]
        own = set(names.split())
        assert type(it) is kind, what
        assert shown(it) - shown(torchs.get(what)) == own, what
        assert shown(torchs.get(what)) <= shown(it), what
        for name in own:
            assert inspect.getdoc(getattr(kind, name)), f"{name} of {what} has no docstring"


def test_nothing_that_users_call_hides_its_arguments() -> None:
    """An editor shows no ``**options``, but where DDP's own, or a user's names, are passed on."""
    passed_on = {(Crew, "keep")}
    kinds = [kind for kind, _ in SHOWN.values() if kind.__module__.startswith("ragtag")]
    for kind in (*kinds, *(getattr(ragtag, name) for name in ragtag._HOMES)):
        for name, found in vars(kind).items() if inspect.isclass(kind) else [("", kind)]:
            if (name == "__init__" or not name.startswith("_")) and inspect.isfunction(found):
                takes = {p.kind for p in inspect.signature(found).parameters.values()}
                hides = inspect.Parameter.VAR_KEYWORD in takes
                assert not hides or (kind, name) in passed_on or issubclass(kind, Exception), (kind, name)


# -- Arguments


def test_an_editor_sees_all_arguments_of_an_optimizer() -> None:
    own = inspect.signature(CrewOptimizer).parameters
    shown = inspect.signature(Crew.optimizer).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in shown.values())
    for_users = {name for name in own if name not in OF_THE_CREW} - {"inner", "method"}
    assert set(shown) - {"self", "optimizer", "averager"} == for_users
    for name in for_users:
        assert f"{name}: " in inspect.getdoc(Crew.optimizer), name
        if name != "name":  # where none is given, the crew finds one
            assert shown[name].annotation == own[name].annotation, name
            assert shown[name].default == own[name].default, name


def test_a_crews_kfac_takes_what_one_processs_takes() -> None:
    own, shown = inspect.signature(ragtag.KFAC).parameters, inspect.signature(Crew.kfac).parameters
    given_by_the_crew = {"communicator", "on_note", "optimizer", "model"}
    for name in own.keys() - given_by_the_crew:
        assert shown[name].annotation == own[name].annotation, name
        assert shown[name].default == (True if name == "background" else own[name].default), name
    for name in shown.keys() - own.keys() - {"self"}:
        assert f"{name}: " in inspect.getdoc(Crew.kfac), name


def test_kfac_alone_trains_and_is_kept_with_the_rest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    steps, ages = [], []
    for _ in range(2):
        with ragtag.join() as crew:
            sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = crew.optimizer(sgd, model=model, average="gradients")
            kfac = crew.kfac(model, optimizer, inverse_every=2, background=False)
            crew.resume(tmp_path)
            for _ in range(7):
                optimizer.zero_grad()
                x = torch.randn(16, 4)
                torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
                kfac.step()
                optimizer.step()
            assert kfac.plain == ()
            crew.save(tmp_path)
        steps.append(kfac.steps)
        ages.append(kfac.age)
    assert steps == [7, 14] and max(ages) <= 3
    with pytest.raises(ragtag.HasLeft):
        crew.kfac(model, sgd)


@pytest.mark.parametrize("first", ["optimizer", "kfac"])
def test_kfac_knows_the_crews_steps_by_the_inner_optimizer_too(first: str) -> None:
    """Given it, or made before the crew's: all peers are to use a basis from the same step on."""
    with ragtag.join() as crew:
        model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        sgd, local = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, other))
        kfac = crew.kfac(model, sgd) if first == "kfac" else None
        optimizer = crew.optimizer(sgd, model=model, average="gradients")
        kfac = kfac or crew.kfac(model, sgd, placement="memory")
        assert kfac._peers.taken() == -1
        model(torch.randn(3, 4)).sum().backward()
        kfac.step()
        optimizer.step()
        assert kfac._peers.taken() == optimizer.outcome.round == 0
        crew.optimizer(local, model=other, average="models")
        assert crew.kfac(other, local)._peers.taken() is None


def test_after_leaving_named_tensors_and_kfac_say_so_and_saving_goes_on(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    with ragtag.join() as crew:
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        kfac = crew.kfac(model, crew.optimizer(sgd, model=model, average="gradients"))
        tensors = crew.tensors("t", averaged={"a": (2,)}, computed={"b": (2,)})
        model(torch.randn(3, 4)).square().sum().backward()
        kfac.step()
        sgd.step()
        tensors.publish({"b": torch.ones(2)})
    for asked in (
        kfac.step,
        lambda: tensors.average({"a": torch.ones(2)}),
        lambda: tensors.publish({"b": torch.ones(2)}),
        lambda: tensors.only(["b"]),
    ):
        with pytest.raises(ragtag.HasLeft):
            asked()
    assert model.weight.grad is not None
    plain = (model.weight - 0.05 * model.weight.grad).detach()
    sgd.step()
    torch.testing.assert_close(model.weight.detach(), plain)
    assert crew.save(tmp_path).exists()
    assert kfac.steps == 1 and tensors.newest("b") is not None
    with pytest.raises(RuntimeError, match="after shutdown"):
        kfac._thread.submit(int)


@pytest.mark.parametrize("given", [True, False])
def test_a_crew_that_was_left_is_freed_with_all_that_it_made(given: bool) -> None:
    """A notebook joins again and again."""

    def once() -> list[weakref.ref[object]]:
        model = torch.nn.Linear(4, 2)
        with ragtag.join() as crew:
            sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = crew.optimizer(sgd, model=model if given else None, average="gradients")
            kfac = crew.kfac(model, optimizer)
            if given:
                model(torch.randn(3, 4)).square().sum().backward()
                kfac.step()
                optimizer.step()
        return [weakref.ref(one) for one in (model, crew, optimizer, kfac)]

    looking = torch.nn.modules.module._global_forward_pre_hooks
    before = len(looking)
    left = once()
    gc.collect()
    assert [one() for one in left] == [None] * 4
    assert len(looking) <= before, "nothing looks at what is called"


def test_what_kfac_cannot_do_is_said_and_leaves_its_name_free() -> None:
    model = torch.nn.Linear(2, 1)
    crew = ragtag.join()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, words in (
        ({"placement": "memory"}, 'average="gradients"'),
        ({"damping": 0.0}, "damping"),
        ({"averager": "moshpit"}, "all at once"),
    ):
        with pytest.raises(ValueError, match=words):
            crew.kfac(model, sgd, name="second order", **options)
    crew.kfac(model, sgd, name="second order").close()


@pytest.mark.parametrize("other", [torch.nn.Linear(1, 1), None, torch.optim.SGD])
def test_what_is_no_optimizer_is_refused(other: object) -> None:
    with pytest.raises(TypeError, match=r"wraps a plain torch\.optim\.Optimizer; this is a "):
        ragtag.join().optimizer(other)


def test_an_optimizer_that_was_refused_leaves_its_name_free() -> None:
    model = torch.nn.Linear(2, 1)
    crew = ragtag.join()
    for name in (None, "critic"):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="write every=5"):
            crew.optimizer(sgd, model=model, name=name, schedule=5)
        assert crew.optimizer(sgd, model=model, name=name).name == (name or "model")


# -- Texts


@pytest.mark.parametrize(
    ("averager", "text"),
    [
        (ragtag.RPS(), "RPS()"),
        (ragtag.RPS(repair=True), "RPS(repair=True)"),
        (ragtag.AllReduce(), "AllReduce()"),
        (ragtag.AllReduce(ring=True), "AllReduce(ring=True)"),
        (ragtag.Moshpit(group=8), "Moshpit(group=8)"),
        (ragtag.Moshpit(group=4, repair=False), "Moshpit(group=4, repair=False)"),
        (ragtag.RandomGroups(), "RandomGroups(group=8)"),
        (ragtag.Centre(ragtag.schedules.SoftSync(2)), "Centre(SoftSync(n=2, corrected=True))"),
        (ragtag.Centre(compensate=0.04), "Centre(Asynchronous(discard_from=None), compensate=0.04)"),
    ],
)
def test_an_averager_is_shown_as_it_is_written(averager: Averager, text: str) -> None:
    assert repr(averager) == text
    found = eval(text, {**vars(ragtag.schedules), **{name: getattr(ragtag, name) for name in ragtag._HOMES}})
    assert found.name == averager.name


# -- Errors


def test_all_errors_have_one_root_and_keep_their_own_bases() -> None:
    bases = {
        "JoinError": RuntimeError,
        "HasLeft": RuntimeError,
        "SchemaMismatch": RuntimeError,
        "NotFinite": FloatingPointError,
        "PlaceError": ValueError,
        "PortInUse": OSError,
        "DriverFailed": RuntimeError,
        "Expelled": RuntimeError,
        "SeatLost": RuntimeError,
        "StateMissing": RuntimeError,
        "NoWholeCheckpoint": RuntimeError,
        "TokenError": ValueError,
    }
    exported = [getattr(ragtag, name) for name in dir(ragtag) if name != "Error"]
    errors = {found for found in exported if inspect.isclass(found) and issubclass(found, Exception)}
    assert {error.__name__ for error in errors} == set(bases)
    assert all(issubclass(error, (ragtag.Error,)) for error in errors)
    assert all(issubclass(error, bases[error.__name__]) for error in errors)


INTERNAL = {
    "Damage": "NoWholeCheckpoint tells of it",
    "Malformed": "of datagrams, which are dropped",
    "Garbled": "of a connection's bytes, which end it",
    "WireError": "of a transfer's frames, which end it",
    "HandshakeError": "of handshakes, which are refused and counted",
    "TicketError": "of a caller's in error feedback",
    "RecordingFull": "of simulations",
    "InvariantBroken": "an AssertionError of simulations",
    "Closed": "ends a transfer's session",
    "Crashed": "ends a simulated peer's thread",
    "TooLarge": "of datagrams, which are sent again in smaller ones",
}


def test_an_error_class_of_any_room_is_under_the_root_or_never_leaves_the_library() -> None:
    for info in pkgutil.walk_packages(ragtag.__path__, "ragtag."):
        if info.name.endswith("__main__"):
            continue  # it runs
        for name, found in vars(importlib.import_module(info.name)).items():
            own = (
                inspect.isclass(found) and issubclass(found, BaseException) and found.__module__ == info.name
            )
            if own and found is not ragtag.Error and not name.startswith("_") and name not in INTERNAL:
                assert issubclass(found, ragtag.Error), f"{info.name}.{name}"


def test_the_errors_that_users_may_catch_are_in_the_documentation_with_their_bases() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| `(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE
    )
    exported = {name for name in dir(ragtag) if _is_error(getattr(ragtag, name))} - {"Error"}
    assert {name for name, _ in rows} == exported | {
        "ray.NoRay",
        "privacy.NoOpacus",
        "privacy.NoPass",
        "privacy.NoSecureSum",
        "privacy.NotPrivate",
        "privacy.ServerGone",
        "privacy.encrypted.NoTenSEAL",
    }
    for name, base in rows:
        found = operator.attrgetter(name)(ragtag)
        assert issubclass(found, ragtag.Error), name
        assert getattr(builtins, base) in found.__bases__, name


def _is_error(found: object) -> bool:
    return inspect.isclass(found) and issubclass(found, BaseException)


# -- After leaving


@pytest.mark.parametrize("every", [1, 10])
def test_after_leaving_a_step_says_so_and_changes_nothing(every: int, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=2)
    with ragtag.join() as crew:
        optimizer = crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, every=every)
        split = crew.split(loader)
        batches, epochs = iter(split), crew.epochs(3)
        next(batches), next(epochs)
    model(torch.ones(2, 3)).sum().backward()
    before = model.weight.detach().clone()
    for ask in (
        optimizer.step,
        optimizer.average,
        lambda: list(split),
        lambda: next(batches),
        lambda: next(epochs),
        lambda: crew.epochs(3),
        crew.finish,
        lambda: crew.split(loader),
        lambda: crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: crew.resume(tmp_path),
        crew.invitation,
    ):
        with pytest.raises(ragtag.HasLeft, match=r"this peer has left the crew.*optimizer\.inner"):
            ask()
    assert torch.equal(model.weight, before)
    optimizer.inner.step()
    assert not torch.equal(model.weight, before)


def test_a_checkpoint_may_be_saved_after_leaving(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    with ragtag.join() as crew:
        crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert crew.save(tmp_path).exists()


@pytest.mark.parametrize("what", ["save", "resume"])
def test_a_folder_without_a_name_is_not_the_one_that_the_script_runs_in(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1)
    with ragtag.join() as crew:
        crew.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        with pytest.raises(ValueError, match=r"the checkpoints' folder is ''.*'\.'"):
            getattr(crew, what)("")
        assert not list(tmp_path.iterdir())
        assert crew.save(".").exists()


# -- What is printed


def test_a_checkpoint_that_was_found_is_shown_in_a_line(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 7)
    with ragtag.join() as crew:
        optimizer = crew.optimizer(torch.optim.Adam(model.parameters()), model=model)
        crew.keep(scheduler=torch.optim.lr_scheduler.StepLR(optimizer.inner, 5))
        crew.save(tmp_path)
        found = crew.resume(tmp_path)
        assert repr(crew) == "Crew('alone', peer 0 of 1, live: [0])"
    text = repr(found)
    assert "model of 2 tensors, 8,428 bytes, scheduler" in text
    assert "step=0" in text
    assert str(tmp_path) in text
    assert len(text) < 400
    assert repr(crew) == "Crew('alone', peer 0 of 1, left)"
