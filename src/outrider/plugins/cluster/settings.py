"""What a deployment is told: the `args` of an application in Ray Serve's configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from msgspec import Struct

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, MachineError

# The router's and the streams' interfaces are those of these releases, from one to before another.
RAY_FROM, RAY_BEFORE = (2, 60), (2, 61)
_INSTALL = "pip install 'outrider[cluster]'"


class DeploymentArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`names` are what clients call the model, `sampling` what a request leaves out. Requests wait
    at the gateway, `max_queued` at most, while each replica runs `batch_size` of them at once."""

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
        """Requests that a replica holds: those that run, and as many that are next."""
        return 2 * self.engine.most_batch

    @property
    def most_running(self) -> int:
        return self.max_replicas * self.per_replica + self.max_queued


def read_args(given: Mapping[str, Any]) -> DeploymentArgs:
    """Raises ConfigError."""
    try:
        return msgspec.convert(dict(given), DeploymentArgs, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"the args of the application: {error}.", hint="`outrider cluster config` writes them"
        ) from None


def check_ray() -> None:
    """Raises MachineError where Ray is not here, or is of a release that does not fit."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise MachineError("Ray is not installed.", hint=_INSTALL) from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not RAY_FROM <= numbers < RAY_BEFORE:
        wanted = ".".join(map(str, RAY_FROM))
        raise MachineError(
            f"Ray {found} does not fit: its interfaces for routers change; {wanted} is wanted.",
            hint=_INSTALL,
        )
