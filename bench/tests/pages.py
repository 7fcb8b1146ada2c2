"""What tests of pages have in common: to read one as a browser would, and see that it is whole."""

from __future__ import annotations

import html.parser
import re

VOID = {"meta", "br"}


class Reader(html.parser.HTMLParser):
    """Every element closed where it should be; what the page asks of elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.sources += [v or "" for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def read(text: str) -> Reader:
    """The page, every element of which is closed."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def elsewhere(text: str) -> set[str]:
    """What a page asks of elsewhere: it should be nothing. Words and names are no requests."""
    asked = {source for source in read(text).sources if not source.startswith("#")}
    return asked | set(re.findall(r"<script|<link|<img|<iframe|@import|url\((?!#)[^)]*", text))
