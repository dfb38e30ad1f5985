"""Peers that come and go in crews of real processes: ``ragtag run``, ``ragtag invite``, ``ragtag join``."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import ragtag
from ragtag.app.crew.join import JoinError
from ragtag.app.environment import VARIABLES
from ragtag.app.invitation.invite import new_invitation
from ragtag.app.invitation.token import TOKEN_FILE, Token, decode, encode, kept_token, new_key
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from ragtag.protocols.crew.joining import PHASES
from tests.app.processes import PATIENCE_S, Place, notes, until
from tests.network.agents import KEY, Agents

# -- Coming


def test_a_newcomer_by_invitation_takes_part_and_leaves(place: Place) -> None:
    """An invitation holds no key, and a forged one lets nobody in. Once the run is over nobody is invited.

    All that the peers send each other is sealed.
    """
    crew = place.crew(2, RAGTAG_SEAL="on")
    assert stat.S_IMODE((place.run / TOKEN_FILE).stat().st_mode) == 0o600
    invite = place.command("invite", "invite", str(place.run), "--minutes", "10")
    assert invite.code() == 0, invite.text
    text = next(line for line in invite.text.splitlines() if line.startswith("ragtag2-"))
    token, kept = decode(text), decode(kept_token(place.run))
    assert len(token.number) == 16 and token.key != kept.key and token.ends_unix_s > 0 and not kept.number

    joined = place.join(text, RAGTAG_SEAL="on")
    forged = encode(replace(token, ends_unix_s=token.ends_unix_s + 3600))
    file = place.folder / "token.txt"
    file.write_text(f"  {forged}\n\n")
    for refused in (
        place.command("forged", "join", "train.py", RAGTAG_TOKEN=forged),
        place.command("forged-file", "join", str(file), "-o", "run-forged", "--no-watch", "train.py"),
    ):
        assert refused.code() == 1
        assert "does not know this invitation" in refused.text and "[0]" not in refused.text

    for peer in (0, 1):
        crew.says("heard 0b111 live [0, 1, 2]", peer)
    joined.says("heard 0b111 live [0, 1, 2]")
    assert joined.lines(0)[0].startswith("seat 2 ")
    if sys.platform == "linux":  # other systems do not let a process take a token off its command line
        for process in (joined.process.pid, joined.pid(0)):
            assert text.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        assert b"xxxxxxxx" in Path(f"/proc/{joined.process.pid}/cmdline").read_bytes()
    until(lambda: len(decode(kept_token(place.run)).addresses) == 3, "the token told of all three")
    (place.folder / "stop.2").touch()
    assert joined.code() == 0, joined.text
    for peer in (0, 1):
        until(lambda peer=peer: crew.lines(peer)[-1] == "heard 0b11 live [0, 1]", "the others went on")
    place.end()
    assert crew.code() == 0, crew.text
    told = list(read_run(place.folder / "run-joined").records())
    ways = [r for r in (*told, *read_run(place.run).records()) if isinstance(r, trace.Join)]
    assert [way.sealed for way in ways] == [True] * 3
    records = [r for r in told if isinstance(r, trace.Phase) and r.peer == 2]
    assert tuple(record.name for record in records) == PHASES  # as in virtual time: test_newcomer
    assert all(b.t - b.took_s >= a.t - 1e-2 for a, b in pairwise(records))  # one after the other
    for peer in (0, 1):
        assert [note.other for note in notes(place.run, "comes", peer)] == [2]
        assert 2 in [note.other for note in notes(place.run, "takes part", peer)]
        assert next(iter(notes(place.run, "has left", peer))).other == 2
        assert not notes(place.run, "declared dead", peer)
        assert not notes(place.run, "lost its seat", peer)
    for command in ("invite", "join"):
        late = place.command(
            f"late-{command}", command, str(place.run), *(["train.py"] if command == "join" else [])
        )
        assert late.code() == 1
        assert "has ended: nobody writes its trace, and no member of crew" in " ".join(late.text.split())
        assert "[0]" not in late.text


@pytest.mark.slow
def test_one_that_was_killed_is_declared_and_the_next_newcomer_has_its_seat(place: Place) -> None:
    crew = place.crew(3)
    os.kill(crew.pid(1), signal.SIGKILL)
    until(lambda: notes(place.run, "declared dead"), "declared dead")
    crew.says("live [0, 2]")
    joined = place.join(str(place.run))
    crew.says("heard 0b111 live [0, 1, 2]", 2)
    joined.says("heard 0b111")
    until(lambda: crew.lines(0)[-1] == "heard 0b111 live [0, 1, 2]", "it took part")
    assert joined.lines(0)[0].startswith("seat 1 ")
    place.end()
    assert joined.code() == 0, joined.text


ENDS = """
import os, time
import torch, ragtag
torch.set_num_threads(1)
late, came = "LATE" in os.environ, os.environ["STOP"] + ".came"
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(late)
    model = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if late:
        open(came, "w").close()
    optimizer = crew.optimizer(sgd, model=model, **OPTIONS)
    for epoch in crew.epochs(1):
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        print("trained", flush=True)
        while crew.rank == 1 and not os.path.exists(came):
            time.sleep(0.01)
    slots = [float(slot["momentum_buffer"].sum()) for slot in optimizer.state.values()]
    print("ends", crew.finish().digest, crew.step, len(slots), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ['{"average": "gradients"}', '{"every": 2}'], ids=["gradients", "models"])
