"""Two servers behind nginx, of which one is killed: what studies/gateways.py promises, once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "studies" / "run.py"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
def test_behind_nginx_no_text_is_wrong_and_none_is_cut_off(tmp_path: Path) -> None:
    # Families are given out by the servers' ports, which chance chooses, and so is what the killed
    # one was asked last: now and then one server has all of them, or nothing to be asked again.
    runs = [_run(tmp_path / "gateways.json")]
    while len(runs) < 3 and not (runs[-1]["both_served"] and runs[-1]["asked_again"]):
        runs.append(_run(tmp_path / "gateways.json"))
    for run in runs:
        assert (run["wrong"], run["failed_elsewhere"], run["truncated"]) == (0, 0, 0)
        assert (run["affinity"], run["refused"]) == (1, 0)
        assert run["was_at_lost"] >= run["broken"]
    assert runs[-1]["both_served"]
    assert runs[-1]["asked_again"] > 0


def _run(output: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "gateways", "--quick", "--output", str(output)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert output.exists(), done.stdout + done.stderr
    (found,) = json.loads(output.read_text("utf-8"))["cells"]
    (run,) = found["runs"]
    return run
