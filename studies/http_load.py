"""Load on a server by GuideLLM, which has an environment of its own (scripts/guidellm).

GuideLLM sends the requests of a file in their order, so many at any time, and writes for each its
tokens by the server's own count and three moments: sent, first token, end. All figures here are
made of these.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PROGRAM = Path(__file__).parents[1] / "scripts" / "guidellm"
_SECONDS = 3_600


@dataclass(frozen=True, slots=True)
class Answer:
    num_tokens: int
    first_seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """The answers of requests of which so many were in flight at any time, and the seconds from
    the first request to the end of the last answer."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def per_token(self) -> float:
        return self.seconds / sum(answer.num_tokens for answer in self.answers)

    @property
    def first_seconds(self) -> float:
        return statistics.median(answer.first_seconds for answer in self.answers)


def chats(url: str, prompts: Sequence[str], in_flight: int, body: Mapping[str, Any]) -> Load:
    """Streamed chats, one a prompt; the next is sent when one has ended. `body` is what every
    request says besides its prompt. Raises RuntimeError where GuideLLM or a request failed."""
    with TemporaryDirectory(prefix="outrider-load-") as name:
        folder = Path(name)
        lines = (json.dumps({"prompt": prompt}) for prompt in prompts)
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        command = [str(PROGRAM), "run", "--disable-console"]
        for flag, given in _flags(folder, url, len(prompts), in_flight, body).items():
            command += [f"--{flag}", json.dumps(given)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"GuideLLM failed: {(done.stderr or done.stdout)[-2000:]}")
        return load_of(json.loads((folder / "report.json").read_text("utf-8")), len(prompts))


def _flags(
    folder: Path, url: str, count: int, in_flight: int, body: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    data = {"path": str(folder / "prompts.jsonl"), "load_kwargs": {"split": "train"}}
    return {
        "backend": {"kind": "openai_http", "target": url, "extras": {"body": dict(body)}},
        "profile": {"kind": "concurrent", "streams": in_flight},
        "constraint": {"kind": "max_requests", "count": count},
        "data": {"kind": "json_file", **data},
        "output": {"kind": "json", "path": str(folder / "report.json")},
    }


def load_of(report: Mapping[str, Any], count: int) -> Load:
    """The load that GuideLLM's JSON report is of. Raises RuntimeError if fewer than `count`
    requests were answered with tokens."""
    (benchmark,) = report["benchmarks"]
    requests: Mapping[str, list[dict[str, Any]]] = benchmark["requests"]
    good = [one for one in requests["successful"] if one["output_tokens"]]
    if len(good) != count:
        failed = [one["info"].get("error") for one in requests["errored"]]
        raise RuntimeError(f"{len(good)} of {count} requests were answered: {failed[:1]}")
    begun = min(one["request_start_time"] for one in good)
    ended = max(one["request_end_time"] for one in good)
    answers = (Answer(one["output_tokens"], one["time_to_first_token_ms"] / 1e3) for one in good)
    return Load(ended - begun, tuple(answers))
