"""Coloured text: nothing lost, nothing obeyed."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.style import Style

from doubles.terminal import Terminal
from outrider.cli.output import Painter, WordWrap


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


def test_only_a_terminal_that_can_erase_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ["some words ", "that are wider"]
    for kind, ends in (("xterm", 1), ("dumb", 0)):
        monkeypatch.setenv("TERM", kind)
        monkeypatch.setenv("COLUMNS", "20")
        out = Terminal()
        Painter("never", out, wraps=True).pieces(text, ["plain", "plain"])
        assert out.getvalue().count("\n") == ends
    assert _screen(out.getvalue())[0] == "".join(text)
