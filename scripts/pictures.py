"""Draws the pictures of docs/pictures: `.venv/bin/python scripts/pictures.py`.

Each is one SVG file for light and dark pages: its colours follow the reader's scheme. They are
drawn 480 units wide, so that their words can be read on a phone. `--check` only compares, and exits
with 1 if a file is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from generated import kept

from outrider.estimate.acceptance import expected_tokens
from outrider_lab.planner.rounds import speed_up

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
WIDTH = 480
LIGHT = {
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#c8ced6",
    "paper": "#f3f5f7",
    "draft": "#0969da",
    "good": "#1a7f37",
    "bad": "#c2212c",
    "own": "#8250df",
    "other": "#9a6700",
}
DARK = {
    "ink": "#e6edf3",
    "soft": "#9198a1",
    "line": "#4a525c",
    "paper": "#1c2128",
    "draft": "#58a6ff",
    "good": "#3fb950",
    "bad": "#ff7b72",
    "own": "#bc8cff",
    "other": "#d29922",
}
RULES = """\
text { font: 14px system-ui, sans-serif; fill: var(--ink); }
.code { font: 14px ui-monospace, monospace; text-anchor: middle; }
.head { font-weight: 600; }
.soft { fill: var(--soft); font-size: 13px; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
rect, path, line { fill: none; stroke: var(--line); stroke-width: 1.5; }
.fill { fill: var(--paper); }"""
Draw = Callable[["Picture"], None]


class Picture:
    """Shapes in the order in which they were drawn."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height, self._shapes = title, height, list[str]()

    def text(self, x: float, y: float, words: str, kind: str = "", colour: str = "") -> None:
        style = f' style="fill: var(--{colour})"' if colour else ""
        self._shapes.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}"{style}>{escape(words)}</text>'
        )

    def rect(
        self, x: float, y: float, w: float, h: float, colour: str = "line", look: str = ""
    ) -> None:
        """`look` is `full` (tinted), `dashed` or `paper`."""
        fill = {"full": f"; fill: var(--{colour}); fill-opacity: 0.16", "paper": ""}.get(look, "")
        dash = "; stroke-dasharray: 4 3" if look == "dashed" else ""
        kind = ' class="fill"' if look == "paper" else ""
        self._shapes.append(
            f'<rect{kind} x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" '
            f'style="stroke: var(--{colour}){fill}{dash}"/>'
        )

    def path(self, points: str, colour: str = "line", more: str = "") -> None:
        self._shapes.append(f'<path d="{points}" style="stroke: var(--{colour}){more}"/>')

    def token(self, x: float, y: float, word: str, colour: str, look: str = "full") -> float:
        """A token in its box; where the next one goes."""
        width = 8.5 * len(word) + 18
        self.rect(x, y, width, 28, colour, look)
        self.text(x + width / 2, y + 19, word, "code", "soft" if look == "dashed" else "")
        if colour == "bad":
            self.path(f"M{x + 4:g} {y + 23:g}L{x + width - 4:g} {y + 5:g}", "bad")
        return x + width + 8

    def arrow(self, x: float, y: float, length: float, colour: str = "soft") -> None:
        """Downwards."""
        end = y + length
        head = f"M{x - 4:g} {end - 5:g}L{x:g} {end:g}L{x + 4:g} {end - 5:g}"
        self.path(f"M{x:g} {y:g}V{end:g}{head}", colour)

    def svg(self) -> str:
        def variables(colours: dict[str, str]) -> str:
            return " ".join(f"--{name}: {value};" for name, value in colours.items())

        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 0 {WIDTH} {self._height}" '
                f'width="{WIDTH}" height="{self._height}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>\nsvg {{ {variables(LIGHT)} }}",
                f"@media (prefers-color-scheme: dark) {{ svg {{ {variables(DARK)} }} }}",
                f"{RULES}\n</style>",
                *self._shapes,
                "</svg>\n",
            ]
        )


