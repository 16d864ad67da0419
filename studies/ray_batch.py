"""A batch on Ray that loses an actor: `run.py ray_batch [--output FILE]`.

It runs in the environment that scripts/cluster_tests makes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from common import TARGET, Report, note, study
from options import Options
from ray_cluster import descendants, shared_bytes, title

# An actor of Ray Data's that maps blocks.
_ACTOR = "MapWorker"


@dataclass(frozen=True, slots=True)
class Killed:
    """A command whose actor was killed once it had written something. `most_bytes` is what it and
    all of Ray took."""

    code: int
    log: str
    was_killed: bool
    seconds: float
    most_bytes: int


@study(target=TARGET, lines=5000)
def ray_batch(options: Options, report: Report) -> bool:
    """Are the answers of actors on Ray, one of which is killed, those of one process?"""
    num_lines = 100 if options.quick else options.lines
    with TemporaryDirectory() as name:
        folder = Path(name)
        source, one, many = (folder / name for name in ("in.jsonl", "one.jsonl", "many.jsonl"))
        with source.open("w", encoding="utf-8") as file:
            for number in range(num_lines):
                prompt = f"def part_{number}(self, items):\n    "
                line = {"prompt": prompt, "max_tokens": 16, "temperature": 0.8 * (number % 2)}
                file.write(json.dumps(line) + "\n")
        begun = perf_counter()
        subprocess.run(command(source, one), check=True, stderr=subprocess.DEVNULL)
        seconds = perf_counter() - begun
        told = kill_a_worker(source, many)
        same = answers(one) == answers(many)
        num_written = len(answers(many))
    note(
        report,
        lines=num_lines,
        written=num_written,
        same=same,
        was_killed=told.was_killed,
        seconds_of_one=round(seconds, 1),
        seconds_on_ray=round(told.seconds, 1),
        gigabytes=round(told.most_bytes / 1e9, 2),
    )
    return same and told.was_killed and told.code == 0


def answers(file: Path) -> list[dict[str, Any]]:
    """Without notes, which may say how fast it went."""
    told = map(json.loads, file.read_text("utf-8").splitlines())
    return [{name: value for name, value in one.items() if name != "notes"} for one in told]


def command(source: Path, target: Path, *flags: str) -> list[str]:
    words = ("batch", str(source), str(target), "--threads", "1", *flags)
    return [sys.executable, "-m", "outrider", *words]


def kill_a_worker(source: Path, target: Path, *flags: str) -> Killed:
    """Answer `source` by two actors, and kill one once an answer is written."""
    num_before = target.stat().st_size if target.exists() else 0
    begun, was_killed, most = perf_counter(), False, 0
    with subprocess.Popen(
        command(source, target, "--ray", "--workers", "2", *flags),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while process.poll() is None:
            sleep(0.05 if not was_killed else 1.0)
            below = descendants(process.pid)
            most = max(most, sum(map(shared_bytes, [process.pid, *below])))
            actors = [one for one in below if _ACTOR in title(one)]
            if not was_killed and actors and target.stat().st_size > num_before:
                os.kill(max(actors), signal.SIGKILL)
                was_killed = True
        assert process.stderr is not None
        log = process.stderr.read()
    return Killed(process.returncode, log, was_killed, perf_counter() - begun, most)
