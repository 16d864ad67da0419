"""Text coloured by where each token came from.

Colours are told apart by their lightness and by underline or bold as well, so that the legend
serves readers who see few colours. Without a terminal, text passes unchanged, byte for byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TextIO

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

if TYPE_CHECKING:
    from outrider.core.draft import Origin

STYLES: Mapping[Origin, Style] = {
    "accepted": Style.parse("green"),
    "recovered": Style.parse("bold yellow underline"),
    "bonus": Style.parse("bold cyan"),
    "plain": Style.null(),
}
LABELS: Mapping[Origin, str] = {
    "accepted": "accepted draft",
    "recovered": "recovered by the target after a refusal",
    "bonus": "bonus after a whole draft",
    "plain": "plain",
}
QUIET = Style.parse("dim")

# A model may write escape sequences; a terminal must not obey them.
_VISIBLE = {
    code: "\ufffd" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"
}


class Painter:
    """Writes pieces of text to `out`. `color` is auto, always or never."""

    def __init__(self, color: str, out: TextIO) -> None:
        console = Console(file=out)
        self._out = out
        self._is_terminal = console.is_terminal
        self._system: ColorSystem | None = None
        if color == "always":
            self._system = ColorSystem.STANDARD
        elif color == "auto" and not console.no_color and console.color_system:
            self._system = COLOR_SYSTEMS[console.color_system]

    @property
    def colored(self) -> bool:
        return self._system is not None

    def pieces(self, pieces: Sequence[str], origins: Sequence[Origin]) -> None:
        """Write the text of some tokens at once, each in its origin's style."""
        pairs = zip(origins, pieces, strict=True)
        for origin, run in groupby(pairs, key=itemgetter(0)):
            self.write("".join(piece for _, piece in run), STYLES[origin])
        self._out.flush()

    def write(self, text: str, style: Style = QUIET) -> None:
        if self._is_terminal:
            text = text.translate(_VISIBLE)
        self._out.write(style.render(text, color_system=self._system) if self.colored else text)

    def line(self, text: str) -> None:
        """A line of ours, beside the model's text."""
        self.write(text)
        self._out.write("\n")
        self._out.flush()

    def close_text(self, seen: Collection[Origin]) -> None:
        """End the text's last line and, in colours, name the styles that occurred."""
        self._out.write("\n")
        if self.colored and seen:
            self._out.write("\n")
            shown: list[Origin] = [origin for origin in LABELS if origin in seen]
            for index, origin in enumerate(shown):
                self.write(" · " if index else "")
                self.write(LABELS[origin], STYLES[origin])
            self._out.write("\n")
        self._out.flush()
