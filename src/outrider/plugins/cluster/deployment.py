# pyright: basic, reportMissingImports=false
"""`outrider.plugins.cluster.deployment:build`, the import path of an application of Ray Serve."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from outrider.plugins.cluster.engine import Engine
from outrider.plugins.cluster.gateway import Gateway, door_rules
from outrider.plugins.cluster.settings import check_ray, read_args


def build(args: dict[str, Any]) -> Application:
    """Return the application: a gateway over replicas. The configuration file, which `outrider
    cluster config` writes, has the number and the resources of each. Raises OutriderError."""
    check_ray()
    door_rules(read_args(args))
    engines = serve.deployment(Engine, name="Engine").bind(args)
    return serve.deployment(serve.ingress()(Gateway), name="Gateway").bind(args, engines)
