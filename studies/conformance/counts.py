"""Counts of a suite: right, wrong, refused, and differences that are documented."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_MAX_SHOWN = 5


@dataclass
class Suite:
    """`wrong` has the first inputs of each label; `refused` a reason for each."""

    name: str
    right: int = 0
    num_refused: int = 0
    num_wrong: Counter[str] = field(default_factory=Counter[str])
    wrong: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"])
    documented: Counter[str] = field(default_factory=Counter[str])
    refused: dict[str, str] = field(default_factory=dict[str, str])

    def count(self, label: str, right: bool, shown: str, documented: str | None = None) -> None:
        if right:
            self.right += 1
        elif documented is not None:
            self.documented[f"{label}: {documented}"] += 1
        else:
            self.num_wrong[label] += 1
            examples = self.wrong.setdefault(label, [])
            if len(examples) < _MAX_SHOWN:
                examples.append(shown)

    def refuse(self, label: str, reason: str, count: int = 1) -> None:
        self.refused[label] = reason
        self.num_refused += count

    def record(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "suite": self.name,
            "right": self.right,
            "wrong": self.num_wrong.total(),
            "refused": self.num_refused,
            "documented": dict(sorted(self.documented.items())),
            "reasons": dict(sorted(self.refused.items())),
            "wrong_by_label": dict(self.num_wrong),
            "examples": self.wrong,
        }

    def line(self) -> str:
        """The counts for a terminal."""
        counts = f"{self.right} right, {self.num_wrong.total()} wrong, {self.num_refused} refused"
        return f"{self.name}: {counts}, {self.documented.total()} documented differences"

    def details(self) -> str:
        """Documented differences one by one, and examples of wrong cases."""
        documented = [f"{count:6} {label}" for label, count in sorted(self.documented.items())]
        wrong = [
            f" WRONG {label}: {shown!r}" for label, all_ in self.wrong.items() for shown in all_
        ]
        return (
            "".join(f"{line}\n" for line in (self.name, *documented, *wrong))
            if documented or wrong
            else ""
        )
