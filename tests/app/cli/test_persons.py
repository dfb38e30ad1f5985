"""``ragtag invite --persons``, ``--for`` and ``ragtag revoke``: tokens, telling members, and bad input."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragtag.app.invitation.token import TOKEN_FILE, Token, decode, encode, new_key
from ragtag.app.tracefile import TraceWriter
from ragtag.core import trace
from ragtag.protocols.membership.passes import Passes, public_of
from tests.app.command import error_of, invoke
from tests.app.processes import until
from tests.network.agents import KEY, Agents, turned

SIGNING = bytes(range(32))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAGTAG_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)


def holder(addresses: tuple[tuple[str, int], ...] = (("127.0.0.1", 4321),), key: bytes = KEY) -> Token:
    return Token(addresses, "otters", key, begins=True, signing=SIGNING)


def written(token: Token, name: str = "holder.txt") -> str:
    Path(name).write_text(encode(token))
    return name


def test_a_new_crew_of_persons_and_a_token_for_one() -> None:
    made = invoke("invite", "--persons", "--listen", "127.0.0.1", "--crew", "otters", "--json")
    assert made.code == 0, made.err
    token = decode(json.loads(made.out)["token"])
    assert token.signing and token.begins and not token.credential
    said = invoke("invite", "--for", "alice", "--days", "2", written(token), "--json")
    alice = json.loads(said.out)
    assert alice["person"] == "alice" and alice["crew"] == "otters" and not alice["new"]
    assert abs(alice["ends_unix_s"] - time.time() - 2 * 86_400) < 60
    plain = invoke("invite", "--for", "alice", "holder.txt")
    assert (
        plain.out.startswith("ragtag2-")
        and "For alice alone" in plain.err
        and "ragtag revoke alice" in plain.err
    )


def test_a_runs_folder_serves_in_place_of_the_token() -> None:
    Path("run").mkdir()
    written(holder(), f"run/{TOKEN_FILE}")
    alice = decode(invoke("invite", "--for", "alice", "run").out.strip())
    assert alice.credential is not None and alice.credential.shown.person == "alice"
    assert decode(encode(alice.for_processes(1.0))) == alice


def test_the_holders_token_of_a_crew_that_runs_is_said_to_be_the_holders() -> None:
    Path("run").mkdir()
    written(holder(), f"run/{TOKEN_FILE}")
    with TraceWriter(Path("run/crew.jsonl")) as live:
        live.write(trace.Join(t=0.0))
        result = invoke("invite", "run", width=300)
    assert result.code == 0 and decode(result.out.strip()).signing
    said = " ".join(result.err.split())
    assert "takes persons only. This is its holder's own token, for your eyes only" in said
    assert "ragtag invite --for alice" in said and "new crew" not in said.lower() and "begin" not in said


def test_what_cannot_be_meant_is_said() -> None:
    crew = written(Token((("127.0.0.1", 4321),), "otters", new_key(), begins=True), "crew.txt")
    alice = written(holder().for_person("alice", int(time.time()) + 60, time.time()), "alice.txt")
    held = written(holder())
    for args, said in (
        (("invite", "--for", "alice"), "ragtag invite --for NAME --days N HOLDER"),
        (("invite", "--for", "alice", "--minutes", "3", held), "--minutes is of an invitation; the end of"),
        (("invite", "--for", "alice", "--minutes", "3"), "--minutes is of an invitation; the end of"),
        (("invite", "--for", "alice", "--persons", held), "--persons is for a new crew, and --for NAME is"),
        (("invite", "--persons", "run"), "--persons is for a new crew"),
        (("invite", "--for", "alice", crew), "cannot let persons in: only the one that"),
        (("invite", "--for", "bob", alice), "cannot let persons in"),
        (("invite", "--for", "holder", held), "give the person a name"),
        (("invite", "--for", "a b", held), "is no name for a person"),
        (("revoke", "alice", crew), "cannot put persons out"),
        (("revoke", "holder", held), "begin another crew"),
        (("revoke", crew, held), "that token is no person's"),
        (("revoke", "a b", held), "is no name for a person"),
        (("revoke", "alice", "nothing"), "is no token"),
    ):
        result = invoke(*args)
        assert result.code == 2 and said in error_of(result), (args, result.err)


def test_a_revocation_that_reaches_nobody_says_what_to_do() -> None:
    result = invoke("revoke", "alice", written(holder((("127.0.0.1", 9),))))
    assert result.code == 1
    assert (
        "no member of crew 'otters' answers at 127.0.0.1:9, so nobody was told that alice is out"
        in error_of(result)
    )


@pytest.fixture
def crew() -> Iterator[Agents]:
    """Two members over sockets that take persons."""
    with turned(SIGNING) as agents:
        yield agents


def void(agents: Agents, peer: int) -> list[tuple[str, int]]:
    passes = agents.agents[peer].machine._persons.passes
    assert isinstance(passes, Passes) and passes.signer == public_of(SIGNING)
    return [(each.person, each.serial) for each in passes.void()]


def test_members_are_told_by_token_and_by_name(crew: Agents) -> None:
    first, second = crew.addresses.values()
    held = written(holder((first,)))
    alice = holder().for_person("alice", int(time.time()) + 60, time.time())
    assert alice.credential is not None
    by_token = invoke("revoke", encode(alice), held, "--json")
    assert by_token.code == 0, by_token.err
    assert json.loads(by_token.out)["told"] == [f"127.0.0.1:{first[1]}"]
    bob = invoke("revoke", "bob", held)
    assert bob.code == 0 and "bob is out of crew otters: 1 of the members" in bob.out
    until(lambda: len(void(crew, 1)) == 2, "the other member heard of both")
    assert [person for person, _ in void(crew, 1)] == ["bob", "alice"]
    assert dict(void(crew, 1))["alice"] == alice.credential.shown.serial
    # the invitation in her token is void, too: she hears that before any peer of hers starts
    joined = invoke(
        "join", encode(holder((second,)).for_person("alice", int(time.time()) + 60, time.time() - 9)), "t.py"
    )
    assert joined.code == 1 and "the token to crew 'otters' was revoked" in error_of(joined)
    wrong = Token((first,), "otters", KEY, signing=bytes(32))
    refused = invoke("revoke", "carol", written(wrong, "wrong.txt"))
    assert refused.code == 1 and "their signing key is another one" in error_of(refused)
