"""Writes what README shows of measurements: `scripts/readme`.

Figures are made of studies/results, and the picture of a run that is kept beside it: an answer of
the real model that `scripts/real_model` makes. `--check` only compares, and exits with 1 if
something is out of date. `--record` makes the run again, which needs Outrider and a machine that
does nothing else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import readme_sizes
import readme_stream
from generated import kept

ROOT = Path(__file__).parent.parent
README, RESULTS, KEPT = ROOT / "README.md", ROOT / "studies" / "results", ROOT / "docs/pictures"
RUN, STREAM = KEPT / "readme-stream.json", KEPT / "readme-stream.svg"
CERTIFICATE = RESULTS / "certificate-2core-emeraldrapids.json"
TITLES = {
    "algebra": "exact algebra",
    "ensemble": "chi-square ensemble",
    "parity": "same text",
    "acceptance": "same acceptance",
    "mutants": "planted bugs",
}
# Parts of README that are written here stand between two comments.
PART = re.compile(r"(?P<begin><!--(?P<name>\w+)-->)(?P<text>.*?)(?P<end><!--/(?P=name)-->)", re.S)


def stream() -> str:
    return f"\n![{readme_stream.alternative(_run())}]({_from_root(STREAM)})\n"


def speed() -> str:
    return f"\n{readme_sizes.table(RESULTS)}\n\n{readme_sizes.sources(RESULTS)}\n"


def rivals() -> str:
    return f"\n{readme_sizes.rivals(RESULTS)}\n"


def verify() -> str:
    """The first lines of the committed certificate, as `outrider verify` prints them."""
    report = json.loads(CERTIFICATE.read_text("utf-8"))
    marks = {True: "ok", False: "FAILED"}
    lines = [
        f"  {marks[check['holds']]:<6}  {TITLES[check['name']]:<21}{check['summary']}"
        for check in report["checks"]
    ]
    return "\n".join(["\n```text", report["verdict"], *lines, "```\n"])


def equal() -> str:
    report = readme_sizes.newest(RESULTS, "parity-")
    return f"{report['num_equal']:,} of {report['num_tokens']:,} greedy tokens"


PARTS: Mapping[str, Callable[[], str]] = {
    "stream": stream,
    "speed": speed,
    "rivals": rivals,
    "verify": verify,
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
    }


def record() -> None:
    """Makes the run, and keeps what it gave. Raises SystemExit without the real model."""
    from outrider.core.env import cache_folder
    from outrider.plugins.measure.turns import Neighbours

    folder = (cache_folder() or Path()) / "real" / readme_stream.MODEL
    if not folder.is_dir():
        raise SystemExit("there is no real model: run scripts/real_model")
    with Neighbours() as neighbours:
        run = readme_stream.record(folder)
    run["foreign_cpu_share"] = neighbours.share
    RUN.write_text(json.dumps(run, separators=(",", ":")) + "\n", "utf-8")


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
