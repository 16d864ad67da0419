"""The prompts that benchmarks and parity runs read, shipped with the package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from outrider.core.errors import ConfigError
from outrider.core.nearest import did_you_mean

WORKLOADS = ("humaneval", "gsm8k")
DOMAINS = ("code", "maths", "conversation", "summarization")
# For drafters that copy from the text: prompts that begin a copy of themselves, and prompts whose
# words come once. They are asked for by name, and are no part of any mixture.
ECHO, ADVERSARIAL = "echo", "adversarial"
EXTREMES = (ECHO, ADVERSARIAL)
SUMMARIZE = "\n\nSummarize the above article:"

_FILES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "code": ("humaneval", lambda row: row["prompt"]),
    "maths": ("gsm8k", lambda row: f"Question: {row['question']}\nAnswer:"),
    "conversation": ("conversation", lambda row: row["instruction"]),
    "summarization": ("summarization", lambda row: row["article"] + SUMMARIZE),
    ECHO: ("echo", lambda row: row["prompt"]),
    ADVERSARIAL: ("adversarial", lambda row: row["prompt"]),
}


def builtin_texts(domain: str) -> list[str]:
    """All shipped prompts of `domain`, in file order. Raises ConfigError for an unknown name."""
    if domain not in _FILES:
        raise ConfigError(f"unknown domain {domain!r}.", hint=did_you_mean(domain, _FILES))
    name, text_of = _FILES[domain]
    text = files("outrider.bench").joinpath("prompts", f"{name}.jsonl").read_text("utf-8")
    return [text_of(json.loads(line)) for line in text.splitlines()]


def load_prompts(workload: str) -> list[str]:
    """All prompts of `workload`, in file order. Raises ConfigError for an unknown name."""
    if workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}.", hint=did_you_mean(workload, WORKLOADS))
    return builtin_texts({"humaneval": "code", "gsm8k": "maths"}[workload])
