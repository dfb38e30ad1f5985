"""Error feedback: its invariant under any loss, in any order; and what it refuses."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.codecs.sparse.density import Density, break_even_bytes_per_s
from ragtag.codecs.sparse.feedback import TICKETS_MAX, ErrorFeedback
from ragtag.codecs.sparse.gather import SparseSum
from ragtag.codecs.sparse.options import Options
from ragtag.codecs.sparse.reused import reused
from ragtag.codecs.sparse.selection import Selection, Selector, exactly, stateless
from ragtag.codecs.sparse.threshold import gaussian, sidco_exponential
from ragtag.codecs.sparse.tickets import TicketError
from ragtag.codecs.sparse.topk import chunked, exact, randomly, sampled
from ragtag.codecs.sparse.wire import decode
from ragtag.core.errors import NotFinite
from ragtag.core.seed import generator
from tests.codecs.vectors import heavy

D = 20_000
TENTH = Density(0.1)
"""2,000 of 20,000 entries: three fragments or more."""


def gradient(round_: int, d: int = D) -> np.ndarray:
    return heavy(d, round_)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    selector=st.sampled_from([exact, sampled, randomly, chunked(512), gaussian, sidco_exponential, reused]),
    values=st.sampled_from(["fp32", "bf16", "int8", "2bit"]),
    d=st.sampled_from([1, 5, 3000, D]),
)
def test_gradients_are_committed_pending_or_in_the_residual(data, selector, values, d) -> None:
    """Whatever is lost, in whatever order rounds are decided, by fragments or whole."""
    feedback = ErrorFeedback(d, Options(TENTH, selector, values, age_max_rounds=None), peer=3)
    total, committed = np.zeros(d), np.zeros(d)
    under_way = []
    for round_ in range(data.draw(st.integers(1, 12))):
        g = gradient(round_, d)
        total += g
        if data.draw(st.integers(0, 3)) == 0:  # sent whole, and taken in by some
            feedback.hold(g, round_)
            whole = feedback.release()
            kept = np.arange(d) % 3 < data.draw(st.integers(0, 3))
            committed += np.where(kept, 0.0, whole)
            feedback.keep(np.where(kept, whole, np.float32(0)))
            continue
        chunks, ticket = feedback.prepare(g, round_)
        under_way.append((chunks, ticket, np.zeros(ticket.fragments, np.bool_)))
        for _ in range(data.draw(st.integers(0, 3))):
            if not under_way:
                break
            at = data.draw(st.integers(0, len(under_way) - 1))
            chunks, ticket, decided = under_way[at]
            some = np.array(data.draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks))))
            some = some.astype(np.bool_) & ~decided
            decided |= some
            if data.draw(st.booleans()):
                feedback.commit(ticket, np.flatnonzero(some).tolist())
                got = decode(chunks[some], feedback.form(ticket.round))
                committed[got.indices] += got.values
            else:
                feedback.rollback(ticket, some)
            if decided.all():
                under_way.pop(at)
        off = np.abs(total - (committed + feedback.pending() + feedback.residual))
        assert off.max() <= 1e-6 * (round_ + 1) * max(1.0, float(np.abs(total).max()))
    feedback.members_changed()
    assert not feedback.tickets() and not feedback.pending().any()
    assert np.abs(total - (committed + feedback.residual)).max() <= 2e-5 * max(1.0, np.abs(total).max())


def test_what_is_held_decays_and_adds_up_as_if_it_were_selected_from() -> None:
    one, other = (ErrorFeedback(D, Options(TENTH, exact, "fp32", decay=0.5, momentum=0.25)) for _ in range(2))
    one.hold(gradient(0), 0)
    assert one.round == 0
    assert one.measure().entries == 0
    one.hold(gradient(1), 1)
    velocity = 0.25 * gradient(0) + gradient(1)
    np.testing.assert_allclose(one.residual, 0.5 * gradient(0) + velocity, rtol=1e-5, atol=1e-6)
    whole = one.release()
    assert not one.residual.any()
    assert one._velocity.any(), "all was sent: momentum goes on"
    one.keep(whole)
    other.hold(gradient(0), 0)
    other.hold(gradient(1), 1)
    assert np.array_equal(one.residual, other.residual)
    with pytest.raises(ValueError, match="round 1 after round 1"):
        one.hold(gradient(1), 1)
    bad = gradient(2)
    bad[7] = np.inf
    before, velocities = one.residual.copy(), one._velocity.copy()
    with pytest.raises(NotFinite):
        one.hold(bad, 2)
    assert np.array_equal(before, one.residual)
    assert np.array_equal(velocities, one._velocity)


@pytest.mark.parametrize("selector", [sampled, reused, gaussian])
def test_a_twin_is_tried_and_nothing_comes_of_it(selector: Selector) -> None:
    feedback = ErrorFeedback(D, Options(TENTH, selector, "int8"), peer=3)
    for at in range(3):
        feedback.commit(feedback.prepare(gradient(at), at).ticket)
    before = feedback.state_dict()
    u = feedback.residual + gradient(3)
    tried = feedback.twin().prepare(u, 3).chunks
    for name, array in feedback.state_dict().items():
        assert np.array_equal(array, before[name]), name
    assert np.array_equal(feedback.prepare(gradient(3), 3).chunks, tried)


@pytest.mark.parametrize("d", [0, 1, 2])
def test_tiny_vectors(d) -> None:
    feedback = ErrorFeedback(d, Options(Density(0.001)))
    sent = feedback.prepare(np.ones(d, np.float32), 0)
    assert len(sent.chunks) == sent.ticket.fragments == (1 if d else 0)
    feedback.settle(sent.ticket, np.ones(sent.ticket.fragments, np.bool_))
    feedback.commit(feedback.prepare(np.ones(d, np.float32), 1).ticket)
    assert not feedback.tickets()
    feedback.measure()


def test_what_was_rolled_back_may_not_come_late() -> None:
    feedback = ErrorFeedback(D, Options(TENTH))
    ticket = feedback.prepare(gradient(0), 0).ticket
    feedback.rollback(ticket, [1])
    before = feedback.residual.copy()
    with pytest.raises(TicketError, match="fragment 1 of round 0 was rolled back before"):
        feedback.commit(ticket, [0, 1])
    feedback.commit(ticket, [0])
    with pytest.raises(TicketError, match="fragment 0 of round 0 was committed before"):
        feedback.rollback(ticket, [0, 2])
    assert np.array_equal(feedback.residual, before)
    feedback.commit(ticket)
    with pytest.raises(TicketError, match="decided already"):
        feedback.rollback(ticket)
    with pytest.raises(TicketError, match="decided already"):
        feedback.commit(ErrorFeedback(D, Options(TENTH)).prepare(gradient(5), 5).ticket)


@pytest.mark.parametrize(
    ("which", "match"),
    [([99], "fragment 99 of"), ([-1], "fragment -1"), (np.ones(2, np.bool_), "bitmap of 2")],
)
def test_fragments_that_do_not_exist(which, match) -> None:
    feedback = ErrorFeedback(D, Options(TENTH))
    ticket = feedback.prepare(gradient(0), 0).ticket
    for decide in (feedback.commit, feedback.rollback):
        with pytest.raises(TicketError, match=match):
            decide(ticket, which)


@pytest.mark.parametrize("selector", [sampled, reused], ids=lambda s: s.name)
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"decay": 0.95}, {"norm_max": 5.0}])
def test_nan_leaves_everything_as_it_was(selector, more) -> None:
    options = Options(Density(0.01), selector, **more)
    feedback, twin = ErrorFeedback(D, options), ErrorFeedback(D, options)
    for round_ in range(3):
        for each in (feedback, twin):
            each.commit(each.prepare(gradient(round_), round_).ticket)
    for value in (np.nan, np.inf):
        bad = gradient(3)
        bad[17_000] = value
        with pytest.raises(NotFinite, match="the first at 17000"):
            feedback.prepare(bad, 3)
    assert np.isfinite(feedback.residual).all()
    assert np.allclose(feedback.residual, twin.residual, rtol=0, atol=1e-5)
    a, b = (each.prepare(gradient(4), 4).chunks for each in (feedback, twin))
    if selector is sampled:
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (np.zeros(D, np.int64), TypeError, "only floating-point"),
        (np.zeros(D, np.complex64), TypeError, "complex"),
        (np.zeros(3, np.float32), ValueError, "3 values for a residual of 20000"),
    ],
)
def test_gradients_that_are_refused(wrong, error, match) -> None:
    with pytest.raises(error, match=match):
        ErrorFeedback(D).prepare(wrong, 0)


def test_rounds_ascend_and_are_decided() -> None:
    feedback = ErrorFeedback(D, Options(Density(0.001)))
    for round_ in range(TICKETS_MAX):
        feedback.prepare(gradient(round_), round_)
    with pytest.raises(ValueError, match="each round is prepared once"):
        feedback.prepare(gradient(0), TICKETS_MAX - 1)
    before = feedback.residual.copy()
    with pytest.raises(TicketError, match="16 rounds are undecided, the oldest is 0"):
        feedback.prepare(gradient(0), TICKETS_MAX)
    assert np.array_equal(feedback.residual, before)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"decay": 0.0}, "decay"),
        ({"decay": 1.1}, "decay"),
        ({"momentum": 1.0}, "momentum"),
        ({"age_max_rounds": 0}, "age"),
        ({"norm_max": 0.0}, "norm"),
        ({"values": "fp8"}, "fp8"),
    ],
)
def test_options_that_cannot_be(wrong, match) -> None:
    with pytest.raises(ValueError, match=match):
        Options(**wrong)
    with pytest.raises(ValueError, match="-1"):
        ErrorFeedback(-1)


@pytest.mark.parametrize("selector", [sampled, reused, sidco_exponential], ids=lambda s: s.name)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(selector, momentum) -> None:
    """Through a file without pickle; undecided fragments and all."""
    options = Options(TENTH, selector, momentum=momentum, norm_max=100.0)
    first = ErrorFeedback(D, options, peer=2, seed=5)
    for round_ in range(3):
        ticket = first.prepare(gradient(round_), round_).ticket
        first.commit(ticket, [0])
        first.rollback(ticket, [1])
    saved = first.state_dict()
    for name, array in saved.items():
        assert array.flags.c_contiguous and array.dtype in ("f4", "f8", "i8", "u1"), name
    file = io.BytesIO()
    np.savez(file, **saved)
    second = ErrorFeedback(D, options, peer=2, seed=5)
    with np.load(io.BytesIO(file.getvalue()), allow_pickle=False) as loaded:
        second.load_state_dict(loaded)
    assert second.tickets() == first.tickets() and len(second.tickets()) == 3
    with pytest.raises(TicketError, match="fragment 1 of round 0 was rolled back"):
        second.commit(second.tickets()[0], [1])
    assert second.measure() == first.measure()
    for each in (first, second):
        each.rollback(each.tickets()[0])
        each.commit(each.tickets()[0])
    a, b = first.prepare(gradient(3), 3), second.prepare(gradient(3), 3)
    assert a.ticket == b.ticket and np.array_equal(a.chunks, b.chunks)
    assert np.array_equal(first.residual, second.residual)


def test_checkpoints_that_do_not_fit_are_refused_and_change_nothing() -> None:
    def fresh(size: int = D, selector: Selector = sampled) -> ErrorFeedback:
        return ErrorFeedback(size, Options(TENTH, selector))

    feedback = fresh()
    feedback.prepare(gradient(0), 0)
    good = feedback.state_dict()
    cases = [
        (fresh(7), good, "'residual'"),
        (fresh(D, exact), good, "selector 'sampled top-k', here it is 'top-k'"),
        (fresh(), {k: v for k, v in good.items() if k != "counters"}, "no 'counters'"),
        (fresh(), {k: v for k, v in good.items() if k != "ticket.0.values"}, "ticket.0.values"),
        (fresh(), good | {"residual": np.full(D, np.nan, np.float32)}, "not finite"),
        (fresh(), good | {"residual": np.zeros(D)}, "float64"),
        (fresh(), good | {"ticket.0.indices": good["ticket.0.indices"] + D}, "outside of 20000"),
        (fresh(), good | {"ticket.0.state": good["ticket.0.state"] + np.uint8(7)}, "cannot be"),
        (fresh(), good | {"ticket.0.starts": good["ticket.0.starts"][::-1].copy()}, "ascend"),
    ]
    for target, state, match in cases:
        with pytest.raises(ValueError, match=match):
            target.load_state_dict(state)
        assert not target.residual.any() and not target.tickets()


def test_a_dead_links_residual_fades_and_an_answer_ends_that() -> None:
    """While nothing is delivered, at most about age_max_rounds rounds' worth is kept."""
    g = np.full(D, 1.0, np.float32)
    feedback = ErrorFeedback(D, Options(Density(0.001), age_max_rounds=10))
    for round_ in range(200):
        feedback.rollback(feedback.prepare(g, round_).ticket)
    assert feedback.residual.mean() == pytest.approx(11, rel=0.02)
    assert feedback.measure().forgotten_norm > 0
    feedback.commit(feedback.prepare(g, 200).ticket)
    before = feedback.residual.mean()
    feedback.prepare(g, 201)
    assert feedback.residual.mean() > before + 0.9
    unbounded = ErrorFeedback(D, Options(Density(0.001), age_max_rounds=None))
    for round_ in range(50):
        unbounded.rollback(unbounded.prepare(g, round_).ticket)
    assert unbounded.residual.mean() == pytest.approx(50, rel=1e-3)
    assert unbounded.measure().forgotten_norm == 0


