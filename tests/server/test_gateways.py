"""Two servers behind nginx, of which one is killed: what benchmarks/gateways.py promises, once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "run.py"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
def test_behind_nginx_no_text_is_wrong_and_none_is_cut_off(tmp_path: Path) -> None:
    output = tmp_path / "gateways.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "gateways", "--quick", "--output", str(output)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(output.read_text("utf-8"))["cells"]
    (run,) = found["runs"]
    assert (found["wrong"], found["failed_elsewhere"], found["truncated"]) == (0, 0, 0)
    # Both had requests, each family one of them.
    assert run["both_served"]
    assert found["affinity"] == 1
    # What was not cut off in the midst was asked again, at the other one.
    assert run["was_at_lost"] >= run["broken"]
    assert run["asked_again"] > 0
