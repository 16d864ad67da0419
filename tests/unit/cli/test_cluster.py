"""`outrider cluster config` and `outrider batch --ray`, as the command line has them."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from doubles.command_line import Command


def test_a_stranger_needs_a_key(outrider: Command) -> None:
    told = outrider("cluster", "config", "outrider/embedded", "--host", "0.0.0.0")
    assert told.code == 2
    assert "API key" in told.err


def test_the_command_writes_it(outrider: Command) -> None:
    told = outrider("cluster", "config", "outrider/embedded", "--replicas", "3", "--k", "2")
    assert told.code == 0
    file = yaml.safe_load(told.out)
    assert file["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert file["applications"][0]["deployments"][1]["num_replicas"] == 3
    assert file["applications"][0]["args"]["engine"]["k"] == 2


def test_a_port_in_use_here_is_noted(outrider: Command) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        told = outrider("cluster", "config", "outrider/embedded", "--port", port)
    assert told.code == 0
    assert f"127.0.0.1:{port}: another program listens there" in told.err


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_is_said_what_to_install(outrider: Command, tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "x"}\n', "utf-8")
    told = outrider("batch", str(lines), str(tmp_path / "out.jsonl"), "--ray")
    assert told.code == 3
    assert "'ray[" in told.err
    noted = outrider("cluster", "config", "outrider/embedded")
    assert noted.code == 0
    assert "'ray[" in noted.err