def test_the_cap_on_the_norm() -> None:
    feedback = ErrorFeedback(D, Options(Density(0.001), norm_max=3.0))
    norm = float(np.linalg.norm(gradient(0)))
    for round_ in range(40):
        feedback.rollback(feedback.prepare(gradient(0), round_).ticket)
        assert feedback.state_dict()["norms"][0] == pytest.approx(norm), "from the first round on"
        assert feedback.measure().residual_norm <= 4.01 * norm
    assert feedback.measure().residual_norm > 3.5 * norm


def test_decay_leaves_a_share_each_round() -> None:
    """u_t = g + decay * residual: what is never selected sums to a geometric series."""
    nothing = Selector(
        "first", stateless, lambda u, k, s, key: Selection(np.zeros(1, np.int64), u[:1].copy()), exactly
    )
    feedback = ErrorFeedback(10, Options(Density(0.1), nothing, "fp32", decay=0.5))
    for round_ in range(20):
        feedback.commit(feedback.prepare(np.ones(10, np.float32), round_).ticket)
    assert np.allclose(feedback.residual[1:], 2.0) and feedback.residual[0] == 0


def test_momentum_correction_sums_velocities_and_forgets_them_where_sent() -> None:
    """DGC's equations by hand: v = m v + g, u += v; where sent, both become 0."""
    feedback = ErrorFeedback(100, Options(TENTH, exact, "fp32", momentum=0.9))
    v, u = np.zeros(100), np.zeros(100)
    for round_ in range(10):
        g = heavy(100, round_)
        v = 0.9 * v + g
        u = u + v
        sent = feedback.prepare(g, round_)
        got = decode(sent.chunks, feedback.form(round_))
        assert np.allclose(got.values, u[got.indices], rtol=1e-4, atol=1e-4)
        u[got.indices] = v[got.indices] = 0
        assert np.allclose(feedback.residual, u, rtol=1e-4, atol=1e-4)
        feedback.commit(sent.ticket)


