"""A deployment on Ray Serve, as users start it, that loses a replica and is ended in its work."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from ray.serve.schema import ServeDeploySchema
from ray_serve import one_run, texts_of_the_call

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.plugins.cluster.gateway import build
from outrider.plugins.cluster.settings import DeploymentArgs, Scale, serve_config

TOKENS = 96
GIGABYTES = 8.0


def test_no_text_is_lost_with_a_replica_and_none_at_the_end() -> None:
    expected = texts_of_the_call("outrider/embedded", TOKENS)
    told = one_run("outrider/embedded", expected, TOKENS)
    assert (told["wrong"], told["broken"], told["truncated"]) == (0, 0, 0), told
    assert told["restarts"] == 1, told
    # A figure of ray_serve's; how long it takes here is up to the neighbours.
    assert told["is_back"], told
    assert told["both_served"], told
    assert told["affinity"] >= 0.9, told
    assert min(told["held"]) > 0, told
    assert told["exit_code"] == 0, told
    assert told["gigabytes"] <= GIGABYTES, told


@pytest.mark.parametrize(
    ("engine", "scale"),
    [
        (EngineConfig(), Scale()),
        (EngineConfig(tensor_parallel=2, device="cuda"), Scale(max_replicas=5, threads=3)),
    ],
)
def test_ray_takes_the_file(engine: EngineConfig, scale: Scale) -> None:
    told = serve_config(DeploymentArgs(model="outrider/embedded", engine=engine), scale)
    ServeDeploySchema.model_validate(told)
    application = build(told["applications"][0]["args"])
    assert application is not None


def test_what_cannot_be_built_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="modle"):
        build({"modle": "outrider/embedded"})
    with pytest.raises(ConfigError, match="API key"):
        build({"model": "outrider/embedded", "host": "0.0.0.0"})
