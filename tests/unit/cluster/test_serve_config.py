"""`outrider cluster config`: the file that Ray Serve reads, which needs no Ray to be written."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import yaml

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, MachineError
from outrider.plugins.cluster import settings
from outrider.plugins.cluster.settings import (
    DeploymentArgs,
    Scale,
    check_ray,
    read_args,
    serve_config,
    serve_yaml,
)

ENGINE = EngineConfig(threads=2, batch_size=6, sampler="coupled", k=3)
ARGS = DeploymentArgs(
    model="outrider/embedded",
    draft="outrider/embedded-draft",
    engine=ENGINE,
    sampling={"temperature": 0.5, "stop": ("a", "b")},
    names=("x", "y"),
    max_queued=9,
    max_replicas=3,
)


def engine_of(args: DeploymentArgs, **scale: Any) -> dict[str, Any]:
    (application,) = serve_config(args, Scale(**scale))["applications"]
    _, engine = application["deployments"]
    return engine


def test_what_is_read_is_what_was_written() -> None:
    told = yaml.safe_load(serve_yaml(serve_config(ARGS, Scale())))["applications"][0]["args"]
    assert told["engine"] == {"threads": 2, "batch_size": 6, "sampler": "coupled", "k": 3}
    read = read_args(told)
    assert read.engine == ENGINE
    assert (read.model, read.draft, read.names) == (ARGS.model, ARGS.draft, ARGS.names)
    assert read.sampling == {"temperature": 0.5, "stop": ["a", "b"]}
    assert read.most_running == 3 * 12 + 9


def test_requests_wait_at_the_gateway_behind_those_that_are_next() -> None:
    told = engine_of(ARGS)
    assert (told["max_ongoing_requests"], told["max_queued_requests"]) == (12, 9)
    assert told["num_replicas"] == 2
    assert told["request_router_config"]["request_router_class"].endswith(":PrefixRouter")


def test_ray_starts_replicas_where_requests_wait() -> None:
    told = engine_of(ARGS, replicas=1, max_replicas=3)
    assert told["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 6,
    }
    assert "num_replicas" not in told
    with pytest.raises(ConfigError, match="at most 1"):
        engine_of(ARGS, replicas=2, max_replicas=1)


def test_ranks_are_on_one_node() -> None:
    ranks = DeploymentArgs(model="m", engine=EngineConfig(tensor_parallel=4, device="cuda"))
    told = engine_of(ranks, threads=2)
    assert told["placement_group_bundles"] == [{"CPU": 8, "GPU": 4}]
    assert told["placement_group_strategy"] == "STRICT_PACK"
    assert told["ray_actor_options"] == {"num_cpus": 8, "num_gpus": 4}
    assert "placement_group_strategy" not in engine_of(ARGS)


@pytest.mark.parametrize(
    "wrong", [{}, {"model": "m", "sise": 1}, {"model": "m", "max_queued": "x"}]
)
def test_args_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="args of the application") as told:
        read_args(wrong)
    assert "cluster config" in str(told.value.hint)


@pytest.mark.parametrize("found", ["2.59.1", "2.61.0", "3.0.0"])
def test_a_release_of_ray_that_does_not_fit_is_named(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = iter([found, "2.60.3"])

    def version(name: str) -> str:
        assert name == "ray"
        return next(releases)

    monkeypatch.setattr(settings, "version", version)
    with pytest.raises(MachineError, match=f"Ray {found} does not fit"):
        check_ray()
    check_ray()


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(settings, "version", missing)
    with pytest.raises(MachineError, match="not installed") as told:
        check_ray()
    assert "'ray[" in str(told.value.hint)