def test_who_comes_when_the_crew_is_at_its_end_ends_with_its_model(place: Place, options: str) -> None:
    """It was given no state and waited for a round until all had left: it ended with its own weights."""
    (place.folder / "train.py").write_text(ENDS.replace("OPTIONS", options))
    crew = place.command("crew", "run", "-n", "2", "-o", str(place.run), "train.py")
    for peer in (0, 1):
        crew.says("trained", peer)
    joined = place.join(str(place.run), LATE="yes")
    assert (joined.code(), crew.code()) == (0, 0), joined.text + crew.text
    ends = [
        line.split() for c, p in ((crew, 0), (crew, 1), (joined, 0)) for line in c.lines(p) if "ends" in line
    ]
    assert [len(end) for end in ends] == [4] * 3 and len({end[1] for end in ends}) == 1, joined.text
    assert all(end[3] == "2" for end in ends), "with the optimizer's state"
    assert "trained" not in joined.text


@pytest.mark.slow
def test_the_first_to_join_begins_a_crew_and_a_second_joins_it(place: Place) -> None:
    token = new_invitation("127.0.0.1", "otters").text
    first = place.join(token, "first")
    first.says("heard 0b1 live [0]")
    second = place.join(token, "second")
    first.says("heard 0b11 live [0, 1]")
    second.says("heard 0b11 live [0, 1]")
    assert first.lines(0)[0].startswith("nobody is there yet: this peer begins crew 'otters' at 127.0.0.1:")
    assert first.lines(0)[1].startswith("seat 0 ") and second.lines(0)[0].startswith("seat 1 ")
    place.end()
    assert (first.code(), second.code()) == (0, 0), first.text + second.text


@pytest.mark.slow
def test_all_that_join_a_new_token_at_once_are_one_crew(place: Place) -> None:
    """Once the first took the others' knocks for those of a crew that was there, and all failed."""
    token = new_invitation("127.0.0.1", "otters").text
    peers = [place.join(token, f"peer-{i}") for i in range(3)]
    for peer in peers:
        peer.says("heard 0b111 live [0, 1, 2]")
    place.end()
    assert [peer.code() for peer in peers] == [0] * 3, peers[0].text


@pytest.mark.slow
def test_several_that_come_at_once_average_with_each_other(place: Place) -> None:
    """Each knew the others while they were on their way in; once averaged only with the first one."""
    token = new_invitation("127.0.0.1", "otters").text
    first = place.join(token, "first")
    first.says("heard 0b1 live [0]")
    others = [place.join(token, f"other-{i}") for i in range(3)]
    for peer in [first, *others]:
        peer.says("heard 0b1111 live [0, 1, 2, 3]")
    place.end()
    assert [peer.code() for peer in [first, *others]] == [0] * 4, first.text


@pytest.mark.slow
def test_a_newcomer_with_another_model_is_told_the_tensor_and_is_never_waited_for(place: Place) -> None:
    crew = place.crew(2)
    joined = place.join(kept_token(place.run), INPUTS="7")
    assert joined.code() == 1, joined.text
    assert "SchemaMismatch" in joined.text
    assert "'0.weight' (3, 7) float32 here, (3, 4) float32 there" in joined.text
    rounds = [r for r in read_run(place.run).records() if isinstance(r, trace.Round)]
    last = max(r.round for r in rounds)
    until(
        lambda: max(r.round for r in read_run(place.run).records() if isinstance(r, trace.Round)) > last + 20,
        "the crew went on",
    )
    place.end()
    assert crew.code() == 0, crew.text
    records = [r for r in read_run(place.run).records() if isinstance(r, trace.Round)]
    assert not [r for r in records if 2 in r.waited_for or 2 in r.missed]
    assert notes(place.run, "comes") and not notes(place.run, "takes part", 3)


