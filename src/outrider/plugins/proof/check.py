"""Interface of a certificate's parts: they report steps, and end in a check."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One part's result. `holds` None says that it could not be checked here.

    `summary` is one line for people, `facts` plain values for programs. `problems` say what failed
    and `warnings` what a reader should know although nothing failed.
    """

    name: str
    title: str
    holds: bool | None
    summary: str
    facts: Mapping[str, Any]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "holds": self.holds,
            "summary": self.summary,
            "problems": list(self.problems),
            "warnings": list(self.warnings),
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class Effort:
    """Amounts of work of each part. Counts are per exact sampler and pair of distributions, where a
    part has them; the user's own sampler is walked more often than the others. No run of
    texts begins after so many `seconds` of them."""

    num_generated: int = 340
    num_texts: int = 50_000
    num_walked: int = 400
    num_walked_own: int = 1_500
    num_races: int = 1_000
    num_engine: int = 400
    greedy_tokens: int = 64
    seconds: float = math.inf


DEEP = Effort(
    num_generated=3_400,
    num_texts=1_000_000,
    num_walked=4_000,
    num_walked_own=15_000,
    num_races=10_000,
    num_engine=4_000,
    greedy_tokens=192,
)

# A part reports what it is doing, now and then, and returns its checks.
Part: TypeAlias = Generator[str, None, tuple[Check, ...]]

# Short and long, code and prose, some that repeat themselves.
PROMPTS = (
    "def quicksort(items):",
    "Question: Anna has 12 apples and gives a third of them to Ben. How many are left?\nAnswer:",
    'class Stack:\n    """A last-in, first-out list."""\n\n    def __init__(self):\n',
    "The river rises in the hills and reaches the sea after",
    "import math\n\n\ndef is_prime(n):\n    if n < 2:\n        return False\n    for i in range(",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Question: A train leaves at 9:40 and arrives at 11:15. How many minutes does it take? "
    "A second train takes 20 minutes longer and leaves at the same time. When does it arrive?\n"
    "Answer:",
    "# English to German\ncheese: Käse\nbread: Brot\nwater: Wasser\nmilk:",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n"
    "def multiply(a, b):\n    return a * b\n\n\ndef divide(a, b):\n",
    "tick tock tick tock tick tock tick tock tick",
    'def word_counts(text):\n    """How often each word occurs in text.\n\n'
    '    >>> word_counts("a b a")\n    {"a": 2, "b": 1}\n    """\n',
    "Dear Sir or Madam,\n\nthank you for your letter of 3 May. We have looked into the matter and",
)