def a_round(picture: Picture) -> None:
    drafted = ("return", "a", "*", "b")
    picture.text(0, 18, "1  The drafter guesses four tokens, one after the other", "head")
    x = picture.token(0, 32, "def add(a, b):", "line", "paper")
    centres = [x / 2]
    for word in drafted:
        after = picture.token(x, 32, word, "draft")
        centres.append((x + after - 8) / 2)
        x = after
    picture.text(0, 96, "2  One pass of the target reads all of them", "head")
    picture.rect(0, 124, x - 8, 30, "own", "full")
    picture.text((x - 8) / 2, 144, "target: what follows each of them?", "middle")
    for centre in centres:
        picture.arrow(centre, 104, 18)
        picture.arrow(centre, 156, 22)
    answers = ("return", "a", "+", "", "")
    for centre, word in zip(centres, answers, strict=True):
        picture.text(centre, 196, word or "…", "code", "own" if word else "soft")
    picture.text(0, 236, "3  A rule keeps the beginning that agrees", "head")
    x = picture.token(0, 250, "def add(a, b):", "line", "paper")
    looks = (("good", "full"), ("good", "full"), ("bad", "full"), ("line", "dashed"))
    places: list[float] = []
    for word, (colour, look) in zip(drafted, looks, strict=True):
        places.append(x)
        x = picture.token(x, 250, word, colour, look)
    picture.text(places[0], 296, "accepted", "soft", "good")
    picture.text(places[2] - 8, 296, "refused", "soft", "bad")
    picture.text(places[3] + 20, 296, "not looked at", "soft")
    picture.text(0, 336, "4  The target's own token takes the refused one's place", "head")
    x = picture.token(0, 350, "def add(a, b):", "line", "paper")
    for word, colour in (("return", "good"), ("a", "good"), ("+", "own")):
        x = picture.token(x, 350, word, colour)
    picture.text(0, 402, "Three tokens for one pass of the target. The next round goes on", "soft")
    picture.text(0, 420, "from here.", "soft")


# Word, parent, colour, look, and its place in the picture; a parent comes before its children.
NODES = (
    ("b):", -1, "line", "paper", 0, 84),
    ("sum", 0, "bad", "full", 108, 40),
    ("return", 0, "good", "full", 108, 106),
    ("x", 1, "line", "dashed", 218, 40),
    ("a", 2, "good", "full", 218, 84),
    ("b", 2, "line", "dashed", 218, 128),
    ("+", 4, "good", "full", 300, 62),
    ("-", 4, "line", "dashed", 300, 106),
)


def a_tree(picture: Picture) -> None:
    picture.text(0, 18, "A draft tree, and what the rule says of it", "head")
    for word, parent, colour, look, x, y in NODES:
        if parent >= 0:
            above = NODES[parent]
            start = above[4] + 8.5 * len(above[0]) + 18
            start_y = above[5] + 14
            colour_of_edge = colour if colour == "good" else "line"
            picture.path(
                f"M{start:g} {start_y}C{start + 25:g} {start_y} {x - 25} {y + 14} {x} {y + 14}",
                colour_of_edge,
            )
        picture.token(x, y, word, colour, look)
    picture.path("M327 76C350 76 350 76 374 76", "own")
    picture.token(374, 62, "b", "own")
    picture.text(374, 108, "the target's", "soft", "own")
    picture.text(374, 125, "own token", "soft", "own")
    picture.text(0, 190, "The same tree in the target's pass: a row sees its own path", "head")
    side, left, top = 24, 78, 206
    for i, (word, *_) in enumerate(NODES):
        picture.text(left - 10, top + side * i + 17, word, "end soft")
        seen = set(path_of(i))
        for j in range(len(NODES)):
            look = "full" if j in seen else ""
            picture.rect(
                left + side * j,
                top + side * i,
                side - 3,
                side - 3,
                "draft" if j in seen else "line",
                look,
            )
    x = left + side * len(NODES) + 20
    for i, words in enumerate(
        (
            "Each row is a token, each",
            "filled square a token that",
            "it attends to. One pass",
            "judges all branches.",
        )
    ):
        picture.text(x, top + 40 + 20 * i, words, "soft")


def path_of(node: int) -> Iterator[int]:
    while node >= 0:
        yield node
        node = NODES[node][1]


def the_arena(picture: Picture) -> None:
    picture.text(0, 18, "The pages of two sequences in one allocation", "head")
    picture.text(
        0, 38, "A has pages 0 and 1, B has page 2; a page has 6 slots here, 32 in truth.", "soft"
    )
    states = (
        ("During the pass: A's four drafted tokens are staged behind its text", 7, 4, 0),
        ("The verdict keeps two: a length grows, nothing moves", 9, 0, 2),
        ("Next round: new drafts overwrite what was refused", 10, 2, 0),
    )
    for row, (words, length, staged, dead) in enumerate(states):
        y = 76 + 98 * row
        picture.text(0, y, words, "head" if row == 1 else "")
        for page, owner in enumerate("AAB"):
            for slot in range(6):
                x = (page * 6 + slot) * 25 + page * 12
                place = page * 6 + slot
                colour, look, word = "line", "", ""
                if owner == "B":
                    colour, look, word = ("other", "full", "B") if slot < 5 else ("line", "", "")
                elif place < length:
                    colour, look, word = "good", "full", "A"
                elif place < length + staged:
                    colour, look, word = "draft", "full", "d"
                elif place < length + staged + dead:
                    colour, look, word = "bad", "dashed", "d"
                picture.rect(x, y + 12, 22, 30, colour, look)
                picture.text(x + 11, y + 32, word, "code", "soft" if look == "dashed" else "")
        for page in range(3):
            picture.text(page * 162 + 74, y + 60, f"page {page}", "middle soft")
    picture.text(
        0,
        368,
        "d: drafted and staged; dashed: dead space, which no pass reads",
        "soft",
    )


