"""Figures inside a page: one drawing for light and dark, without clashes between figures.

A figure is drawn once for each theme. Both drawings have the same shapes and differ in colours
only, so one of them is kept, and each colour that differs becomes a CSS variable with two values;
where they differ in more (a map of colours is a bitmap), both are kept and one is shown. Names are
made anew, since those of two drawings could meet in one page, and the outlines of letters, which
all figures share, are stated once. Coordinates keep two decimals of a point, which nobody can see.

The same figure gives the same text: no date, no random name, no installed font enters a drawing
(bench/figure_style.py).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from io import StringIO
from typing import Any

from outrider.bench.figure_style import DARK, LIGHT, Theme, themed
from outrider.bench.report.values import Figure
from outrider.core.errors import ContractError

_COLOR = re.compile(r"(#[0-9a-f]{6})\b")
_NOISE = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
_OPENING = re.compile(r"<svg [^>]*?viewBox=\"([\d. -]+)\"[^>]*>", re.DOTALL)
_GLYPH = re.compile(r"<(?:path|use) id=\"(DejaVu[\w-]+)\"[^>]*/>", re.DOTALL)
_NAME = re.compile(r"\bid=\"([^\"]+)\"")
_USED = re.compile(r"((?:href|clip-path)=\"(?:url\()?#)([^\")]+)")
_DECIMALS = re.compile(r"scale\([^)]*\)|-?\d+\.\d{3,}")
# matplotlib does not write black, so text that is black on one theme has no colour there.
_BLACK_TEXT = re.compile(r'<g (?=transform="[^"]*scale\()')
_EMPTY_DEFS = re.compile(r"<defs>\s*</defs>")
_SPACE = re.compile(r"\s*\n\s*")


@dataclass(slots=True)
class Canvas:
    """Everything drawn so far for one page: variables by (light, dark) colour, and letters."""

    variables: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    glyphs: dict[str, str] = field(default_factory=dict[str, str])
    num_figures: int = 0

    def embed(self, figure: Figure) -> str:
        """The figure as SVG elements of an HTML page."""
        self.num_figures += 1
        light, dark = (
            self._tidy(drawn(figure, theme), f"p{self.num_figures}{theme.suffix}x")
            for theme in (LIGHT, DARK)
        )
        label = escape(figure.title, quote=True)
        merged = self._merged(light.body, dark.body)
        if merged is not None:
            return _element(light.box, merged, label, "")
        return _element(light.box, light.body, label, ' class="on-light"') + _element(
            dark.box, dark.body, label, ' class="on-dark"'
        )

    def styles(self, theme: Theme) -> str:
        """The variables' values on a page of this theme."""
        column = 0 if theme is LIGHT else 1
        return " ".join(f"{name}: {pair[column]};" for pair, name in self.variables.items())

    def letters(self) -> str:
        """The outlines that figures refer to, by name."""
        return "".join(self.glyphs[name] for name in sorted(self.glyphs))

    def _tidy(self, text: str, prefix: str) -> _Drawing:
        text = _STYLE.sub("", _NOISE.sub("", text))
        for match in _GLYPH.finditer(text):
            self.glyphs.setdefault(match[1], _SPACE.sub(" ", match[0]))
        text = _EMPTY_DEFS.sub("", _GLYPH.sub("", text))
        opening = _OPENING.search(text)
        if opening is None:
            raise ContractError("the drawing has no beginning")
        body = text[opening.end() : text.rindex("</svg>")]
        body = _BLACK_TEXT.sub('<g style="fill: #000000" ', _renamed(body, prefix))
        body = _DECIMALS.sub(_rounded, body).replace("xlink:href", "href").replace("<g >", "<g>")
        return _Drawing(opening[1], _SPACE.sub("\n", body).strip())

    def _merged(self, light: str, dark: str) -> str | None:
        """One drawing with variables for colours, or None if the two differ in more than that."""
        ours, theirs = _COLOR.split(light), _COLOR.split(dark.replace("-darkx", "x"))
        if len(ours) != len(theirs) or ours[::2] != theirs[::2]:
            return None
        return "".join(self._painted(ours, theirs))

    def _painted(self, ours: list[str], theirs: list[str]) -> Iterator[str]:
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if number % 2 == 0 or a == b:
                yield a
            else:
                name = self.variables.setdefault((a, b), f"--c{len(self.variables)}")
                yield f"var({name})"


@dataclass(frozen=True, slots=True)
class _Drawing:
    box: str
    body: str


def smaller(svg: bytes) -> bytes:
    """A drawing of ours with fewer decimals, for a page that shows it as an image; anything else as
    it is."""
    try:
        text = svg.decode("utf-8")
    except UnicodeDecodeError:
        return svg
    return _SPACE.sub("\n", _DECIMALS.sub(_rounded, _NOISE.sub("", text))).strip().encode()


def drawn(figure: Figure, theme: Theme) -> str:
    """The figure as matplotlib writes it. Names in it are text, even if they look like formulas; a
    letter that the font lacks is a box."""
    matplotlib: Any = import_module("matplotlib")
    stream = StringIO()
    with (
        themed(theme),
        matplotlib.rc_context({"text.parse_math": False}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph")
        drawing = figure.draw(theme)
        drawing.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _element(box: str, body: str, label: str, shown: str) -> str:
    return f'<svg viewBox="{box}" role="img" aria-label="{label}"{shown}>{body}</svg>'


def _renamed(body: str, prefix: str) -> str:
    """With a name of our own for each name that something refers to; the others are dropped."""
    used = {match[2] for match in _USED.finditer(body)}
    names: dict[str, str] = {}
    for match in _NAME.finditer(body):
        if match[1] in used:
            names.setdefault(match[1], f"{prefix}{len(names)}")
    body = _NAME.sub(lambda m: f'id="{names[m[1]]}"' if m[1] in names else "", body)
    return _USED.sub(lambda m: m[1] + names.get(m[2], m[2]), body)


def _rounded(match: re.Match[str]) -> str:
    """Sizes of letters stay as they are: they are small numbers."""
    text = match[0]
    if text.startswith("scale"):
        return text
    return f"{float(text):.2f}".rstrip("0").rstrip(".")
