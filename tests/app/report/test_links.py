"""Links between peers: the report's section, and its figures for machines."""

from __future__ import annotations

from pathlib import Path

from ragtag.app.report import build_report, report_json
from ragtag.app.report.sections import LINKS_SHOWN
from ragtag.app.tracefile import TraceWriter, peer_file
from ragtag.core import trace
from tests.app.report.page import Page


def written(folder: Path, n: int = 2, sealed: tuple[bool, ...] = (True, True), refused: int = 0) -> str:
    with TraceWriter(folder / peer_file(trace.CREW)) as crew:
        crew.write(trace.Run(t=0.0, world="live", name="run", seed=1, peers=n, method="rps", config={}))
    for peer in range(n):
        with TraceWriter(folder / peer_file(peer)) as writer:
            writer.write(trace.Join(t=0.1, peer=peer, sealed=sealed[peer % len(sealed)]))
            for other in set(range(n)) - {peer}:
                writer.write(
                    trace.Link(
                        t=9.0, peer=peer, other=other, sent=2000, lost=40 * peer, late=3 * peer,
                        rate_bytes_per_s=12.5e6, rtt_s=0.0125, min_rtt_s=0.002,
                        datagram_bytes=8064, through=3 if peer else -1,
                        protocol="udp" if peer else "tcp",
                        held_s={"rate": 1.5 + peer, "window": 0.25},
                    )
                )  # fmt: skip
            counts = {"replayed": refused, "clear": 1} if refused else {}
            writer.write(trace.Leave(t=9.5, peer=peer, refused=counts, relayed=1234 * peer))
    page = build_report(folder).read_text(encoding="utf-8")
    Page(page)
    return page


def test_each_way_has_its_figures(tmp_path: Path) -> None:
    section = written(tmp_path).partition("<h2>Links</h2>")[2].partition("</section>")[0]
    assert "What peers sent each other was sealed." in section and "Refused" not in section
    row = section[section.index("1 \N{RIGHTWARDS ARROW} 0") :].partition("</tr>")[0]
    cells = [cell.partition("<")[0] for cell in row.split('<td class="n">')[1:]]
    assert cells == ["12.5 MB/s", "2 ms", "12.5 ms", "2,000", "8.06 kB", "2 %", "3"]
    assert "the path&#x27;s rate, 2.5 s" in row
    assert "1 \N{RIGHTWARDS ARROW} 0, through peer 3" in row and section.count("through") == 1
    assert "0 \N{RIGHTWARDS ARROW} 1, over TCP" in section and section.count(", over TCP") == 1
    assert "Over TCP went 1 of these ways at the end, as nothing came back by UDP." in section
    assert [link["protocol"] for link in report_json(tmp_path)["links"]] == ["tcp", "udp"]
    assert [peer["relayed"] for peer in report_json(tmp_path)["per_peer"]] == [0, 1234]
    assert [link["through"] for link in report_json(tmp_path)["links"]] == [None, 3]
    ((one, two), per_peer) = report_json(tmp_path)["links"], report_json(tmp_path)["per_peer"]
    assert (two["from"], two["to"], two["lost"], two["held_s"]) == (1, 0, 0.02, {"rate": 2.5, "window": 0.25})
    assert (
        one["late_messages"] == 0
        and one["datagram_bytes"] == 8064
        and {peer["sealed"] for peer in per_peer} == {True}
    )


def test_what_was_refused_and_what_was_not_sealed_is_said(tmp_path: Path) -> None:
    page = written(tmp_path, 3, (True, False), refused=5)
    assert "partly sealed. Refused: replayed 15, clear 3." in page
    assert report_json(tmp_path)["per_peer"][0]["refused"] == {"replayed": 5, "clear": 1}
    assert "was in clear." in written(tmp_path / "clear", 2, (False,))


def test_of_many_ways_those_are_shown_on_which_messages_waited_longest(tmp_path: Path) -> None:
    page = written(tmp_path, 8)
    assert f"Shown are the {LINKS_SHOWN} on which messages waited longest, of 56." in page
    section = page.partition("<h2>Links</h2>")[2].partition("</section>")[0]
    assert section.count("\N{RIGHTWARDS ARROW}") == LINKS_SHOWN
    assert "7 \N{RIGHTWARDS ARROW} 0" in section and "0 \N{RIGHTWARDS ARROW} 7" not in section


def test_where_nothing_is_known_there_is_no_section(tmp_path: Path) -> None:
    assert "<h2>Links</h2>" not in written(tmp_path, 1)
