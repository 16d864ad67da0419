"""The GPU script on a machine without one: its sections run, fail alone and are written down."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check"


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {
        "OUTRIDER_PYTHON": sys.executable,
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@pytest.mark.slow
def test_every_section_runs_or_says_why_not(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    done = run("--device", "cpu", "--quick", "--output", str(output), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    states = {section["name"]: section["state"] for section in found["sections"]}
    skipped = {"syncs", "memory", "overlap", "partition"}
    if find_spec("triton") is None:
        skipped.add("operators")
    assert {name for name, state in states.items() if state == "skipped"} == skipped
    assert {state for name, state in states.items() if name not in skipped} == {"passed"}
    assert all(s["error"] for s in found["sections"] if s["state"] == "skipped")
    assert json.loads(done.stdout.splitlines()[-1])["passed"]


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    kept: dict[str, object] = {
        "name": "environment",
        "state": "passed",
        "seconds": 1.5,
        "record": {},
        "error": "",
    }
    output.write_text(json.dumps({"sections": [kept]}), encoding="utf-8")
    words = ("--device", "cpu", "--quick", "--output", str(output), "--resume", "--only")
    assert run(*words, "environment", "bandwidth").returncode == 0
    sections = json.loads(output.read_text(encoding="utf-8"))["sections"]
    assert sections[0] == kept
    assert [section["name"] for section in sections] == ["environment", "bandwidth"]


@pytest.fixture(name="main")
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("gpu_check.main")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("words", "code"), [((), 3), (("--device", "cpu"), 2)])
def test_it_asks_for_a_device(
    main: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == code
    assert "--quick" in capsys.readouterr().err


def section(
    main: Any, monkeypatch: pytest.MonkeyPatch, work: Callable[[dict[str, Any]], None]
) -> Any:
    """What becomes of a section that does `work`."""

    def run_planted(setting: object, record: dict[str, Any]) -> None:
        del setting
        work(record)

    module = ModuleType("gpu_check.planted")
    vars(module)["planted"] = run_planted
    monkeypatch.setitem(sys.modules, "gpu_check.planted", module)
    setting = main.Setting(torch.device("cpu"), True)
    return main.run_section("planted", setting, "planted", 0.3)


def test_a_section_fails_alone_and_keeps_what_it_found(
    main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(record: dict[str, Any]) -> None:
        record["found"] = 1
        raise ValueError("planted")

    failed = section(main, monkeypatch, work)
    assert failed.state == "failed"
    assert failed.record == {"found": 1}
    assert "ValueError: planted" in failed.error


def test_a_section_ends_with_its_budget(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(record: dict[str, Any]) -> None:
        del record
        time.sleep(20)

    started = time.perf_counter()
    failed = section(main, monkeypatch, work)
    assert time.perf_counter() - started < 10
    assert failed.state == "failed"
    assert "budget" in failed.error


def test_a_failed_check_fails_its_section(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(record: dict[str, Any]) -> None:
        record["checks"] = [{"name": "planted", "passed": False, "detail": "2"}]

    failed = section(main, monkeypatch, work)
    assert failed.state == "failed"
    assert any("planted (2)" in line for line in main.lines([failed]))


def test_all_budgets_fit_into_nine_minutes(main: Any) -> None:
    assert sum(budget for _, budget in main.SECTIONS.values()) <= 510
