"""`outrider cluster config`: the configuration of a server on Ray, for Ray Serve."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from outrider.cli.call import Call
from outrider.cli.output import say
from outrider.cli.serve import sampling_decided
from outrider.cli.session import without_draft
from outrider.cli.verb_options import ClusterConfigOptions
from outrider.core.env import api_key
from outrider.core.errors import MachineError, OutriderError, with_hint
from outrider.core.plugins import install_command


def cluster_config(call: Call[ClusterConfigOptions]) -> int:
    """Print the configuration file of a deployment for Ray Serve."""
    if find_spec("msgspec") is None or find_spec("starlette") is None:
        raise MachineError("the server is not installed.", hint=install_command("cluster"))
    from outrider.plugins.cluster.settings import (
        DeploymentArgs,
        Scale,
        check_ray,
        serve_config,
        serve_yaml,
    )
    from outrider.server.access import DoorRules, is_loopback

    options, program, engine = call.options, call.resolved.program(), call.resolved.engine()
    engine = without_draft(engine) if program.draft == "none" else engine
    threads = engine.threads or max(1, (os.cpu_count() or 1) // options.replicas)
    engine = replace(engine, threads=threads)
    most = max(options.replicas, options.max_replicas)
    args = DeploymentArgs(
        model=program.target,
        draft=None if program.draft in ("auto", "none") else program.draft,
        engine=engine,
        sampling=sampling_decided(call.resolved),
        names=options.served_model_name,
        host=options.host,
        allowed_hosts=options.allowed_host,
        allowed_origins=options.allowed_origin,
        api_key_file=options.api_key_file,
        max_queued=options.max_queued or 4 * engine.most_batch * most,
        max_per_key=options.max_per_key,
        shared_prefixes=options.shared_prefixes,
        max_replicas=most,
    )
    if options.api_key_file is None:
        DoorRules(keys=tuple(filter(None, [api_key()])), host=options.host)
    scale = Scale(
        replicas=options.replicas,
        max_replicas=options.max_replicas,
        gateways=options.gateways,
        threads=threads,
        port=options.port,
        drain_seconds=options.drain_seconds,
    )
    print(serve_yaml(serve_config(args, scale)), end="")
    if is_loopback(options.host):
        # Ray reports a port in use only by tracebacks of its proxies, and its own absence not at
        # all.
        for check in (check_ray, partial(_check_port, options)):
            try:
                check()
            except OutriderError as error:
                say(f"note: {with_hint(error)}")
    return 0


def _check_port(options: ClusterConfigOptions) -> None:
    from outrider.server.access import Address, reserved

    reserved(Address(host=options.host, port=options.port))[1].close()
