"""What an HTML page has: its elements, balanced, and its text."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "img", "br", "link"}


class Reading(HTMLParser):
    """What a page has; unbalanced elements fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == tag]


def read(text: str) -> Reading:
    found = Reading()
    found.feed(text)
    found.close()
    assert found.open == []
    return found
