"""Auxiliaries, piece by piece: what they own, what they are told, and how others take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragtag
from ragtag.codecs.dense import fp32
from ragtag.core.channels import topic_of
from ragtag.core.types import (
    Arrived,
    Assisted,
    Average,
    Expired,
    Joined,
    Left,
    Met,
    Offer,
    Post,
    Role,
    Send,
    Tell,
    Timer,
    Visits,
)
from ragtag.core.wire import CHUNK_BYTES
from ragtag.protocols.channel.at_once import Rounds
from ragtag.protocols.channel.averager import Averager, Channel, guarded
from ragtag.protocols.crew.board import PAGES, TAKEN, Board
from ragtag.protocols.crew.serving import (
    FORMS_MAX,
    ChannelForm,
    Forms,
    Serving,
    form_of,
    read_forms,
    told_by_most,
)
from ragtag.protocols.node import GONE_AFTER, Node
from ragtag.protocols.rounds.gather import gather
from ragtag.protocols.rounds.layout import fixed_owners, rotating_owners
from ragtag.protocols.rounds.rps import rps
from tests.protocols.harness import World, vectors
from tests.protocols.transcript import transcript

ALLREDUCE = ragtag.AllReduce()

# -- What it owns


@given(st.integers(0, 2**32), st.integers(2, 24), st.data())
def test_what_an_auxiliary_owns_depends_on_who_has_left_and_on_nothing_else(
    seed: int, n: int, data: st.DataObject
) -> None:
    """Whom others hold to be silent or slow it need not know. Without auxiliaries all is as it was."""
    everyone = list(range(n))
    present = data.draw(st.sets(st.sampled_from(everyone), min_size=1).map(frozenset))
    helpers = data.draw(st.sets(st.sampled_from(sorted(present))).map(frozenset))
    views = [
        data.draw(st.sets(st.sampled_from(sorted(present)), min_size=1).map(frozenset)) | helpers
        for _ in range(2)
    ]
    for owners in (
        lambda live, *more: rotating_owners(seed, 7, n, live, *more),
        lambda live, *more: fixed_owners(n, live, *more),
    ):
        one, other = (owners(live, present, helpers) for live in views)
        if all(live - helpers for live in views):
            for peer in helpers:
                assert [p == peer for p in one] == [p == peer for p in other]
        assert set(one) <= views[0]
        assert owners(present, present, helpers) == owners(present)
        assert owners(views[0], present, frozenset()) == owners(views[0])


def test_in_a_calm_round_it_owns_as_much_as_any_peer() -> None:
    everyone = frozenset(range(6))
    drawn = [rotating_owners(1, r, 6, everyone, everyone, frozenset({4, 5})) for r in range(50)]
    assert all(sorted(owners) == list(range(6)) for owners in drawn)


# -- A round


def test_transcript_of_an_auxiliary(golden: Callable[[str, str], None]) -> None:
    world = World(3, rps, 12, auxiliary=(2,))
    world.average(0, vectors(3, 12)[0])
    world.average(1, vectors(3, 12)[1], after_s=0.01)
    world.run()
    note = (
        "Peer 2 is an auxiliary: it begins with the first share, averages the two others' shares of its\n"
        "block, sends each the average, and is sent none. Peer 1 begins 10 ms after peer 0."
    )
    title = "rps: 2 peers that give, 1 that only owns blocks."
    golden("auxiliary/a_round", transcript(world, 2, title, note))


def test_rows_are_gathered_through_it_and_count_as_without_it() -> None:
    draws = [np.random.default_rng(peer).integers(0, 255, (5, CHUNK_BYTES)) for peer in range(3)]
    rows = [each.astype(np.uint8) for each in draws]
    counted = []
    for helpers in ((), (3, 4)):
        world = World(3 + len(helpers), gather, 8, auxiliary=helpers)
        for peer in range(3):
            world.push(0.0, peer, Offer(0, rows[peer], 1.0))
        world.run()
        for peer in range(3):
            (outcome,) = world.outcomes[peer]
            came = outcome.gathered
            assert came is not None and came.whole.all() and outcome.weight.tolist() == [3.0] * world.n
            assert outcome.heard.tolist() == [0b111] * world.n and not outcome.missed
            counted.append(
                sorted((row.tobytes(), float(f)) for row, f in zip(came.rows, came.factor, strict=True))
            )
        for peer in helpers:
            assert len(world.outcomes[peer]) == 1
    assert all(one == counted[0] for one in counted) and len(counted[0]) == 15
    assert {factor for _, factor in counted[0]} == {np.float32(1 / 3)}


def test_a_crew_that_has_fewer_chunks_than_owners_takes_nobody_for_silent() -> None:
    world = World(5, rps, 2, auxiliary=(3, 4))
    world.rounds(12, lambda peer, round_: vectors(5, 2, "few", round_)[peer])
    for peer in range(3):
        assert all(o.averaged.all() and not o.missed for o in world.outcomes[peer][:12])
    assert world.notes == [] and all(node.crew.owners == frozenset(range(5)) for node in world.nodes[:3])


# -- How others take it


def helped(me: int = 0, n: int = 3, role: Role = Role.TRAINER) -> Node:
    node = Node(me, n, 1, role=role)
    node.configure(0, Channel(rps, fp32, 6, 0.1, 0.01, assisted=True))
    return node


def test_to_all_but_rounds_it_is_a_visitor() -> None:
    node = helped()
    node.step(0.0, Visits(3, Role.AUXILIARY))
    assert node.auxiliary == frozenset() and node.crew.owners == frozenset(range(3)) and node.n == 3
    node.step(0.0, Joined(3, Role.AUXILIARY))
    assert node.live == frozenset(range(3)) and 3 in node.gone and node.n == 4
    assert node.crew.owners == frozenset(range(4)) and node.auxiliary == {3}
    node.step(0.0, Tell(7, b"here", 9.0))
    told = {e.run.peer for e in node.step(0.1, Expired(Timer(255, 7, "again"))) if isinstance(e, Send)}
    assert told == {1, 2}  # a meeting does not wait for it
    node.step(1.0, Left(3))
    assert node.crew.owners == frozenset(range(3)) and not node.auxiliary and node.cut == 3


def test_one_that_takes_part_before_its_visit_was_heard_of_is_no_trainer_either() -> None:
    node = helped()
    node.step(0.0, Joined(4, Role.AUXILIARY))
    assert node.live == frozenset(range(3)) and 4 in node.gone and 4 in node.crew.owners


@pytest.mark.parametrize("assisted", [True, False])
def test_it_owns_blocks_of_channels_that_all_tell_it_of_and_of_no_other(assisted: bool) -> None:
    node = helped()
    node.configure(1, Channel(rps, fp32, 8, 0.1, 0.01, assisted=assisted))
    node.step(0.0, Joined(3, Role.AUXILIARY))
    effects = node.step(0.0, Average(1, np.zeros((8, fp32.elements), np.float32), 1.0))
    sent = {e.run.peer for e in effects if isinstance(e, Send)}
    assert sent == ({1, 2, 3} if assisted else {1, 2})


def test_its_second_round_has_room_for_peers_that_come_apart() -> None:
    """It has measured no more than a round trip, and others have computed for a second before they came."""
    node = Node(2, 3, 1, role=Role.AUXILIARY)
    form = form_of(5, 1, rps, "fp32", 12, 1)
    node.configure(5, form.opened(fp32, 0.001), 0.0)
    world = World(3, rps, 12, auxiliary=(2,))
    world.average(0, vectors(3, 12)[0])
    world.average(1, vectors(3, 12)[1])
    world.run()
    shares = [e.runs[0] for _, peer, e, _ in world.log if peer == 2 and isinstance(e, Arrived)]
    for at_s, share in zip((1.0, 1.2), shares, strict=True):
        key = share.key._replace(channel=5)
        payload = np.zeros((share.total, CHUNK_BYTES), np.uint8)
        node.step(at_s, Arrived((replace(share, key=key, payload=payload),)))
    machine = node.channels[5]
    assert isinstance(machine, Rounds) and machine.done == 0
    assert machine.budgets_s()[0] >= 0.29


def test_one_that_was_silent_owns_nothing_is_asked_and_comes_back_by_its_answer() -> None:
    world = World(4, rps, 8, auxiliary=(3,))
    world.frozen[3] = 0.5, 1.5
    world.rounds(40, lambda peer, round_: vectors(4, 8, "own", round_)[peer], pause_s=0.05)
    for peer in range(3):
        missed = [o.round for o in world.outcomes[peer] if 3 in o.missed]
        assert 1 <= len(missed) <= 1 + GONE_AFTER
        assert ("silent", 3) in {(n.what, n.peer) for p, n in world.notes if p == peer}
        assert ("heard again", 3) in {(n.what, n.peer) for p, n in world.notes if p == peer}
        assert all(o.averaged.all() for o in world.outcomes[peer][-5:])
    assert world.outcomes[3][-1].round == 39


def test_it_waits_for_no_peer_that_comes_to_few_rounds() -> None:
    """Others are told whom to set aside; it sees who is rarely there, and begins no round with such a one."""
    world = World(4, rps, 8, auxiliary=(3,))
    world.frozen[2] = 0.0, 1e9  # peer 2 is never heard, but for one share far ahead of the others
    world.rounds(20, lambda peer, round_: vectors(4, 8, "own", round_)[peer], pause_s=0.05)
    served = world.outcomes[3]
    assert len(served) == 20 and all(o.waited_for == (0, 1) for o in served[2:])
    assert max(o.scatter_s for o in served[3:]) < 0.02


# -- Which channels there are

FORMS = [
    (ragtag.RPS(), "fp32"),
    (ragtag.RPS(repair=True, quorum=5), "bf16"),
    (ALLREDUCE, "int8"),
    (gather, ""),
    (guarded(ragtag.RPS(), ragtag.TrimmedMean(liars=0.3, heaviest=2.0)), "fp32"),
    (guarded(ALLREDUCE, ragtag.CentredClipping()), "fp32"),
]


@pytest.mark.parametrize(("averager", "codec"), FORMS, ids=str)
def test_a_form_makes_the_averager_again(averager: Averager, codec: str) -> None:
    form = form_of(1 << 31, 7, averager, codec, 1000, 3)
    assert form.assisted and form.averager() == averager and form.codec == codec
    (read,) = read_forms(Forms().add(form)[2])
    assert read == form
    channel = read.opened(fp32, 0.01)
    assert (channel.averager, channel.n_chunks, channel.fragments) == (averager, 1000, 3)
    assert channel.assisted and channel.probe_s == 0.02 and channel.floor_s == channel.rtt_s == 0.01


@pytest.mark.parametrize(
    ("averager", "codec"),
    [
        (ragtag.AllReduce(ring=True), "fp32"),
        (ragtag.Moshpit(group=8), "fp32"),
        (ragtag.RandomGroups(group=4), "fp32"),
        (ragtag.RPS(), ""),  # of a script's own codec
    ],
    ids=str,
)
def test_what_an_auxiliary_has_no_part_in_is_told_as_such(averager: Averager, codec: str) -> None:
    form = form_of(9, 7, averager, codec, 10, 1)
    assert not form.assisted and form.by in averager.name
    assert read_forms(Forms().add(form)[2]) == [form]


def test_pages_fit_posts_and_a_channel_beyond_all_of_them_is_not_assisted() -> None:
    forms, board = Forms(), Board(0, 2)
    wide = guarded(
        ragtag.RPS(repair=True, quorum=60), ragtag.CentredClipping(liars=0.123456789, heaviest=1e9)
    )
    topics = []
    for number in range(FORMS_MAX * len(PAGES)):
        form, topic, told = forms.add(
            form_of((1 << 32) - 1 - number, (1 << 32) - 1, wide, "int8", 1 << 40, 4096)
        )
        assert form.assisted and len(read_forms(told)) == number % FORMS_MAX + 1
        board.step(0.0, Post(topic, told))  # it fits
        topics.append(topic)
    assert topics == [page for page in PAGES for _ in range(FORMS_MAX)]
    late, topic, _ = forms.add(form_of(1, 1, rps, "fp32", 1, 1))
    assert not late.assisted and topic == -1
    again, topic, told = forms.add(form_of((1 << 32) - 1, 5, rps, "fp32", 1, 1))  # opened anew
    assert topic == PAGES[0] and read_forms(told)[0] == again and again.hash32 == 5


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"[1]", msgspec.msgpack.encode([[1, 2]]), b"\xff" * 900])
def test_garbage_is_no_form_and_stops_nobody(blob: bytes) -> None:
    with pytest.raises(ValueError, match="no forms of channels"):
        read_forms(blob)
    good = Forms().add(form_of(5, 1, rps, "fp32", 1, 1))[2]
    assert set(told_by_most([(0, blob), (1, good)])) == {5}


def test_most_decide_and_of_as_many_the_lowest() -> None:
    one, other = (Forms().add(form_of(5, h, rps, "fp32", 1, 1))[2] for h in (1, 2))
    assert told_by_most([(0, one), (1, other), (2, other)])[5].hash32 == 2
    assert told_by_most([(3, other), (1, one)])[5].hash32 == 1
    unknown = ChannelForm(5, 1, "quantum", True, "fp32", 1)
    with pytest.raises(ValueError, match="knows no averager 'quantum'"):
        unknown.averager()


def test_only_auxiliaries_are_told_pages_they_are_told_nothing_else_and_post_nothing() -> None:
    trainer, helper = Node(0, 2, 1), Node(2, 3, 1, 2, Role.AUXILIARY)
    pages = Forms().add(form_of(5, 1, rps, "fp32", 1, 1))[2]
    for topic, blob in ((topic_of("news"), b"for all"), (PAGES[0], pages)):
        sent = [e.run for e in trainer.step(0.0, Post(topic, blob)) if isinstance(e, Send)]
        assert {run.peer for run in sent} == ({1} if topic != PAGES[0] else set())
    (told,) = [e.run for e in trainer.step(0.1, Visits(2, Role.AUXILIARY)) if isinstance(e, Send)]
    assert told.peer == 2
    told.peer = 0
    answers = [e.run for e in helper.step(0.2, Arrived((told,))) if isinstance(e, Send)]
    serving = Serving()
    (form,) = serving.look(helper)
    assert (form.channel, form.by) == (5, "rps") and serving.look(helper) == []
    for peer in (0, 1):
        helper.step(0.3, Left(peer))
    assert Serving().look(helper) == []  # only living peers count
    assert 2 not in trainer.board.notices(PAGES[0]).peers
    assert [run.key.stage for run in answers] == [TAKEN]
    answers[0].peer = 2
    trainer.step(0.3, Arrived((answers[0],)))
    again = trainer.step(9.0, Expired(Timer(253, 2, "again")))
    assert not [e for e in again if isinstance(e, Send) and e.run.peer == 2]  # it has it
    (spoken,) = [e.run for e in Board(2, 3).step(0.0, Post(3, b"me, too")) if isinstance(e, Send)][:1]
    spoken.peer = 2
    assert trainer.step(0.4, Arrived((spoken,))) == [] and trainer.board.notices(3).posts == {}
    assert trainer.step(0.5, Left(2)) is not None
    more = trainer.step(1.0, Post(PAGES[0], b"more"))
    assert not [e for e in more if isinstance(e, Send) and e.run.peer == 2]


def test_an_auxiliary_that_never_heard_of_a_channel_drops_what_comes_of_it() -> None:
    node = Node(2, 3, 1, role=Role.AUXILIARY)
    assert node.step(0.0, Arrived(())) == []
    assert not any(isinstance(e, Assisted | Met) for e in node.step(0.0, Joined(0)))
