"""The prompts that benchmarks and parity runs read: shipped with the package, or made from it.

Code, maths, conversations and articles are files. Translation asks for the articles' sentences one
by one. Retrieval asks for one of many facts (retrieval.py), so its prompts can be of any length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from outrider.bench.retrieval import retrieval_prompt
from outrider.core.errors import ConfigError, did_you_mean

WORKLOADS = ("humaneval", "gsm8k")
DOMAINS = ("code", "maths", "conversation", "summarization", "translation", "retrieval")
# For drafters that copy from the text: prompts that begin a copy of themselves, and prompts whose
# words come once. They are asked for by name, and are no part of any mixture.
ECHO, ADVERSARIAL = "echo", "adversarial"
# Code, maths and conversation in turns.
MIXED = "mixed"
SUMMARIZE = "\n\nSummarize the above article:"
NUM_MADE = 50
_NUM_NOTES = 8
_TRANSLATE = "Translate English to German: "
_SENTENCE = re.compile(r"[A-Z][^.!?]+[.!?](?= [A-Z]|$)")

_FILES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "code": ("humaneval", lambda row: row["prompt"]),
    "maths": ("gsm8k", lambda row: f"Question: {row['question']}\nAnswer:"),
    "conversation": ("conversation", lambda row: row["instruction"]),
    "summarization": ("summarization", lambda row: row["article"] + SUMMARIZE),
    ECHO: ("echo", lambda row: row["prompt"]),
    ADVERSARIAL: ("adversarial", lambda row: row["prompt"]),
}


def builtin_texts(domain: str) -> list[str]:
    """All prompts of `domain`, in their order. Raises ConfigError for an unknown name."""
    check_domain(domain)
    if domain in _MADE:
        return _MADE[domain]()
    name, text_of = _FILES[domain]
    text = files("outrider.bench").joinpath("prompts", f"{name}.jsonl").read_text("utf-8")
    return [text_of(json.loads(line)) for line in text.splitlines()]


def check_domain(domain: str) -> None:
    """Raises ConfigError for an unknown name."""
    known = (*_FILES, *_MADE)
    if domain not in known:
        raise ConfigError(f"unknown domain {domain!r}.", hint=did_you_mean(domain, known))


def load_prompts(workload: str) -> list[str]:
    """All prompts of `workload`, in file order. Raises ConfigError for an unknown name."""
    if workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}.", hint=did_you_mean(workload, WORKLOADS))
    return builtin_texts({"humaneval": "code", "gsm8k": "maths"}[workload])


def _translations() -> list[str]:
    """The second sentence of each article: the first ones are long, and the last ones short."""
    articles = [text.removesuffix(SUMMARIZE) for text in builtin_texts("summarization")]
    return [_TRANSLATE + _SENTENCE.findall(article)[1] for article in articles[:NUM_MADE]]


def _retrievals() -> list[str]:
    return [retrieval_prompt(number, _NUM_NOTES) for number in range(NUM_MADE)]


def _mixed() -> list[str]:
    rows = zip(*(builtin_texts(domain) for domain in DOMAINS[:3]), strict=False)
    return [text for row in rows for text in row]


_MADE: Mapping[str, Callable[[], list[str]]] = {
    "translation": _translations,
    "retrieval": _retrievals,
    MIXED: _mixed,
}
