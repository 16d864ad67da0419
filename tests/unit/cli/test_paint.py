"""Coloured text: nothing lost, nothing obeyed."""

from __future__ import annotations

from io import StringIO

import pytest

from doubles.terminal import Terminal
from outrider.cli.paint import Painter


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
