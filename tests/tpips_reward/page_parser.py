"""An HTML page taken apart, for tests of what it holds."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

VOID = {"meta", "input", "img", "br", "line", "rect", "link", "hr"}


class Page(HTMLParser):
    """The page as a browser takes it apart; elements must close in the order in which they opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            self.addresses += [value or ""] if name in ("src", "href", "action", "data") else []
            self.handlers += [name] if name.startswith("on") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())
