"""Ray Serve's configuration file for a model, which `serve run` and `serve deploy` read; and the
settings of a deployment, which are the `args` of the application in that file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, MachineError
from outrider.core.fields import default_of
from outrider.core.plugins import install_command
from outrider.server.access import is_loopback

# Releases whose interfaces for routers and streams this code uses: from the first on, and before
# the second.
RAY_FROM, RAY_BEFORE = (2, 60), (2, 61)
_APP = "outrider"
# Reading weights may take minutes, and a job of an engine tens of seconds.
_HEALTH_SECONDS = 60.0
_HEAD = """\
# For Ray Serve: `serve run FILE` here, `serve deploy FILE` on a running cluster, both with
# RAY_AUTH_MODE=token. Written by `outrider cluster config`; docs/cluster.md explains it.
"""


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
        raise MachineError("Ray is not installed.", hint=install_command("cluster")) from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if not RAY_FROM <= numbers < RAY_BEFORE:
        wanted = ".".join(map(str, RAY_FROM))
        raise MachineError(
            f"Ray {found} does not fit: its interfaces for routers change; {wanted} is required.",
            hint=install_command("cluster"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Numbers of replicas, gateways and threads. If `max_replicas` is larger than `replicas`, Ray
    scales between them by the number of requests per replica."""

    replicas: int = 2
    max_replicas: int = 0
    gateways: int = 1
    threads: int = 1
    port: int = 8000
    drain_seconds: float = 30.0


def serve_config(args: DeploymentArgs, scale: Scale) -> dict[str, Any]:
    """Return the configuration as plain values. Raises ConfigError."""
    if scale.max_replicas and scale.max_replicas < scale.replicas:
        raise ConfigError(
            f"at most {scale.max_replicas} replicas, and at least {scale.replicas}.",
            hint="--max-replicas N, not less than --replicas",
        )
    gateway = {
        "name": "Gateway",
        "num_replicas": scale.gateways,
        # Above Ray's limit our server refuses first, with errors in the format of each API.
        "max_ongoing_requests": 2 * args.most_running + 100,
        "graceful_shutdown_timeout_s": scale.drain_seconds,
        # A gateway mostly waits for engines and clients, so it reserves no CPU.
        "ray_actor_options": {"num_cpus": 0},
    }
    application = {
        "name": _APP,
        "route_prefix": "/",
        "import_path": "outrider.plugins.cluster.gateway:build",
        "args": _plain(args),
        "deployments": [gateway, _engine(args, scale)],
    }
    return {
        "proxy_location": "HeadOnly" if is_loopback(args.host) else "EveryNode",
        "http_options": {"host": args.host, "port": scale.port},
        "applications": [application],
    }


def serve_yaml(config: Mapping[str, Any]) -> str:
    return _HEAD + yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)


def _engine(args: DeploymentArgs, scale: Scale) -> dict[str, Any]:
    batch_size = args.engine.most_batch
    deployment: dict[str, Any] = {
        "name": "Engine",
        "max_ongoing_requests": args.per_replica,
        "max_queued_requests": args.max_queued,
        "graceful_shutdown_timeout_s": scale.drain_seconds,
        # Ray detects a dead replica by this check.
        "health_check_period_s": 2.0,
        "health_check_timeout_s": _HEALTH_SECONDS,
        "request_router_config": {
            "request_router_class": "outrider.plugins.cluster.prefix_router:PrefixRouter"
        },
    }
    if scale.max_replicas > scale.replicas:
        deployment["autoscaling_config"] = {
            "min_replicas": scale.replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": batch_size,
        }
    else:
        deployment["num_replicas"] = scale.replicas
    ranks = args.engine.tensor_parallel
    resources: dict[str, float] = {"num_cpus": scale.threads * ranks}
    if args.engine.device.startswith("cuda"):
        resources["num_gpus"] = ranks
    deployment["ray_actor_options"] = resources
    if ranks > 1:
        # Ranks are child processes of the actor, so one bundle on one node has all their resources.
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        deployment["placement_group_bundles"] = [{names[key]: n for key, n in resources.items()}]
        deployment["placement_group_strategy"] = "STRICT_PACK"
    return deployment


def _plain(args: DeploymentArgs) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, in the types of YAML."""
    values = msgspec.to_builtins(args)
    engine = {
        item.name: values["engine"][item.name]
        for item in fields(EngineConfig)
        if getattr(args.engine, item.name) != default_of(item)
    }
    changed = {
        item.name: values[item.name]
        for item in msgspec.structs.fields(DeploymentArgs)
        if item.name != "engine" and getattr(args, item.name) != item.default
    }
    return changed | {"engine": engine}
