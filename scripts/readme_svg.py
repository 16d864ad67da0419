"""The frame of README's pictures: an SVG that follows the reader's light or dark setting."""

from __future__ import annotations

from xml.sax.saxutils import escape

LIGHT = {
    "page": "#ffffff",
    "line": "#d0d7de",
    "ink": "#1f2328",
    "muted": "#59636e",
    "accepted": "#1a7f37",
    "recovered": "#9a6700",
    "bonus": "#0969da",
    "ours": "#0969da",
    "theirs": "#818b98",
}
DARK = {
    "page": "#0d1117",
    "line": "#30363d",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "accepted": "#3fb950",
    "recovered": "#d29922",
    "bonus": "#58a6ff",
    "ours": "#388bfd",
    "theirs": "#7d8590",
}
# Narrow enough for its words to be read on a phone.
WIDTH = 560


def svg(height: int, title: str, style: str, parts: list[str]) -> str:
    """A picture of `parts` on a panel of its own, which a page of any colour may surround."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>:root{{{_variables(LIGHT)}}}",
            f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}",
            "text{font:13px system-ui,sans-serif;fill:var(--ink)}.m{fill:var(--muted)}",
            f"{style}</style>",
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
            'style="fill:var(--page);stroke:var(--line)"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    """`kind` is a class of the style, `anchor` the end of the words that x names."""
    told = f' class="{kind}"' if kind else ""
    told += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:g}" y="{y:g}"{told}>{escape(words)}</text>'


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in colours.items())