LANES: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    ("single: one lane, drafting and verifying in turns", (("", "D4 V6 D4 V6 D4 V6"),)),
    (
        "pd: a prompt is read beside the rounds",
        (("prefill", "P11 .8 P11"), ("decode", "D4 V6 D4 V6 D4 V6")),
    ),
    (
        "pdv: one group is drafted for while another is verified",
        (("decode", "D4 .2 D4 .2 D4 .2 D4 .2 D4"), ("verify", ".4 V6 V6 V6 V6")),
    ),
    (
        "ssd: drafts ahead for the likely verdicts; the third misses",
        (("decode", "D4 A5 .1 A5 .1 A5 .1 D4"), ("verify", ".4 V6 V6 V6 .4 V5")),
    ),
)
KINDS = {
    "D": ("draft", "draft"),
    "V": ("own", "verify"),
    "P": ("other", "prompt"),
    "A": ("good", "ahead"),
}


def lanes(picture: Picture) -> None:
    picture.text(0, 18, "Four ways to arrange the same work; time goes to the right", "head")
    y = 36
    for words, rows in LANES:
        y += 20
        picture.text(0, y, words)
        y += 8
        for name, jobs in rows:
            picture.text(0, y + 18, name, "soft")
            x = 62.0
            for job in jobs.split():
                width = 13.2 * int(job[1:])
                if job[0] != ".":
                    colour, label = KINDS[job[0]]
                    picture.rect(x, y, width - 3, 26, colour, "full")
                    shown = label if width > 50 else job[0]
                    picture.text(x + width / 2 - 1, y + 18, shown, "middle soft", "ink")
                x += width
            y += 31
        y += 8
    picture.text(
        0,
        y + 14,
        "Lanes overlap where the machine has room for two jobs at once.",
        "soft",
    )


def gains(picture: Picture) -> None:
    picture.text(0, 18, "Speed-up over plain decoding, by the draft's length K", "head")
    picture.text(
        0, 38, "A drafted token costs 0.1 of a target pass; alpha is the chance that it", "soft"
    )
    picture.text(0, 55, "is kept. A dot marks the best K.", "soft")
    left, top, right, bottom, most = 34, 76, 400, 330, 4.0

    def place(k: float, ratio: float) -> tuple[float, float]:
        return left + (right - left) * k / 16, bottom - (bottom - top) * ratio / most

    for ratio in range(5):
        _, y = place(0, ratio)
        picture.path(f"M{left} {y:g}H{right}", "ink" if ratio == 1 else "line", "; stroke-width: 1")
        picture.text(left - 8, y + 5, str(ratio), "end soft")
    for k in range(0, 17, 4):
        picture.text(place(k, 0)[0], bottom + 20, str(k), "middle soft")
    picture.text(place(13, 0)[0], bottom + 20, "K", "middle soft")
    picture.text(left + 6, bottom - 10, "below 1: slower than plain decoding", "soft", "bad")
    for alpha, colour in ((0.9, "good"), (0.8, "draft"), (0.6, "own"), (0.3, "bad")):
        ratios = [speed_up(expected_tokens(alpha, k), 0.1 * k) for k in range(17)]
        points = [place(k, ratio) for k, ratio in enumerate(ratios)]
        steps = "".join(f"L{x:.1f} {y:.1f}" for (_, _), (x, y) in pairwise(points))
        picture.path(
            f"M{points[0][0]:.1f} {points[0][1]:.1f}{steps}", colour, "; stroke-width: 2.5"
        )
        best = max(range(17), key=ratios.__getitem__)
        x, y = points[best]
        picture.path(f"M{x - 1:.1f} {y:.1f}h2", colour, "; stroke-width: 9; stroke-linecap: round")
        x, y = points[-1]
        picture.text(x + 10, y + 5, f"alpha {alpha:g}", "", colour)


PICTURES: dict[str, tuple[str, int, Draw]] = {
    "round": ("A round: draft, one target pass, verdict, the target's own token", 428, a_round),
    "tree": ("A draft tree with its verdict and its attention mask", 404, a_tree),
    "arena": (
        "The KV arena before and after two of four drafted tokens are refused",
        376,
        the_arena,
    ),
    "lanes": ("Jobs on lanes under the schedules single, pd, pdv and ssd", 418, lanes),
    "gains": ("Speed-up by draft length for four acceptance rates", 360, gains),
}


def main() -> int:
    texts: dict[Path, str] = {}
    for name, (title, height, draw) in PICTURES.items():
        picture = Picture(title, height)
        draw(picture)
        texts[FOLDER / f"{name}.svg"] = picture.svg()
    return kept(texts, sys.argv[1:], again="scripts/pictures.py")


if __name__ == "__main__":
    sys.exit(main())
