"""Readiness notification for systemd units of `Type=notify`: one datagram of sd_notify's
protocol."""

from __future__ import annotations

import logging
import socket

from outrider.core.env import notify_socket

_log = logging.getLogger(__name__)


def tell_ready() -> None:
    """Send READY=1 to systemd; do nothing without a notify socket, as in a terminal."""
    name = notify_socket()
    if name is None:
        return
    # A name that begins with @ is an abstract socket, not a file.
    address = f"\0{name[1:]}" if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(b"READY=1", address)
    except OSError as error:
        _log.warning("systemd could not be notified through NOTIFY_SOCKET: %s", error)
