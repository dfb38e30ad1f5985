"""A crew of real processes that takes persons only: one is let in, contributes, and is put out in mid-run."""

from __future__ import annotations

import json

import pytest

from ragtag.app.invitation.token import decode, kept_token
from ragtag.app.report import build_report
from ragtag.app.tracefile import read_run
from ragtag.core import trace
from tests.app.processes import Place, notes, until

SCRIPT = """
import os, time
import torch, ragtag
torch.set_num_threads(1)
stop = os.environ["STOP"]
with ragtag.join(deadline_s=60.0) as crew:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = crew.optimizer(sgd, averager=ragtag.AllReduce(), model=model)
    print("seat", crew.rank, "pid", os.getpid(), flush=True)
    said = None
    while not os.path.exists(stop) and not os.path.exists(f"{stop}.{crew.rank}"):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        crew.log_step(0.0, samples=2)
        heard = bin(int(optimizer.outcome.heard[0])), sorted(crew.live)
        if heard != said:
            print("heard", heard[0], "live", heard[1], flush=True)
            said = heard
        time.sleep(0.02)
    try:
        crew.invitation()
    except RuntimeError as error:
        print("says", error, flush=True)
"""


@pytest.mark.slow
def test_a_person_is_let_in_contributes_and_is_put_out(place: Place) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    held = place.command("held", "invite", "--persons", "--listen", "127.0.0.1", "--json")
    assert held.code() == 0, held.text
    (place.folder / "holder.txt").write_text(json.loads(held.text)["token"])
    crew = place.command("crew", "join", "-n", "2", "-o", str(place.run), "holder.txt", "train.py")
    crew.says("heard 0b11 live [0, 1]")
    until(lambda: len(decode(kept_token(place.run)).addresses) == 2, "the holder's token told of both")
    assert decode(kept_token(place.run)).signing, "as the holder's own folder has it"

    def alice(name: str) -> str:
        made = place.command(name, "invite", "--for", "alice", "--days", "1", str(place.run), "--json")
        assert made.code() == 0, made.text
        return str(json.loads(made.text)["token"])

    token = alice("alice-token")
    joined = place.join(token)
    joined.says("heard 0b111 live [0, 1, 2]")
    kept = decode(kept_token(place.folder / "run-joined"))
    assert not kept.signing and kept.credential is not None and kept.number, "her own token, in her folder"

    out = place.command("revoke", "revoke", "alice", str(place.run))
    assert out.code() == 0 and "alice is out of crew" in out.text, out.text
    assert joined.code() == 1
    assert (
        "alice's token was revoked by the holder of the crew's token; ask there for a new one" in joined.text
    )
    assert "Expelled" in joined.text
    for peer in (0, 1):
        until(lambda peer=peer: crew.lines(peer)[-1] == "heard 0b11 live [0, 1]", "the others went on")
    again = place.join(token, "again")
    assert again.code() == 1 and "was revoked" in again.text and "seat" not in again.text

    back = place.join(alice("alice-anew"), "back")
    back.says("heard 0b111 live [0, 1, 2]")
    (place.folder / "stop.2").touch()
    assert back.code() == 0, back.text
    assert "takes persons only: whoever has its holder's token" in back.text
    place.end()
    assert crew.code() == 0, crew.text
    assert notes(place.folder / "run-back", "state"), "members give their state to a person"
    for peer in (0, 1):
        assert [note.other for note in notes(place.run, "put out", peer)] == [2]
        assert not notes(place.run, "declared dead", peer)
    boards = [r for r in read_run(place.run).records() if isinstance(r, trace.Leaderboard)]
    last = max(boards, key=lambda record: sum(record.samples))
    assert sorted(last.persons) == ["alice", "holder"]
    assert last.processes[last.persons.index("holder")] == 2
    assert all(samples > 0 for samples in last.samples)
    assert all(j.sealed for j in read_run(place.run).records() if isinstance(j, trace.Join))
    page = build_report(place.run).read_text()
    assert "<h2>Persons</h2>" in page and "what the person's own peers say of themselves" in page.replace(
        "&#x27;", "'"
    )
