"""The prompts that benchmarks and parity runs read, shipped with the package."""

from __future__ import annotations

import json
from importlib.resources import files

from outrider.core.errors import ConfigError
from outrider.core.nearest import did_you_mean

WORKLOADS = ("humaneval", "gsm8k")


def load_prompts(workload: str) -> list[str]:
    """All prompts of `workload`, in file order. Raises ConfigError for an unknown name."""
    if workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}.", hint=did_you_mean(workload, WORKLOADS))
    text = files("outrider.bench").joinpath("prompts", f"{workload}.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    if workload == "gsm8k":
        return [f"Question: {row['question']}\nAnswer:" for row in rows]
    return [row["prompt"] for row in rows]
