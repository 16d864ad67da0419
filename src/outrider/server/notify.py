"""Tells systemd that a unit of `Type=notify` is ready: sd_notify's protocol, one datagram."""

from __future__ import annotations

import logging
import socket

from outrider.core.env import notify_socket

_log = logging.getLogger(__name__)


def tell_ready() -> None:
    """Nothing happens where nobody listens, as in a terminal."""
    name = notify_socket()
    if name is None:
        return
    # Names that begin with @ are no files.
    address = f"\0{name[1:]}" if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(b"READY=1", address)
    except OSError as error:
        _log.warning("NOTIFY_SOCKET could not be told that the server is ready: %s", error)
