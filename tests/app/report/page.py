"""Reads a report's page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

VOID = {"meta", "link", "br"}
CHARTS = {
    "Accuracy",
    "Training loss",
    "Arrival rate",
    "Round times",
    "Stages of a round",
    "Who was missed when",
}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "\n"


def drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r'<svg class="chart.*?</svg>', page, re.S)]
