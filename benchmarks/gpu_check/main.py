"""Everything that needs a GPU, section by section, into one JSON file.

    scripts/gpu_check [--device cuda] [--quick] [--output FILE] [--only NAME ...]

Each section has a budget of seconds and fails alone: its traceback is kept and the others go on.
The file is written after every section. A device that no longer answers after an error is left: the
process starts itself again for what remains. The last line says pass or fail, and so does the exit
code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from gpu_check import report
from gpu_check.report import Section
from gpu_check.setting import ROOT, Setting, SkippedError

# In the order in which they matter, should the machine be taken away. Seconds add up to 510.
BUDGETS = {
    "environment": 20,
    "operators": 50,
    "hybrid": 35,
    "exactness": 65,
    "heads": 30,
    "bandwidth": 10,
    "plain": 55,
    "verify_cost": 55,
    "accept": 20,
    "syncs": 20,
    "memory": 20,
    "speculation": 60,
    "peer": 40,
    "overlap": 20,
    "partition": 10,
}


class OverBudgetError(BaseException):
    """A section took longer than it may. No Exception, for an engine goes on after those."""


def main() -> int:
    options = _options()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    setting = Setting(torch.device(options.device), options.quick)
    name = _device_name(setting)
    output: Path = options.output or ROOT / "benchmarks" / "results" / f"gpu_check-{name}.json"
    sections = _earlier(output) if options.resume else []
    done = {section.name for section in sections}
    for section_name in options.only or BUDGETS:
        if section_name in done:
            continue
        print(f"gpu_check: {section_name}", file=sys.stderr, flush=True)
        section = run_section(section_name, setting, BUDGETS[section_name])
        sections.append(section)
        report.write(output, sections, device=name, quick=setting.quick)
        if section.state == "failed" and not _answers(setting):
            _start_again()
    for line in report.lines(sections):
        print(line)
    passed = all(section.state != "failed" for section in sections)
    print(json.dumps({"benchmark": "gpu_check", "passed": passed, "output": str(output)}))
    return 0 if passed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the sections")
    parser.add_argument("--output", type=Path, help="benchmarks/results/gpu_check-<device>.json")
    parser.add_argument("--only", nargs="+", choices=tuple(BUDGETS), help="these sections alone")
    parser.add_argument("--resume", action="store_true", help="keep sections that the file has")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(3, "gpu_check: PyTorch sees no CUDA device; try --device cpu --quick\n")
    if options.device == "cpu" and not options.quick:
        parser.error("a CPU runs only the self-test: add --quick")
    return options


def run_section(name: str, setting: Setting, budget: float) -> Section:
    """Never raises but for an interrupt; what was recorded before an error is kept."""
    section = Section(name, "passed", 0.0)
    started = perf_counter()
    previous = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, budget)
    try:
        importlib.import_module(f"gpu_check.{name}").run(setting, section.record)
    except SkippedError as reason:
        section.state, section.error = "skipped", str(reason)
    except (Exception, OverBudgetError):
        logging.exception("section %s", name)
        section.state, section.error = "failed", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if section.state == "passed" and report.failed_checks(section):
        section.state = "failed"
    if setting.on_cuda:
        torch.cuda.empty_cache()
    return replace(section, seconds=round(perf_counter() - started, 2))


def _ring(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise OverBudgetError("the section's budget of seconds is spent")


def _answers(setting: Setting) -> bool:
    """Whether the device still works: some errors stay until the process ends."""
    if not setting.on_cuda:
        return True
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(2, device=setting.device).sum() == 2)
    except RuntimeError:
        return False


def _start_again() -> None:
    arguments = [*sys.argv[1:], *([] if "--resume" in sys.argv else ["--resume"])]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "gpu_check.main", *arguments])


def _earlier(output: Path) -> list[Section]:
    if not output.exists():
        return []
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return [Section(**section) for section in found["sections"]]


def _device_name(setting: Setting) -> str:
    name = torch.cuda.get_device_name() if setting.on_cuda else "cpu"
    return "-".join(name.lower().split())


if __name__ == "__main__":
    sys.exit(main())
