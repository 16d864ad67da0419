"""Where a run stands, apart from its tensors: what a state's JSON record holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from outrider.core.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement on held-out text, and the loss shown at that time (0 before any step)."""

    step: int
    seconds: float
    loss: float
    figures: Mapping[str, float]


@dataclass(slots=True)
class Standing:
    """The part of a run that changes with every step. `seconds` are of all its processes."""

    step: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    loss: float = 0.0
    history: list[Measured] = field(default_factory=list[Measured])

    def took_step(self, loss: float, num_tokens: int, *, smooth: int) -> None:
        self.step += 1
        self.num_tokens += num_tokens
        self.loss += (loss - self.loss) / min(self.step, smooth)

    def measured(self, figures: Mapping[str, float]) -> None:
        if self.history and self.history[-1].step == self.step:
            self.history.pop()
        self.history.append(Measured(self.step, self.seconds, self.loss, dict(figures)))

    def record(self) -> dict[str, object]:
        return asdict(self)


def read_standing(
    record: Mapping[str, object], facts: Mapping[str, object], where: Path
) -> Standing:
    """What `record` says, if it is of a run with these facts.

    Raises ConfigError, naming the first fact that differs; CheckpointError for a damaged record.
    """
    try:
        was = cast("dict[str, object]", record["facts"])
        values = cast("dict[str, Any]", record["standing"])
        values["history"] = [Measured(**item) for item in values["history"]]
        standing = Standing(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is no state of a training run: {error!r}.", hint="start anew with --fresh"
        ) from error
    # As JSON has no tuples, both sides are compared as texts.
    for key in sorted({*facts, *was}):
        if str(was.get(key)) != str(facts.get(key)):
            raise ConfigError(
                f"{where.parent} holds a run with {key} {was.get(key)!s:.80}, "
                f"and this one has {facts.get(key)!s:.80}.",
                hint="name another folder, or start anew in this one with --fresh",
            )
    return standing
