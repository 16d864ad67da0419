"""What systemd is told, and that nobody need listen. tests/server/test_served.py has a server."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from secrets import token_hex

import pytest

from outrider.server.run import tell_ready


@pytest.mark.parametrize("is_file", [True, False], ids=["a file", "a name"])
def test_one_datagram_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_file: bool
) -> None:
    name = str(tmp_path / "notify") if is_file else f"@outrider-{token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(name if is_file else f"\0{name[1:]}")
        heard.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        tell_ready()
        assert heard.recv(99) == b"READY=1"


def test_a_server_runs_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with caplog.at_level(logging.WARNING):
        tell_ready()
        assert not caplog.text
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
        tell_ready()
    assert "could not be notified" in caplog.text
