"""Everything that needs a GPU, section by section, into one JSON file.

    scripts/gpu_check --output FILE [--part check | measure] [--only NAME ...]
    scripts/gpu_check --output FILE --device cpu --quick

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, Literal

import torch
from gpu_check.setting import NotRunError, Setting

from outrider_lab.measure.store import write_json

State = Literal["passed", "failed", "not run", "cut"]


@dataclass(slots=True)
class Section:
    """What became of one section. `error` is a traceback, or why it was not run or cut: measuring
    ends where its budget does, and what was measured until then stays."""

    name: str
    state: State
    seconds: float
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str = ""


def failed_checks(section: Section) -> list[dict[str, Any]]:
    return [one for one in section.record.get("checks", []) if not one["passed"]]


def write(path: Path, sections: list[Section], *, device: str, quick: bool) -> None:
    write_json(
        path,
        {
            "benchmark": "gpu_check",
            "device": device,
            "quick": quick,
            "passed": all(section.state != "failed" for section in sections),
            "sections": [asdict(section) for section in sections],
        },
    )


def lines(sections: list[Section]) -> Iterator[str]:
    """A line a section, its failed checks and its most telling numbers."""
    for section in sections:
        yield f"{section.name:12} {section.state:8} {section.seconds:6.1f} s  {_gist(section)}"
        for one in failed_checks(section):
            yield f"{'':12} FAILED   {one['name']} ({one['detail']})"
        if section.error:
            yield f"{'':12} {section.error.strip().splitlines()[-1]}"
        for cell in section.record.get("cells", [])[:40]:
            yield f"{'':14}{_told(cell)}"


def _gist(section: Section) -> str:
    plain = {k: v for k, v in section.record.items() if isinstance(v, int | float)}
    return _told(plain)


def _told(cell: dict[str, Any]) -> str:
    return "  ".join(f"{name}={_shown(value)}" for name, value in cell.items())


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# Modules and budgets of each part, in the order in which the sections matter, should the machine be
# taken away. The seconds of a part leave some of its 330 for the start.
PARTS = {
    "check": {
        "environment": ("device", 10),
        "bandwidth": ("device", 10),
        "operators": ("operators", 45),
        "exactness": ("texts", 45),
        "lanes": ("texts", 35),
        "filters": ("variants", 15),
        "float16": ("variants", 20),
        "quantised": ("variants", 25),
        "delta": ("texts", 12),
        "hybrid": ("texts", 13),
        "heads": ("texts", 20),
        "ahead": ("variants", 15),
        "graphs": ("tools", 35),
        "memcheck": ("tools", 20),
    },
    "measure": {
        "plain": ("passes", 45),
        "verify_cost": ("passes", 35),
        "windows": ("passes", 25),
        "accept": ("passes", 12),
        "syncs": ("passes", 10),
        "memory": ("passes", 13),
        "speculation": ("speculation", 55),
        "kernels": ("tools", 40),
        "counters": ("tools", 35),
        "peer": ("speculation", 25),
        "overlap": ("passes", 15),
        "partition": ("device", 10),
    },
}
SECTIONS = PARTS["check"] | PARTS["measure"]


class OverBudgetError(BaseException):
    """A section took longer than it may. No Exception, for an engine goes on after those."""


def main() -> int:
    options = _options()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    setting = Setting(torch.device(options.device), options.quick)
    name, output = _device_name(setting), options.output
    sections = _earlier(output) if options.resume else []
    done = {section.name for section in sections}
    for section_name in options.only or PARTS.get(options.part, SECTIONS):
        if section_name in done:
            continue
        print(f"gpu_check: {section_name}", file=sys.stderr, flush=True)
        module, budget = SECTIONS[section_name]
        # Budgets are of a device that is lent; a CPU only shows that sections run, however slowly.
        budget *= 1 if setting.on_cuda else 10
        section = run_section(section_name, setting, module, budget)
        sections.append(section)
        write(output, sections, device=name, quick=setting.quick)
        if section.state == "failed" and not _answers(setting):
            _start_again()
    for line in lines(sections):
        print(line)
    passed = all(section.state != "failed" for section in sections)
    others = [one.name for one in sections if one.state in ("not run", "cut")]
    ended = {"benchmark": "gpu_check", "passed": passed, "not_run_or_cut": others}
    print(json.dumps({**ended, "output": str(output)}))
    return 0 if passed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a test of the sections")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--part", choices=tuple(PARTS), help="half of the sections")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), help="these sections alone")
    parser.add_argument("--resume", action="store_true", help="keep sections that the file has")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(3, "gpu_check: PyTorch sees no CUDA device; try --device cpu --quick\n")
    if options.device == "cpu" and not options.quick:
        parser.error("a CPU runs only the self-test: add --quick")
    return options


def run_section(name: str, setting: Setting, module: str, budget: float) -> Section:
    """Never raises but for an interrupt; what was recorded before an error is kept."""
    section = Section(name, "passed", 0.0)
    started = perf_counter()
    previous = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, budget)
    try:
        getattr(importlib.import_module(f"gpu_check.{module}"), name)(setting, section.record)
    except NotRunError as reason:
        section.state, section.error = "not run", str(reason)
    except (Exception, OverBudgetError) as error:
        logging.exception("section %s", name)
        cut = isinstance(error, OverBudgetError) and name in PARTS["measure"]
        section.state, section.error = "cut" if cut else "failed", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if section.state in ("passed", "cut") and failed_checks(section):
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
