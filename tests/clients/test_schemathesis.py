"""Schemathesis: bodies made from the server's own OpenAPI document, and the answers to them.

Its coverage phase tries every field's boundaries; its fuzzing phase makes `--cases` more bodies of
each operation, the same ones in every run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("schemathesis")

TESTS = str(Path(__file__).parents[1])
SEED = 22
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "allow_header_conformance",
    "streams_are_whole",
)


def test_what_is_answered_is_as_documented(started, pytestconfig, tmp_path):
    # Long answers show nothing more.
    server = started(OUTRIDER_MAX_TIME="0.1", OUTRIDER_CONTEXT="256")
    words = ["run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
    words += ["--phases", "coverage,fuzzing", "--seed", str(SEED), "--request-timeout", "60"]
    words += ["--max-examples", str(pytestconfig.getoption("--cases")), "--continue-on-failure"]
    words += ["--warnings", "off", "--suppress-health-check", "all"]
    # It would leave long streams before their end, which is looked at.
    (tmp_path / "schemathesis.toml").write_text("max-stream-events = 100000\n", "utf-8")
    program = Path(sys.executable).with_name("st")
    hooks = {"SCHEMATHESIS_HOOKS": "clients.schemathesis_hooks", "PYTHONPATH": TESTS}
    done = subprocess.run(
        [str(program), *words],
        cwd=tmp_path,
        env=os.environ | hooks | {"NO_COLOR": "1"},  # noqa: TID251 - a child's
        capture_output=True,
        text=True,
        timeout=3_600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)
    with urllib.request.urlopen(f"{server.url}/ready", timeout=240) as ready:
        assert ready.status == 200