def test_members_change() -> None:
    feedback = ErrorFeedback(D, Options(TENTH))
    tickets = [feedback.prepare(gradient(r), r).ticket for r in range(3)]
    feedback.commit(tickets[0], [0])
    feedback.members_changed()
    for ticket in tickets:
        with pytest.raises(TicketError, match="decided already"):
            feedback.commit(ticket)
    feedback.prepare(gradient(3), 3)


@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_a_crew_that_loses_30_percent_loses_no_gradient(values) -> None:
    """Four peers, one aggregate per round decided from what came: means of all gradients = what was applied
    plus what is left.
    """
    n, rounds = 4, 25
    options = Options(Density(0.05), values=values)
    peers = [ErrorFeedback(D, options, peer=p) for p in range(n)]
    applied, truth = np.zeros(D), np.zeros(D)
    lost = 0
    for round_ in range(rounds):
        gathered = SparseSum(peers[0].form(round_), round_, range(n))
        sent = []
        for p, peer in enumerate(peers):
            g = generator(round_, "crew", p).standard_normal(D).astype(np.float32)
            truth += g / n
            sent.append(peer.prepare(g, round_))
            keep = generator(round_, "loss", p).random(len(sent[-1].chunks)) > 0.3
            lost += int((~keep).sum())
            assert gathered.add(p, sent[-1].chunks[keep]) == []
        gathered.close()
        for p, (peer, each) in enumerate(zip(peers, sent, strict=True)):
            late = gathered.add(p, each.chunks)
            assert late == [f"it is late: round {round_} is decided"] * len(each.chunks)
            peer.settle(each.ticket, gathered.heard(p, each.ticket.fragments))
        applied += gathered.mean()
    assert lost > 30
    left = sum(peer.residual for peer in peers) / n
    assert np.abs(truth - applied - left).max() < 1e-4


