"""The address of a server. Its port is reserved before anything slow is loaded."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Host and port to listen at. Port 0 means any free port. With a certificate, TLS is used."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None
    health_port: int = 0
    """A second port for monitoring; 0 means none."""

    @property
    def health(self) -> Address | None:
        return replace(self, port=self.health_port, health_port=0) if self.health_port else None

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        scheme = "https" if self.certificate else "http"
        # Nothing is bound here: a server that listens everywhere also answers at the loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # nosec B104
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{self.port}"


def reserved(address: Address) -> tuple[Address, socket.socket]:
    """Return the address with its actual port, and a socket that reserves the port while the
    server starts. Raises ConfigError if another program listens there."""
    # First bound without port sharing: two servers that share a port would not notice each other.
    held = _bound(address, shared=False)
    address = replace(address, port=held.getsockname()[1])
    held.close()
    return address, _bound(address, shared=True)


def _bound(address: Address, *, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((address.host, address.port))
    except OSError as error:
        held.close()
        raise _not_bound(address, error) from None
    return held


def _not_bound(address: Address, error: OSError) -> ConfigError:
    where = f"{address.host}:{address.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{where}: another program listens there.",
            hint="--port with another number; --port 0 takes a free one",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"{where}: only root may listen there.", hint="--port 8000")
    return ConfigError(f"{where}: {error.strerror or error}.", hint="--host 127.0.0.1")
