# pyright: basic, reportMissingImports=false
"""Runs the lines of a batch on a Ray cluster: Ray Data maps blocks of them over actors that keep
the model.

The file of answers stays with whoever asked, and is written in the order of lines, or as blocks
end. A block whose actor dies is mapped again by another one: what a line is answered depends on the
line alone.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import msgspec
import pyarrow
import ray
import ray.data
from msgspec import Struct
from ray.exceptions import RayError

from outrider.api.batch_files import AnswerFile, RawLine
from outrider.api.batch_lines import Answers
from outrider.api.batch_run import Batch
from outrider.api.llm import LLM
from outrider.api.structure import StructureOptions
from outrider.core.config import EngineConfig
from outrider.core.errors import MachineError
from outrider.core.params import SamplingParams

_ROWS = pyarrow.schema([
    ("number", pyarrow.int64()),
    ("digest", pyarrow.uint32()),
    ("data", pyarrow.binary()),
])  # fmt: skip
_ANSWERS = pyarrow.schema([
    ("number", pyarrow.int64()),
    ("digest", pyarrow.uint32()),
    ("answer", pyarrow.binary()),
    ("is_error", pyarrow.bool_()),
    ("num_tokens", pyarrow.int64()),
])  # fmt: skip


class Job(Struct, frozen=True, kw_only=True):
    """What an actor loads, and what lines say nothing of."""

    model: str
    draft: str | None
    engine: EngineConfig
    params: SamplingParams
    structure: dict[str, Any]
    block_lines: int


_JOBS: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


@dataclass(slots=True)
class _Kept:
    """Answers of one block, in the order of its lines."""

    rows: list[dict[str, Any]]

    def has(self, line: RawLine) -> bool:
        del line
        return False

    def write(self, line: RawLine, answer: str, *, is_error: bool) -> None:
        told = answer.encode("utf-8", "backslashreplace")
        named = {"number": line.number, "digest": line.digest, "num_tokens": 0}
        self.rows.append(named | {"answer": told, "is_error": is_error})


class Worker:
    """An actor of Ray Data's. It is given bytes of msgpack, and blocks of numbers and bytes."""

    def __init__(self, job: bytes) -> None:
        self._job = _JOBS.decode(job)
        self._llm = LLM(self._job.model, draft=self._job.draft, config=self._job.engine)
        self._answers = Answers(self._job.model, self._llm.tokenizer)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        kept = _Kept([])
        work = Batch(
            self._llm,
            self._answers,
            kept,
            self._job.params,
            cast("StructureOptions", self._job.structure),
            read_ahead=self._job.block_lines,
        )
        for _ in work.run(RawLine(**row) for row in block.to_pylist()):
            pass
        if kept.rows:
            kept.rows[0]["num_tokens"] = work.num_tokens
        return pyarrow.Table.from_pylist(kept.rows, schema=_ANSWERS)


@dataclass(slots=True)
class RayBatch:
    """`run` yields after each block. `workers` actors have `cpus` and `gpus` each."""

    job: Job
    file: AnswerFile
    workers: int
    cpus: int
    gpus: int = 0
    ordered: bool = True
    num_tokens: int = 0

    def run(self, lines: Iterator[RawLine]) -> Generator[None]:
        """All of `lines` that have no answer yet. Raises MachineError where Ray gives them up."""
        _quiet()
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise MachineError(
                f"there is no Ray cluster: {error}", hint="RAY_ADDRESS names one; unset, one starts"
            ) from None
        try:
            yield from self._map(lines)
        except RayError as error:
            why = str(error).strip().splitlines()[-1]
            raise MachineError(
                f"Ray gave the batch up: {why}", hint="the same again goes on"
            ) from error
        finally:
            ray.shutdown()

    def _map(self, lines: Iterator[RawLine]) -> Generator[None]:
        blocks = [ray.put(block) for block in self._blocks(lines)]
        if not blocks:
            return
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = self.ordered
        answers = ray.data.from_arrow_refs(blocks).map_batches(
            Worker,
            fn_constructor_args=(msgspec.msgpack.encode(self.job),),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=min(self.workers, len(blocks))),
            num_cpus=self.cpus,
            num_gpus=self.gpus,
        )
        for block in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in block.to_pylist():
                line = RawLine(row["number"], row["digest"], None)
                self.file.write(line, row["answer"].decode(), is_error=row["is_error"])
                self.num_tokens += row["num_tokens"]
            yield

    def _blocks(self, lines: Iterator[RawLine]) -> Iterator[pyarrow.Table]:
        """Ray keeps them where it has room, on a disk if need be."""
        asked = (line for line in lines if not self.file.has(line))
        while rows := [_row(line) for line in islice(asked, self.job.block_lines)]:
            yield pyarrow.Table.from_pylist(rows, schema=_ROWS)


def _row(line: RawLine) -> dict[str, Any]:
    return {"number": line.number, "digest": line.digest, "data": line.data}


def _quiet() -> None:
    """Our own lines tell how far it is."""
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.WARNING)
