"""Where a server listens, known and kept before anything slow is loaded."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Port 0 is one that is free. TLS if there is a certificate."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None
    health_port: int = 0
    """A second port, for those who watch the server; 0 is none."""

    @property
    def health(self) -> Address | None:
        return replace(self, port=self.health_port, health_port=0) if self.health_port else None

    @property
    def url(self) -> str:
        """How a client on this machine reaches it."""
        scheme = "https" if self.certificate else "http"
        # Nothing is bound here: who listens everywhere can be asked at the loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # nosec B104
        name = f"[{host}]" if ":" in host else host
        return f"{scheme}://{name}:{self.port}"


def reserved(address: Address) -> tuple[Address, socket.socket]:
    """The address with its port known, and a socket that keeps it for us while the server is made.
    Raises ConfigError where somebody else listens there."""
    # Alone first: servers that share ports would not notice each other.
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
