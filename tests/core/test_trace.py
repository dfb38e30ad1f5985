"""Records survive the way to a line and back; damage and newer versions are told apart."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragtag.core import trace

SAMPLES: list[trace.Record] = [
    trace.Run(
        t=0.0, world="live", name="demo", seed=7, peers=6, method="rps", config={"lr": "0.1"}, planned_s=60.0
    ),
    trace.Join(t=0.5, peer=2, address="127.0.0.1:4000", rtt_s=0.0004, others=5),
    trace.Round(
        t=1.5,
        peer=2,
        round=3,
        scatter_s=0.01,
        gather_s=0.02,
        total_s=0.03,
        arrived=0.81,
        contributors=5.2,
        waited_for=[0, 1, 3],
        missed=[3],
        expired=True,
    ),
    trace.Step(t=1.6, peer=2, step=4, samples=32, loss=2.25),
    trace.Pace(
        t=1.7,
        peer=2,
        steps=10,
        averages=9,
        compute_s=0.4,
        average_s=0.1,
        wait_s=0.05,
        lost_s=0.01,
        waited_for=[3],
        waited_s=[0.08],
        stale=[8, 1],
    ),
    trace.Sparse(
        t=2.9,
        peer=1,
        round=7,
        entries=490,
        density=0.001,
        bytes=1088,
        dense_bytes=1960000,
        captured=0.4,
        residual_norm=1.5,
        committed=1,
        restored=2,
        late=3,
        given_up=1,
    ),
    trace.Align(
        t=2.95, peer=1, round=31, units=264, apart=9, own=2, peers=5, given=1, taken=2, distance=1e-3
    ),
    trace.Kfac(t=2.96, peer=1, round=40, step=41, layers=9, plain=1, dropped=2, bases=18, age_rounds=12),
    trace.Privacy(
        t=2.963, peer=1, holder="A", steps=9, epsilon=0.8, delta=1e-5, noise_multiplier=1.1, rate=0.02
    ),
    trace.Target(
        t=2.965,
        peer=1,
        round=9,
        target=4096,
        steps=10,
        computed=9000,
        counted=8000.5,
        pending=32,
        stale=8,
        dropped={"late": 967.5},
        step_samples=4128,
        overshoot=0.01,
        goodput=0.8,
    ),
    trace.Leaderboard(t=9.0, peer=1, persons=["alice", "holder"], samples=[64, 32], processes=[2, 1]),
    trace.Guarded(
        t=2.965,
        peer=1,
        round=40,
        rounds=9,
        peers=[0, 2],
        values=[2448, 2176],
        cut=[0.2, 1.0],
        far=[1.0, 31.5],
        capped=[0, 8],
        short=1,
        channel="model",
    ),
    trace.Phase(t=2.97, peer=1, name="greeting", took_s=0.06),
    trace.Epoch(t=3.0, peer=1, epoch=2, samples=1437, missed=32, twice=0),
    trace.Eval(t=2.0, peer=2, model="own", step=4, loss=1.5, accuracy=0.5, n=360),
    trace.Fault(t=2.5, peer=4, name="freeze", detail="SIGSTOP", until_t=5.5),
    trace.Note(t=2.6, peer=2, what="silent", other=4),
    trace.Error(t=2.7, peer=1, what="the script raised", detail="Traceback ..."),
    trace.Result(t=9.0, name="survivors", value=0.96, expected=0.965, tolerance=0.01, passed=True),
    trace.Link(
        t=9.4,
        peer=2,
        other=1,
        sent=900,
        lost=90,
        late=2,
        rate_bytes_per_s=1.25e7,
        rtt_s=0.01,
        min_rtt_s=0.001,
        held_s={"rate": 1.5},
    ),
    trace.Leave(
        t=9.5,
        peer=2,
        steps=600,
        samples=4800,
        bytes_sent=10**9,
        bytes_received=9 * 10**8,
        digest="a1b2c3d4e5f6",
        round=599,
    ),
]


@pytest.mark.parametrize("record", SAMPLES, ids=trace.kind_of)
def test_round_trip(record: trace.Record) -> None:
    line = trace.encode(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert trace.decode(line) == record
    assert json.loads(line)["kind"] == trace.kind_of(record)


def test_every_kind_has_a_sample() -> None:
    assert {type(record) for record in SAMPLES} == set(get_args(trace.Known))


@given(
    st.text(),
    st.dictionaries(st.text(), st.text(), max_size=5),
    st.floats(-1e9, 1e9),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
@settings(max_examples=150, deadline=None)
def test_round_trip_of_any_text(name: str, config: dict[str, str], t: float, seed: int) -> None:
    record = trace.Run(t=t, world="live", name=name, seed=seed, peers=2, method="rps", config=config)
    assert trace.decode(trace.encode(record)) == record


def test_a_loss_that_is_not_finite_is_null() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        line = trace.encode(trace.Step(t=1.0, peer=0, step=1, samples=8, loss=loss))
        back = trace.decode(line)
        assert isinstance(back, trace.Step) and back.loss is None


def test_a_time_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="t of a 'step' record is nan"):
        trace.encode(trace.Step(t=math.nan, step=1, samples=8, loss=1.0))
    with pytest.raises(ValueError, match=r"gather_s of a 'round' record is inf"):
        trace.encode(trace.Round(t=0.0, round=1, scatter_s=0.0, gather_s=math.inf, total_s=0.0, arrived=1.0))


def test_an_undecodable_file_name_and_a_long_text_are_written_all_the_same() -> None:
    odd = trace.decode(trace.encode(trace.Error(t=0.0, what="cannot open \udcff.pt")))
    assert isinstance(odd, trace.Error) and odd.what == r"cannot open \udcff.pt"
    line = trace.encode(trace.Error(t=0.0, what="raised", detail="x" * 3_000_000))
    assert len(line) < trace.LINE_BYTES_MAX
    long = trace.decode(line)
    assert isinstance(long, trace.Error) and long.detail.endswith("... (3000000 characters)")


def test_an_invitation_is_not_written() -> None:
    secret = "a2b3" * 20
    for token in (f"ragtag2-{secret}", f"RAGTAG2-{secret.upper()}"):
        line = trace.encode(trace.Error(t=0.0, peer=1, what=token, detail=f"\n{token}\n'{token}'"))
        assert trace.Decoder().decode(line) == trace.Error(
            t=0.0, peer=1, what="TOKEN", detail="\nTOKEN\n'TOKEN'"
        )
    name = trace.Run(t=0.0, world="live", name="ragtag2-otters", seed=0, peers=1, method="")
    assert b'"ragtag2-otters"' in trace.encode(name)


def test_a_kind_of_a_newer_version_is_tolerated_and_counted() -> None:
    decoder = trace.Decoder()
    record = decoder.decode(b'{"kind":"weather","t":3.5,"peer":1,"sky":"grey"}')
    assert record == trace.Unknown(t=3.5, peer=1, of_kind="weather")
    assert decoder.unknown_kinds == {"weather": 1}
    with pytest.raises(ValueError, match="cannot be written by this version"):
        trace.encode(record)


def test_fields_of_a_newer_version_are_tolerated_and_counted() -> None:
    decoder = trace.Decoder()
    for _ in range(3):
        record = decoder.decode(b'{"kind":"step","t":1,"peer":0,"step":2,"samples":16,"loss":0.5,"watts":40}')
        assert record == trace.Step(t=1.0, peer=0, step=2, samples=16, loss=0.5)
    assert decoder.extra_fields == {"step.watts": 3}


def test_names_counted_are_bounded() -> None:
    decoder = trace.Decoder(names_max=10)
    for i in range(50):
        decoder.decode(json.dumps({"kind": f"kind{i}", "t": 0.0}))
    assert len(decoder.unknown_kinds) == 11 and decoder.unknown_kinds["(others)"] == 40


def test_older_traces_lack_fields_that_have_defaults() -> None:
    record = trace.decode(b'{"kind":"leave","t":4.0,"peer":3}')
    assert record == trace.Leave(t=4.0, peer=3)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b'{"kind":"step","t":1.0,"peer":0,"step":2,"sam',
        b'{"kind":"step","t":1.0}',
        b'{"kind":"step","t":"soon","step":1,"samples":1,"loss":1.0}',
        b'{"kind":"step","t":1.0,"peer":-7,"step":1,"samples":1,"loss":1.0}',
        b'{"kind":"eval","t":1.0,"model":"own","step":1,"accuracy":31.0}',
        b'{"kind":"step","t":1e999,"step":1,"samples":1,"loss":1.0}',
        b'{"kind":"step","t":1.0,"step":1,"samples":' + b"9" * 40 + b',"loss":1.0}',
        b'{"kind":7,"t":1.0}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_damage_is_a_value_error_with_the_line_number(line: bytes) -> None:
    with pytest.raises(ValueError, match="trace line 12: not a record: "):
        trace.decode(line, 12)


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_record_or_a_value_error(line: bytes) -> None:
    try:
        trace.decode(line)
    except ValueError as reason:
        assert "not a record" in str(reason)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from([trace.kind_of(r) for r in SAMPLES]),
    st.dictionaries(st.text(max_size=8), _json),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_any_object_of_a_known_kind_is_a_record_or_a_value_error(
    kind: str, extra: dict[str, Any], data: st.DataObject
) -> None:
    sample = next(r for r in SAMPLES if trace.kind_of(r) == kind)
    fields = {**msgspec.to_builtins(sample), **extra}
    name = data.draw(st.sampled_from(sorted(sample.__struct_fields__)))
    fields[name] = data.draw(_json)
    fields["kind"] = kind
    try:
        record = trace.decode(json.dumps(fields))
    except ValueError as reason:
        assert "not a record" in str(reason)
    else:
        assert trace.decode(trace.encode(record)) == record
