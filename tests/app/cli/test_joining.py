"""Where ``ragtag join`` finds its token, and in which order it takes arguments."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ragtag.app.cli.start import VARIABLE, hide, token_text
from ragtag.app.crew.auxiliary import Assistance
from ragtag.app.invitation.token import Token, encode, new_key
from ragtag.app.report import build_report
from ragtag.app.tracefile import read_run
from tests.app.command import error_of, invoke

TOKEN = encode(Token((("127.0.0.1", 4321),), "otters", new_key()))
LONG = encode(Token((("otter.example.org", 4321),) * 8, "otters", new_key()))
TEXTS = (TOKEN, LONG, f" {TOKEN[:40].upper()}\n{TOKEN[40:]}\r\n")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_comes_from_a_file_from_input_from_the_environment_or_as_it_is(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("token.txt").write_text(text, newline="")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    monkeypatch.setenv(VARIABLE, text)
    assert token_text("token.txt").split() == text.split()
    assert token_text("-") == text
    assert token_text(VARIABLE) == text
    assert token_text(text) == text


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    assert len(token_text("/dev/null")) == 0
    Path("large").write_bytes(b"x" * 1_000_000)
    assert len(token_text("large")) < 10_000


@pytest.mark.parametrize("length", [5, 300, 10_000])
def test_what_is_no_token_is_said_to_be_none_however_long(length: int) -> None:
    said = error_of(invoke("join", "x" * length, "train.py"))
    assert "no token" in said


def test_the_environment_without_a_token_says_where_else_it_may_be() -> None:
    with pytest.raises(ValueError, match="RAGTAG_TOKEN is not set; put the token there, in a file, or on"):
        token_text(VARIABLE)


def test_what_does_not_stand_in_the_command_line_is_not_overwritten() -> None:
    assert not hide("") and not hide(TOKEN)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, object]]]:
    """Each call: the token, what is run, and options that are not as by default."""
    calls: list[tuple[str, list[str], dict[str, object]]] = []

    def launch(argv: list[str], name: str, peers: int, *rest: object, env: object, command: str) -> None:
        assert not env and TOKEN not in command
        folder, token = rest[3], rest[-1]
        options = {"peers": peers, "folder": folder}
        calls.append((str(token), argv, {k: v for k, v in options.items() if v not in (1, None)}))

    monkeypatch.setattr("ragtag.app.cli.start._launch", launch)
    monkeypatch.setattr("ragtag.app.invitation.invite.usable", lambda given: (given, ""))
    return calls


@pytest.mark.parametrize(
    "args",
    [
        ("-o", "B1", "-n", "3", "token.txt", "train.py", "-o", "x", "--lr", "1"),
        ("token.txt", "-o", "B1", "-n", "3", "train.py", "-o", "x", "--lr", "1"),
        ("-n", "3", "token.txt", "-o", "B1", "train.py", "-o", "x", "--lr", "1"),
        ("env", "-n", "3", "-o", "B1", "train.py", "-o", "x", "--lr", "1"),
        ("-n", "3", "-o", "B1", "--", "token.txt", "train.py", "-o", "x", "--lr", "1"),
    ],
)
def test_options_stand_before_the_script_and_what_follows_it_is_the_scripts(
    args: tuple[str, ...],
    joined: list[tuple[str, list[str], dict[str, object]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("token.txt").write_text(TOKEN)
    if args[0] == "env":
        monkeypatch.setenv(VARIABLE, TOKEN)
        args = args[1:]
    assert invoke("join", *args).code == 0
    assert joined == [(TOKEN, ["train.py", "-o", "x", "--lr", "1"], {"peers": 3, "folder": Path("B1")})]


@pytest.mark.parametrize(
    ("args", "typed"),
    [
        (("run", "-n", "2", "--seed", "7", "train.py", "a b"), "ragtag run -n 2 --seed 7 train.py 'a b'"),
        (("join", "token.txt", "-n", "2", "train.py", "$x"), "ragtag join token.txt -n 2 train.py '$x'"),
        (("join", TEXTS[2], "train.py"), "ragtag join TOKEN train.py"),
        (("join", "train.py", "-n", "2"), "ragtag join train.py -n 2"),
    ],
)
def test_the_trace_says_what_was_typed_without_a_token(
    args: tuple[str, ...], typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragtag.app.invitation.invite.usable", lambda given: (given, ""))
    if args[:2] == ("join", "train.py"):
        monkeypatch.setenv(VARIABLE, TOKEN)
    Path("token.txt").write_text(TOKEN)
    Path("train.py").write_text("raise SystemExit(1)")
    invoke(*args)
    (folder,) = Path("runs").iterdir()
    run = read_run(folder).run
    assert run is not None and run.command == typed


def test_a_module_comes_after_the_token_too(joined: list[tuple[str, list[str], dict[str, object]]]) -> None:
    assert invoke("join", TOKEN, "-m", "my.train", "-m").code == 0
    assert joined == [(TOKEN, ["-m", "my.train", "-m"], {})]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((TOKEN,), "Missing argument 'SCRIPT'"),
        ((TOKEN, "--fly", "train.py"), "No such option"),
        ((), "TOKEN"),
    ],
)
def test_what_is_missing_or_unknown_is_named(args: tuple[str, ...], said: str) -> None:
    result = invoke("join", *args)
    assert (result.code, result.out) == (2, "")
    assert said in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((TOKEN, "train.py"), "SCRIPT is for peers that train; an auxiliary computes nothing"),
        (("-n", "2", TOKEN), "-n is for peers that train"),
        (("--faults", "loss=0.1", TOKEN), "--faults is for peers that train"),
        (("-o", "runs/x", TOKEN), "-o is for peers that train"),
        (("--client", TOKEN), "--client is for peers that train"),
    ],
)
def test_what_an_auxiliary_has_no_use_for_is_refused(args: tuple[str, ...], said: str) -> None:
    result = invoke("join", "--auxiliary", *args)
    assert result.code == 2 and said in error_of(result)
    assert "no token" in error_of(invoke("join", "--auxiliary", "not-a-token"))


def test_an_auxiliary_goes_where_its_token_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its token from the same places as others, and prints one JSON document if asked to."""
    taken: list[str] = []
    done = Assistance("otters", 3, 7, 1, (0, 2), 2000, 1000, 1.5, "the crew has ended", 0)

    def assist(token: str, say: Callable[[str], None]) -> Assistance:
        taken.append(token)
        say("peer [0] is there")
        return done

    monkeypatch.setattr("ragtag.app.crew.auxiliary.assist", assist)
    monkeypatch.setattr("ragtag.app.invitation.invite.usable", lambda given: (given, ""))
    Path("token.txt").write_text(TOKEN)
    monkeypatch.setenv(VARIABLE, "")
    result = invoke("join", "token.txt", "--auxiliary", "--json")
    assert (result.code, taken) == (0, [TOKEN])
    told = json.loads(result.out)
    assert told["ok"] and told["rounds"] == 7 and told["peers"] == [0, 2]
    assert result.err.splitlines() == [
        "ragtag: peer [0] is there",
        "ragtag: the crew has ended; 7 rounds averaged for peers 0 and 2, 1 without a share that was late or "
        "lost; 2 kB in, 1 kB out in 1.5 s",
    ]
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert invoke("join", "--auxiliary").code == 0 and taken == [TOKEN, TOKEN]


