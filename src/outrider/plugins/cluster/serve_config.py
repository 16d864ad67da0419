"""Ray Serve's configuration file for a model: what `serve run` and `serve deploy` read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import yaml

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.fields import default_of
from outrider.plugins.cluster.settings import DeploymentArgs
from outrider.server.door import is_loopback

_APP = "outrider"
# Reading weights may take minutes, and a job of an engine tens of seconds.
_HEALTH_SECONDS = 60.0
_HEAD = """\
# For Ray Serve: `serve run FILE` here, `serve deploy FILE` on a cluster that runs, with
# RAY_AUTH_MODE=token for both. Written by `outrider cluster config`; docs/cluster.md explains it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many there are of each. Between `replicas` and `max_replicas` Ray decides, by how many
    requests each has."""

    replicas: int = 2
    max_replicas: int = 0
    gateways: int = 1
    threads: int = 1
    port: int = 8000
    drain_seconds: float = 30.0


def serve_config(args: DeploymentArgs, scale: Scale) -> dict[str, Any]:
    """Raises ConfigError."""
    if scale.max_replicas and scale.max_replicas < scale.replicas:
        raise ConfigError(
            f"at most {scale.max_replicas} replicas, and at least {scale.replicas}.",
            hint="--max-replicas N, not less than --replicas",
        )
    gateway = {
        "name": "Gateway",
        "num_replicas": scale.gateways,
        # Refusals are ours, in the words of the API that was asked.
        "max_ongoing_requests": 2 * args.most_running + 100,
        "graceful_shutdown_timeout_s": scale.drain_seconds,
        # It waits for engines and for clients.
        "ray_actor_options": {"num_cpus": 0},
    }
    application = {
        "name": _APP,
        "route_prefix": "/",
        "import_path": "outrider.plugins.cluster.deployment:build",
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
    told: dict[str, Any] = {
        "name": "Engine",
        "max_ongoing_requests": args.per_replica,
        "max_queued_requests": args.max_queued,
        "graceful_shutdown_timeout_s": scale.drain_seconds,
        # Ray notices by this that a replica has ended.
        "health_check_period_s": 2.0,
        "health_check_timeout_s": _HEALTH_SECONDS,
        "request_router_config": {
            "request_router_class": "outrider.plugins.cluster.prefix_router:PrefixRouter"
        },
    }
    if scale.max_replicas > scale.replicas:
        told["autoscaling_config"] = {
            "min_replicas": scale.replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": batch_size,
        }
    else:
        told["num_replicas"] = scale.replicas
    ranks = args.engine.tensor_parallel
    resources: dict[str, float] = {"num_cpus": scale.threads * ranks}
    if args.engine.device.startswith("cuda"):
        resources["num_gpus"] = ranks
    told["ray_actor_options"] = resources
    if ranks > 1:
        # Ranks are processes of the actor's own, so all they need is in one bundle, on one node.
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        told["placement_group_bundles"] = [{names[key]: n for key, n in resources.items()}]
        told["placement_group_strategy"] = "STRICT_PACK"
    return told


def _plain(args: DeploymentArgs) -> dict[str, Any]:
    """What differs from its default, in the types that YAML has."""
    told = msgspec.to_builtins(args)
    engine = {
        item.name: told["engine"][item.name]
        for item in fields(EngineConfig)
        if getattr(args.engine, item.name) != default_of(item)
    }
    kept = {
        item.name: told[item.name]
        for item in msgspec.structs.fields(DeploymentArgs)
        if item.name != "engine" and getattr(args, item.name) != item.default
    }
    return kept | {"engine": engine}