def test_the_sum_takes_each_fragment_once_from_members_only() -> None:
    feedback = ErrorFeedback(D, Options(Density(0.25)), peer=1)
    chunks = feedback.prepare(gradient(0), 0).chunks
    assert len(chunks) > 4
    form = feedback.form(0)
    gathered = SparseSum(form, 0, [0, 1])
    assert gathered.add(1, chunks[:2]) == []
    once = gathered.total.copy()
    assert gathered.add(1, chunks[:2]) == ["fragment 0 came before", "fragment 1 came before"]
    assert np.array_equal(gathered.total, once)
    assert gathered.add(1, chunks[[2, 2, 1]]) == ["fragment 2 came before", "fragment 1 came before"]
    assert gathered.add(2, chunks[:1]) == ["peer 2 is no member of round 0"]
    assert "from peer 1" in gathered.add(0, chunks[:1])[0]
    bad = chunks[3:4].copy()
    bad[0, 0] = 0
    assert "no fragment" in gathered.add(1, bad)[0]
    got = decode(chunks[:3], form)
    expected = np.zeros(D, np.float32)
    expected[got.indices] = got.values
    assert np.array_equal(gathered.total, expected)
    assert gathered.heard(1, len(chunks)).tolist() == [True] * 3 + [False] * (len(chunks) - 3)
    assert not gathered.heard(0, 4).any()
    assert np.allclose(gathered.mean(), expected / 2)


