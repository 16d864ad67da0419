"""Coloured text: nothing lost, nothing obeyed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import StringIO

import pytest
from rich.style import Style

from doubles.terminal import Terminal
from outrider.cli.output import Markdown, Painter, WordWrap


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def test_a_pipe_gets_the_text_byte_for_byte() -> None:
    out = StringIO()
    painter = Painter("auto", out)
    painter.pieces(["a\t\x1b[31m", "b\r\n"], ["accepted", "bonus"])
    assert out.getvalue() == "a\t\x1b[31mb\r\n"
    assert not painter.colored


def test_a_terminal_gets_colours_and_no_escapes_of_the_model() -> None:
    out = Terminal()
    painter = Painter("auto", out)
    painter.pieces(["a", "\tb", "\x1b]0;title\x07"], ["accepted", "accepted", "recovered"])
    assert painter.colored
    assert out.getvalue().startswith("\x1b[32ma\tb\x1b[0m")
    assert "\x1b]" not in out.getvalue()
    assert "\ufffd]0;title\ufffd" in out.getvalue()


def test_no_color_is_respected_unless_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Painter("auto", Terminal()).colored
    assert Painter("always", Terminal()).colored
    assert not Painter("never", Terminal()).colored


def test_the_legend_names_only_what_occurred() -> None:
    out = Terminal()
    Painter("always", out).close_text({"plain", "bonus"})
    assert "bonus" in out.getvalue()
    assert "plain" in out.getvalue()
    assert "accepted" not in out.getvalue()


def _screen(written: str) -> list[str]:
    """The lines of a terminal that knows ends of lines, moves to the left and erasure."""
    lines, column = [""], 0
    for moved, letter in re.findall(r"\x1b\[(\d+D|K)|(.|\n)", written):
        if letter == "\n":
            lines, column = [*lines, ""], 0
        elif letter:
            lines[-1], column = lines[-1][:column] + letter, column + 1
        elif moved == "K":
            lines[-1] = lines[-1][:column]
        else:
            column -= int(moved[:-1])
    return lines


@pytest.mark.parametrize("width", [8, 13, 40])
@pytest.mark.parametrize("step", [1, 3, 7])
def test_lines_break_between_words(width: int, step: int) -> None:
    text = (
        "The medieval values of a townsman,\n  though often  praised, were few. "
        + "x" * 50
        + " end"
    )
    wrap, styles = WordWrap(), [Style(), Style(bold=True)]
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    runs = [run for i, piece in enumerate(pieces) for run in wrap.runs(piece, styles[i % 2], width)]
    lines = _screen("".join(letters for letters, _ in runs))
    assert max(map(len, lines)) < width
    words = text.split()
    assert "".join("".join(lines).split()) == "".join(words)
    whole = [word for word in words if len(word) < width]
    assert [word for line in lines for word in line.split() if word in whole] == whole


def test_scripts_without_blanks_break_anywhere() -> None:
    runs = WordWrap().runs("春眠不覺曉處處聞啼鳥", Style(), 9)
    assert "".join(letters for letters, _ in runs) == "春眠不覺\n曉處處聞\n啼鳥"


MARKDOWN = (
    "# Title **x**\n",
    "plain **bold words**, 2**10**3 and *it*, `a**b`\n\n- one\n  * two **b**\n",
    "**Start** is bold\n***both***\n```python\n",
    "def f(**k):\n    return `x`\n\n  - no\n  ```\n",
    "after **open\nnext ** not ** ok\n#no heading\n-dash\n5 * 3 **",
)
SHOWN = (
    "<BU>Title x\n",
    "<>plain <B>bold words<>, 2**10**3 and *it*, `<I>a**b`<>\n\n• one\n  • two <B>b<>\n",
    "<B>Start<> is bold\n***both***\n<D>─── python\n",
    "<>def f(**k):\n    return `x`\n\n  - no\n<D>───\n",
    "<>after <B>open\n<>next ** not ** ok\n#no heading\n-dash\n5 * 3 **",
)


def _styles(runs: Iterable[tuple[str, Style]]) -> str:
    """Runs with a mark where the style changes."""
    shown, before = "", ""
    for text, style in runs:
        marks = {"B": style.bold, "U": style.underline, "I": style.italic, "D": style.dim}
        now = "".join(mark for mark, is_on in marks.items() if is_on)
        shown += text if now == before else f"<{now}>{text}"
        before = now
    return shown


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_markdown_is_styles_whatever_the_pieces(step: int) -> None:
    markdown, text = Markdown(), "".join(MARKDOWN)
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    runs = [run for piece in pieces for run in markdown.runs(piece, Style())]
    assert _styles([*runs, *markdown.end()]) == "".join(SHOWN)


def test_a_letter_that_decides_nothing_is_shown_at_once() -> None:
    markdown = Markdown()
    for letter in "one * two":
        runs = [*markdown.runs(letter, Style())]
        assert bool(runs) == (letter != "*")


def test_only_a_chat_on_a_coloured_terminal_reads_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for color, chats, raw in (
        ("always", True, False),
        ("never", True, True),
        ("always", False, True),
    ):
        out = Terminal()
        painter = Painter(color, out, chats=chats)
        painter.pieces(["**a", "** b *"], ["plain", "plain"])
        painter.line("end")
        assert ("**a** b *" in out.getvalue()) == raw, (color, chats)
        assert re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).endswith(" b *end\n")
    pipe = StringIO()
    Painter("always", pipe, chats=True).pieces(["**a", "**"], ["plain", "plain"])
    assert pipe.getvalue() == "**a**"


def test_only_a_terminal_that_can_erase_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ["some words ", "that are wider"]
    for kind, ends in (("xterm", 1), ("dumb", 0)):
        monkeypatch.setenv("TERM", kind)
        monkeypatch.setenv("COLUMNS", "20")
        out = Terminal()
        Painter("never", out, chats=True).pieces(text, ["plain", "plain"])
        assert out.getvalue().count("\n") == ends
    assert _screen(out.getvalue())[0] == "".join(text)