def test_clients_are_told_so_by_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def launch(*args: object, env: object, **options: object) -> None:
        given.append(env)
        raise ValueError("far enough")

    monkeypatch.setattr("ragtag.app.launch.launch", launch)
    monkeypatch.setattr("ragtag.app.invitation.invite.usable", lambda token: (token, ""))
    Path("train.py").touch()
    for options in ((), ("--client",)):
        assert "far enough" in error_of(invoke("join", *options, TOKEN, "train.py"))
    assert given == [{}, {"RAGTAG_ROLE": "client"}]


def test_a_token_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    result = invoke("join", TOKEN, "train.py")
    assert result.code == 2 and "give it once" in result.err


def test_a_token_that_is_given_twice_is_not_run_as_a_script(
    monkeypatch: pytest.MonkeyPatch, joined: list[tuple[str, list[str], dict[str, object]]]
) -> None:
    """Its traceback would show the crew's key."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    Path("token.txt").write_text(f"{TOKEN}\n")
    Path("run").mkdir()
    for given in ("token.txt", "run"):
        for args in ((given, "train.py"), ("-n", "2", given, "-m", "my.train"), (given,)):
            said = error_of(invoke("join", *args, width=300))
            assert f"the token is given twice: by {VARIABLE}, and by {given}. Leave {given} out" in said
    Path("program").mkdir()
    for name in ("train.py", "program/__main__.py"):
        Path(name).touch()
    for args in (("train.py", "token.txt"), ("program",), ("-m", "run")):
        assert invoke("join", *args).code == 0
    assert [argv for _, argv, _ in joined] == [["train.py", "token.txt"], ["program"], ["-m", "run"]]


def test_no_token_gets_into_the_trace_or_the_report() -> None:
    Path("train.py").write_text(f"raise ValueError('of {TOKEN}')\n")
    assert invoke("run", "-n", "1", "-o", "run", "train.py", LONG).code == 1
    page = build_report(Path("run")).read_text(encoding="utf-8")
    for text in (page, *(path.read_text() for path in Path("run").glob("*.jsonl"))):
        assert TOKEN not in text and LONG not in text
    assert "ValueError: of TOKEN" in page


def test_a_new_crews_token_cannot_end() -> None:
    said = error_of(invoke("invite", "--minutes", "5"))
    assert "the token of a new crew holds its key, and cannot end" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("RUN", "--days", "1"), "--days is of a person's token"),
        (("--days", "1"), "--days is of a person's token"),
        (("RUN", "--listen", "192.0.2.1"), "--listen and --crew are of a new crew"),
        (("RUN", "--crew", "otters"), "--listen and --crew are of a new crew"),
    ],
)
def test_what_an_invitation_would_leave_out_is_refused(options: tuple[str, ...], said: str) -> None:
    assert said in error_of(invoke("invite", *options))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nosuch.txt", "'nosuch.txt' is no file, and is no token; a token begins with"),
        ("rubbish.txt", "what is in rubbish.txt is no token"),
        ("empty.txt", "empty.txt is empty: that is no token"),
        ("-", "standard input was empty: that is no token"),
    ],
)
def test_where_no_token_was_is_named(given: str, said: str) -> None:
    Path("rubbish.txt").write_text("a secret of another kind")
    Path("empty.txt").touch()
    for command in (("join", given, "train.py"), ("revoke", "alice", given)):
        error = error_of(invoke(*command))
        assert said in error and "secret" not in error


def test_a_port_that_is_none_is_named() -> None:
    said = error_of(invoke("invite", "--listen", "127.0.0.1:99999"))
    assert said == "error: '127.0.0.1:99999': a port lies between 1 and 65535"
    said = error_of(invoke("run", "--listen", "127.0.0.1:4433", __file__))
    assert (
        said == "error: --listen 127.0.0.1:4433: give a host alone; each peer listens at a port that is free"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]:4321", "224.0.0.1:4321"])
def test_an_address_at_which_no_other_reaches_this_machine_is_refused(host: str) -> None:
    assert f"--listen {host}: " in (said := error_of(invoke("invite", "--listen", host)))
    assert "is no address of one host: give the address at which others reach this machine" in said
