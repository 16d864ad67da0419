"""Settings of a deployment: the `args` of an application in Ray Serve's configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from msgspec import Struct

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, MachineError

# Releases whose interfaces for routers and streams this code uses: from the first on, and before
# the second.
RAY_FROM, RAY_BEFORE = (2, 60), (2, 61)
_INSTALL = "pip install 'outrider[cluster]'"


class DeploymentArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of gateway and replicas. Clients use one of `names` for the model; `sampling` has
    the defaults of requests. Each replica runs `batch_size` requests at once, and at most
    `max_queued` wait at the gateway."""

    model: str
    draft: str | None = None
    engine: EngineConfig = EngineConfig()
    sampling: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_queued: int = 64
    max_per_key: int = 256
    shared_prefixes: bool = False
    max_replicas: int = 1

    @property
    def per_replica(self) -> int:
        """Number of requests that a replica holds: those that run, and as many that run next."""
        return 2 * self.engine.most_batch

    @property
    def most_running(self) -> int:
        return self.max_replicas * self.per_replica + self.max_queued


def read_args(given: Mapping[str, Any]) -> DeploymentArgs:
    """Return `given` as DeploymentArgs. Raises ConfigError."""
    try:
        return msgspec.convert(dict(given), DeploymentArgs, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"the args of the application: {error}.", hint="`outrider cluster config` writes them"
        ) from None


def check_ray() -> None:
    """Check for Ray. Raises MachineError if it is missing, or if its release does not fit."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise MachineError("Ray is not installed.", hint=_INSTALL) from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not RAY_FROM <= numbers < RAY_BEFORE:
        wanted = ".".join(map(str, RAY_FROM))
        raise MachineError(
            f"Ray {found} does not fit: its interfaces for routers change; {wanted} is required.",
            hint=_INSTALL,
        )