@pytest.mark.slow
def test_members_that_do_not_answer_are_named_and_nobody_trains_alone(place: Place) -> None:
    (place.folder / "train.py").write_text("import ragtag\nragtag.join(deadline_s=3.0)\nprint('trains')")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        address: tuple[str, int] = nobody.getsockname()
        text = encode(Token((address,), "otters", new_key()).invitation())
        joined = place.join(text)
        said = f"nobody of crew 'otters' answers yet at 127.0.0.1:{address[1]}; waiting for them"
        until(lambda: said in joined.text, "told who is waited for")
        assert not joined.lines(0)  # before any peer was started
        assert joined.code() == 1
    assert f"{said}, 2 s more" in joined.text
    assert f"no member of crew 'otters' answered at 127.0.0.1:{address[1]} within 3 s" in joined.text
    assert "trains" not in joined.text


# -- Bad input


def wrong_tokens() -> dict[str, tuple[str, str]]:
    token = Token((("127.0.0.1", 4321),), "otters", new_key())
    text = encode(token)
    at = len(text) - 20
    return {
        "mistyped": (
            text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :],
            "incomplete or mistyped",
        ),
        "cut": (text[:-9], "incomplete or mistyped"),
        "no token": ("otter", "is no token; a token begins with 'ragtag2-'"),
        "another version": (
            text.replace("ragtag2-", "ragtag3-"),
            "has format 3, and this Ragtag reads format 2",
        ),
        "ended": (encode(token.invitation(1000)), "'otters' ended"),
    }


@pytest.mark.parametrize("kind", sorted(wrong_tokens()))
def test_a_token_that_cannot_be_read_starts_nothing(place: Place, kind: str) -> None:
    token, says = wrong_tokens()[kind]
    joined = place.join(token)
    assert joined.code() == 2
    assert says in joined.text and "Traceback" not in joined.text
    assert joined.text.startswith("error: ") and len(joined.text.splitlines()) == 1
    assert not (place.folder / "run-joined").exists()


def test_a_folder_without_an_invitation_is_named(place: Place) -> None:
    joined = place.join(str(place.folder))
    assert joined.code() == 2
    assert "holds no invitation; give the folder of a run of two peers or more" in joined.text


@pytest.fixture
def crew_of_two() -> Iterator[Agents]:
    """The membership of a crew, turned by a thread."""
    with Agents(2) as agents:
        agents.until(agents.agree, "all found each other")
        measured = agents.agents.values()
        agents.until(
            lambda: all(agent.machine.period_s < 1.0 for agent in measured), "round trips were known"
        )
        with turned(agents):
            yield agents


@contextmanager
def turned(agents: Agents) -> Iterator[None]:
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            agents.turn(0.02)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)


def joining(monkeypatch: pytest.MonkeyPatch, token: Token, deadline_s: float = 30.0, **env: str) -> str:
    """Why ``ragtag.join`` refuses."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RAGTAG_TOKEN": encode(token), **env}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JoinError) as error:
        ragtag.join(deadline_s=deadline_s)
    return str(error.value)


def test_the_second_of_two_with_one_name_is_told_whose_it_is(
    crew_of_two: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = tuple(crew_of_two.addresses.values())
    said = joining(monkeypatch, Token(addresses, "otters", KEY), RAGTAG_NAME="otter-1")
    where = f"127.0.0.1:{addresses[1][1]}"
    assert said == (
        f"two peers are called 'otter-1': the other one, at {where}, is alive; give this peer another name"
    )
    assert crew_of_two.agree()


def test_a_token_of_another_crews_key_is_told_apart_from_silence(
    crew_of_two: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = joining(monkeypatch, Token(tuple(crew_of_two.addresses.values()), "otters", new_key()), 2.0)
    assert "belongs to another crew (its key differs); was the token made by this crew?" in said
    assert crew_of_two.agree()


def test_a_token_for_a_crew_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Agents(2) as agents:
        gone = tuple(agents.addresses.values())
    said = joining(monkeypatch, Token(gone, "otters", KEY), 1.0)
    asked = ", ".join(f"127.0.0.1:{port}" for _, port in gone)
    assert said.startswith(f"no member answered at {asked}; is one running there, and does")


def test_a_host_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr("ragtag.app.crew.membership.socket.getaddrinfo", nowhere)
        said = joining(monkeypatch, Token((("otters.invalid", 4321),), "otters", KEY), 1.0)
    assert said.startswith("the token's address 'otters.invalid' cannot be found: ")


def test_an_ended_token_in_the_environment_is_a_join_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = joining(monkeypatch, Token((("127.0.0.1", 4321),), "otters", KEY).invitation(1000), 1.0)
    assert "this token for crew 'otters' ended" in said and "run `ragtag invite` again" in said
