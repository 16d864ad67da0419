"""The verbs of the command line. Each is a function whose module is imported when the verb runs.

These tables have everything that help, parsing and completion need, so `--help` of any verb takes
little longer than the start of Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cli import verb_options
from outrider.cli.options import KNOWN, Verb

# Rows of the lab: its verbs are verbs of the program.
from outrider_lab.cli import bench_options
from outrider_lab.cli import verb_options as lab_options

# The headings of the front page.
GROUPS = ("Write text", "Models", "Measure speed", "Check exactness", "This machine")
TABLES = (verb_options, lab_options, bench_options)


def _parts(name: str) -> tuple[Verb, ...]:
    return tuple(verb for path, verb in KNOWN.items() if path.startswith(f"{name} "))


_GROUPS = {
    "cluster": Verb(
        name="cluster",
        text="Serve from many machines, on Ray.",
        example="outrider cluster config outrider/embedded --replicas 2",
        parts=_parts("cluster"),
    ),
    "models": Verb(
        name="models",
        group="Models",
        text="Inspect, load, inflate, export models; known pairs.",
        example="outrider models list",
        parts=_parts("models"),
    ),
    "draft": Verb(
        name="draft",
        group="Models",
        text="Choose a drafter for a target.",
        example="outrider draft suggest outrider/embedded",
        parts=_parts("draft"),
    ),
    "train": Verb(
        name="train",
        group="Models",
        text="Train a drafter, a model or a tokenizer on text.",
        example="outrider train draft my-draft python --tokens 9000 --steps 5 --exam-prompts 2",
        parts=_parts("train"),
    ),
    "bench": Verb(
        name="bench",
        group="Measure speed",
        text="Measure the gain of speculation, always compared with plain decoding.",
        example="outrider bench k --domains code --prompts 2 --ks 2,4",
        parts=_parts("bench"),
    ),
}
# The order of the front page. Verbs that are not here follow in the order of their rows.
_ORDER = (
    *("generate", "chat", "batch", "serve", "cluster"),
    *("pull", "list", "models", "draft", "train"),
    *("plan", "bench", "report", "trace", "verify"),
    *("doctor", "top", "config", "completion"),
    *("pairs", "simulate", "prompts"),
)
_OTHERS = (name for name in KNOWN if " " not in name and name not in _ORDER)
VERBS = tuple(_GROUPS.get(name) or KNOWN[name] for name in (*_ORDER, *_OTHERS))


def names(verbs: Sequence[Verb]) -> list[str]:
    """Return every word that calls one of `verbs`."""
    return [name for verb in verbs for name in (verb.name, verb.alias) if name]


def find(verbs: Sequence[Verb], word: str) -> Verb | None:
    return next((verb for verb in verbs if word in (verb.name, verb.alias)), None)
