"""State of a run on disk: one safetensors file with every tensor, and a JSON record in its header.

The file is replaced in one step, so whoever reads it, even after a process was killed in the
middle, finds the last state or the one before. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.files import open_regular, replacing, writing
from outrider.models.weights import check_header

_RECORD = "outrider_training"


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved: tensors in host memory, and a record of JSON values."""

    tensors: Mapping[str, Tensor]
    record: Mapping[str, object]


class _CheckpointFile(Protocol):
    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_tensor(self, name: str, /) -> Tensor: ...


def save(path: Path, saved: Saved) -> None:
    """Replace `path` in one step. Raises MachineError if it cannot be written."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in saved.tensors.items()}
    with writing(path, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, alone=True) as draft:
            save_file(tensors, draft, {_RECORD: json.dumps(dict(saved.record))})
            with open_regular(draft) as stream:
                os.fsync(stream.fileno())


def load(path: Path) -> Saved | None:
    """The last state saved at `path`; None if there is none. Raises CheckpointError."""
    if not path.is_file():
        return None
    try:
        check_header(path)
        file = cast("_CheckpointFile", safe_open(path, framework="pt"))
        text = (file.metadata() or {}).get(_RECORD, "")
        record: object = json.loads(text)
        # Copies: a mapped tensor would change under its readers when the file is replaced.
        tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no state of a training run: {error}.", hint="start anew with --fresh"
        ) from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} has no record.", hint="start anew with --fresh")
    return Saved(tensors, cast("dict[str, object]", record))


@dataclass(frozen=True, slots=True)
class Measurement:
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
    history: list[Measurement] = field(default_factory=list[Measurement])

    def took_step(self, loss: float, num_tokens: int, *, smooth: int) -> None:
        self.step += 1
        self.num_tokens += num_tokens
        self.loss += (loss - self.loss) / min(self.step, smooth)

    def measured(self, figures: Mapping[str, float]) -> None:
        if self.history and self.history[-1].step == self.step:
            self.history.pop()
        self.history.append(Measurement(self.step, self.seconds, self.loss, dict(figures)))

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
        values["history"] = [Measurement(**item) for item in values["history"]]
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
