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
from torch.utils._python_dispatch import TorchDispatchMode

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


NOT_RUN = {"graphs", "memcheck", "kernels", "counters", "syncs", "memory", "overlap", "partition"}
# Those of a second; the others take half a minute.
SHORT = {"environment", "bandwidth", "delta", "heads", "accept"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen", [SHORT | NOT_RUN, pytest.param(set[str](), marks=pytest.mark.deep)]
)
def test_every_section_runs_or_says_why_not(tmp_path: Path, chosen: set[str]) -> None:
    output = tmp_path / "found.json"
    only = ("--only", *sorted(chosen)) if chosen else ()
    done = run("--device", "cpu", "--quick", "--output", str(output), *only, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    states = {section["name"]: section["state"] for section in found["sections"]}
    assert not chosen or states.keys() == chosen
    not_run = set(NOT_RUN)
    if find_spec("triton") is None:
        not_run |= {"operators", "delta"} & states.keys()
    assert {name for name, state in states.items() if state == "not run"} == not_run
    assert {state for name, state in states.items() if name not in not_run} == {"passed"}
    assert all(s["error"] for s in found["sections"] if s["state"] == "not run")
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["passed"]
    assert set(last["not_run_or_cut"]) == not_run
    bounded = ("plain", "verify_cost", "windows", "accept", "speculation")
    for one in found["sections"]:
        if one["name"] in bounded:
            keys = [
                {"weight_bytes", "bytes", "launches"} & set(cell) for cell in one["record"]["cells"]
            ]
            assert all(keys), one["name"]


@pytest.fixture(name="main")
def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "studies"), *sys.path])
    return importlib.import_module("gpu_check.main")


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended(
    main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words, "environment", "bandwidth"])
    assert main.main() == 0
    sections = json.loads(output.read_text(encoding="utf-8"))["sections"]
    assert sections[0] == kept
    assert [section["name"] for section in sections] == ["environment", "bandwidth"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("words", "code"), [(("--part", "check"), 3), (("--device", "cpu"), 2)])
def test_it_asks_for_a_device(
    main: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", "found.json", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == code
    assert "--quick" in capsys.readouterr().err


def section(
    main: Any,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[dict[str, Any]], None],
    name: str = "planted",
) -> Any:
    """What becomes of a section of this name that does `work`."""

    def run_planted(setting: object, record: dict[str, Any]) -> None:
        del setting
        work(record)

    module = ModuleType("gpu_check.planted")
    vars(module)[name] = run_planted
    monkeypatch.setitem(sys.modules, "gpu_check.planted", module)
    setting = main.Setting(torch.device("cpu"), True)
    return main.run_section(name, setting, "planted", 0.3)


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


def test_measuring_is_cut_where_its_budget_ends_and_fails_only_by_a_check(
    main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(record: dict[str, Any]) -> None:
        record["cells"] = [{"ms": 1.0}]
        time.sleep(20)

    cut = section(main, monkeypatch, work, "plain")
    assert (cut.state, cut.record) == ("cut", {"cells": [{"ms": 1.0}]})

    def failing(record: dict[str, Any]) -> None:
        record["checks"] = [{"name": "planted", "passed": False, "detail": ""}]
        time.sleep(20)

    assert section(main, monkeypatch, failing, "plain").state == "failed"


def test_an_interpreter_that_fails_is_no_pass(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of Triton 3.6 with NumPy 2.4 and later does."""
    kernel = ModuleType("gpu_check.reading_kernel")

    def read(*_: object) -> None:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    vars(kernel)["read"] = read
    monkeypatch.setitem(sys.modules, "gpu_check.reading_kernel", kernel)
    monkeypatch.setattr(importlib.import_module("gpu_check"), "reading_kernel", kernel, False)
    setting = main.Setting(torch.device("cpu"), True)
    for name in ("operators", "delta"):
        found = main.run_section(name, setting, main.SECTIONS[name][0], 20)
        assert found.state == "not run"
        assert "only 0-dimensional arrays" in found.error
        assert not found.record


def test_a_failed_check_fails_its_section(main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(record: dict[str, Any]) -> None:
        record["checks"] = [{"name": "planted", "passed": False, "detail": "2"}]

    failed = section(main, monkeypatch, work)
    assert failed.state == "failed"
    assert any("planted (2)" in line for line in main.lines([failed]))


def test_a_file_must_be_named(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "--output" in capsys.readouterr().err


def test_the_budgets_of_each_part_fit_into_six_minutes(main: Any) -> None:
    for part in main.PARTS.values():
        assert sum(budget for _, budget in part.values()) <= 330
    assert len(main.SECTIONS) == sum(map(len, main.PARTS.values()))


@pytest.mark.usefixtures("main")
def test_kernels_are_summed_by_name_and_gaps_are_idle() -> None:
    tools = importlib.import_module("gpu_check.tools")
    spans = [("a", 10.0, 12.0), ("b", 12.0, 15.0), ("a", 18.0, 20.0)]
    assert list(tools.by_kernel(spans)) == [
        {"kernel": "(all)", "calls": 3, "us": 10.0, "idle_share": pytest.approx(0.3)},
        {"kernel": "a", "calls": 2, "us": 4.0},
        {"kernel": "b", "calls": 1, "us": 3.0},
    ]
    assert list(tools.by_kernel([])) == []


class Seen(TorchDispatchMode):
    """Names of operators that would launch a kernel."""

    def __init__(self, launches_kernel: Any) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.launches_kernel, self.names = launches_kernel, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if self.launches_kernel(func, args, made):
            self.names.append(func.overloadpacket.__name__)
        return made


def test_views_allocations_and_reads_of_the_host_launch_nothing() -> None:
    x, out = torch.ones(4, 6), torch.empty(4, 6)
    with Seen(importlib.import_module("gpu_check.counting").launches_kernel) as seen:
        assert x.view(6, 4)[1:, ::2].t().unbind(0)[1].expand(2, 5).detach().shape == (2, 5)
        torch.empty_like(x).new_empty(3)
        x.diagonal().unsqueeze(0).squeeze()
        assert x[0, 0].item() == 1
        assert seen.names == []
        x.add_(1)
        out.copy_(x)
        torch.cat([x, out])
        torch.mul(x, 2, out=out)
        x.t().contiguous()
        with torch.inference_mode():
            assert x.to(torch.float32) is x
            x.to(torch.int32)
    assert seen.names[:5] == ["add_", "copy_", "cat", "mul", "clone"]
    assert seen.names[5:] in (["to"], ["_to_copy"])