def test_density() -> None:
    warm = Density(0.001, warm_up_rounds=4)
    assert [round(warm.share(r), 4) for r in range(6)] == [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    assert [Density(0.1).k(d, 0) for d in (0, 1, 9, 10, 100)] == [1, 1, 1, 1, 10]
    assert Density(0.001, k_min=50).k(20, 0) == 20
    for wrong, match in (
        ({"ratio": 0.0}, "ratio of 0.0"),
        ({"ratio": 1.5}, "ratio of 1.5"),
        ({"k_min": 0}, "k_min is 0"),
        ({"warm_up_rounds": -1}, "-1 rounds"),
    ):
        with pytest.raises(ValueError, match=match):
            Density(**wrong)
    with pytest.raises(ValueError, match="must fall"):
        Density(0.5, warm_up_rounds=3)


def test_the_link_on_which_sparse_and_dense_take_equally_long() -> None:
    rate = break_even_bytes_per_s(100_000_000, 61_000, 0.010, 0.001, 0.001)
    assert 100_000_000 / rate == pytest.approx(0.012 + 61_000 / rate)
    assert break_even_bytes_per_s(1000, 1000, 0.01) == 0
    assert break_even_bytes_per_s(1000, 10, 0.0) == float("inf")
    with pytest.raises(ValueError, match="measured"):
        break_even_bytes_per_s(1000, 10, float("nan"))


def test_figures_for_the_trace() -> None:
    feedback = ErrorFeedback(D, Options(Density(0.01), exact, "fp32"))
    g = gradient(0)
    feedback.prepare(g, 0)
    found = feedback.measure()
    top = np.sort(np.abs(g.astype(np.float64)))[-200:]
    assert found.entries == 200 and found.density == 0.01 and found.dense_bytes == 4 * D
    assert found.captured == pytest.approx((top**2).sum() / (g.astype(np.float64) ** 2).sum(), rel=1e-5)
    assert found.residual_norm == pytest.approx(float(np.linalg.norm(feedback.residual)), rel=1e-5)
    assert 0 < found.bytes < found.dense_bytes / 10


def test_a_warm_up_begins_at_no_more_than_all() -> None:
    assert Density(0.01, warm_up_rounds=3, start=1.0).start == 1.0
    with pytest.raises(ValueError, match="at most 1"):
        Density(0.01, warm_up_rounds=3, start=1.5)
