"""Writes what README shows of measurements: `scripts/readme`.

Pictures and figures are made of studies/results and of two runs that are kept beside the
pictures: a text of the embedded pair, and a plan for the real model that `scripts/real_model`
makes. `--check` only compares, and exits with 1 if something is out of date. `--record` makes the
two runs again, which needs Outrider and a machine that does nothing else.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import readme_chart
import readme_stream
from generated import kept

ROOT = Path(__file__).parent.parent
README, RESULTS, KEPT = ROOT / "README.md", ROOT / "studies" / "results", ROOT / "docs/pictures"
RUN, PLAN = KEPT / "readme-stream.json", KEPT / "readme-plan.txt"
STREAM, CHART = KEPT / "readme-stream.svg", KEPT / "readme-speed.svg"
# A share of the CPU that others may have while both runs are made without a word about it.
BUSY = 0.1
MODEL, DOMAINS = "SmolLM2-135M-Instruct", "code,conversation"
# Parts of README that are written here stand between two comments.
PART = re.compile(r"(?P<begin><!--(?P<name>\w+)-->)(?P<text>.*?)(?P<end><!--/(?P=name)-->)", re.S)


def stream() -> str:
    return f"\n![{readme_stream.alternative(_run())}]({_from_root(STREAM)})\n"


def speed() -> str:
    shown = f"![{readme_chart.alternative(RESULTS)}]({_from_root(CHART)})"
    table = readme_chart.table(RESULTS)
    return f"\n{shown}\n\n{table}\n\n{readme_chart.sources(RESULTS)}\n"


def plan() -> str:
    """The command, the verdict, what a round emits and takes, and the command that it advises."""
    command, about, verdict, why, *others = PLAN.read_text("utf-8").strip().split("\n\n")
    a_round = why.partition("\nWith ")[0]
    advised = next(words for words in others if words.startswith("Run it:"))
    shown = "\n\n".join([command, about, verdict, a_round, "[...]", advised])
    share = float(_run()["foreign_cpu_share"])
    busy = f"\nOther programs used {share:.0%} of the CPU meanwhile.\n" if share > BUSY else ""
    return f"\n```\n{shown}\n```\n{busy}"


def equal() -> str:
    report = readme_chart.newest(RESULTS, "parity-")
    return f"{report['num_equal']:,} of {report['num_tokens']:,} greedy tokens"


PARTS: Mapping[str, Callable[[], str]] = {
    "stream": stream,
    "speed": speed,
    "plan": plan,
    "equal": equal,
}


def made() -> dict[Path, str]:
    """Every file that is written, with what belongs into it. Raises SystemExit if README lacks a
    part."""
    text = README.read_text("utf-8")
    missing = set(PARTS) - {found["name"] for found in PART.finditer(text)}
    if missing:
        raise SystemExit(f"README.md lacks the comments of {', '.join(sorted(missing))}")
    new = PART.sub(lambda found: found["begin"] + PARTS[found["name"]]() + found["end"], text)
    return {
        README: new,
        STREAM: readme_stream.draw(_run()),
        CHART: readme_chart.draw(RESULTS),
    }


def record() -> None:
    """Runs both, and keeps what they gave. Raises SystemExit without the real model."""
    from outrider.core.env import cache_folder
    from outrider.measure import Neighbours

    folder = (cache_folder() or Path()) / "real"
    if not (folder / MODEL).is_dir():
        raise SystemExit("there is no real model: run scripts/real_model")
    words = ["outrider", "plan", MODEL, "--domains", DOMAINS]
    program = [sys.executable, "-m", *words]
    with Neighbours() as neighbours:
        run = readme_stream.record()
        done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=True)
    run["foreign_cpu_share"] = neighbours.share
    RUN.write_text(json.dumps(run, separators=(",", ":")) + "\n", "utf-8")
    PLAN.write_text(f"{' '.join(words)}\n\n{done.stdout.strip()}\n", "utf-8")


def _run() -> Mapping[str, Any]:
    return json.loads(RUN.read_text("utf-8"))


def _from_root(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def main(words: Sequence[str]) -> int:
    if "--record" in words:
        record()
    return kept(made(), words, again="scripts/readme", others=["--record"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
