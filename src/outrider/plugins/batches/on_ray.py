# pyright: basic, reportMissingImports=false
"""Batches on a Ray cluster: Ray Data maps blocks of lines over actors that keep the model loaded.

The caller writes the file of answers, in the order of the lines or in the order in which blocks
end. If an actor dies, Ray maps its block again on another actor. The answer to a line depends on
the line alone, so it is the same.
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

from outrider.api.llm import LLM
from outrider.api.structure import StructureOptions
from outrider.core.config import EngineConfig
from outrider.core.errors import MachineError
from outrider.core.params import SamplingParams
from outrider.plugins.batches.lines import AnswerFile, Answers, RawLine
from outrider.plugins.batches.run import Batch

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
    """The model that an actor loads, and the settings that lines do not contain."""

    model: str
    draft: str | None
    engine: EngineConfig
    params: SamplingParams
    structure: dict[str, Any]
    block_lines: int


_JOBS: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


@dataclass(slots=True)
class _BlockAnswers:
    """Answers of one block, in the order of its lines. It stands in for an AnswerFile."""

    rows: list[dict[str, Any]]

    def has(self, line: RawLine) -> bool:
        del line
        return False

    def write(self, line: RawLine, answer: str, *, is_error: bool) -> None:
        data = answer.encode("utf-8", "backslashreplace")
        named = {"number": line.number, "digest": line.digest, "num_tokens": 0}
        self.rows.append(named | {"answer": data, "is_error": is_error})


class Worker:
    """An actor of Ray Data. Its arguments are bytes of msgpack, and blocks of numbers and bytes."""

    def __init__(self, job: bytes) -> None:
        self._job = _JOBS.decode(job)
        self._llm = LLM(self._job.model, draft=self._job.draft, config=self._job.engine)
        self._answers = Answers(self._job.model, self._llm.tokenizer)

    def __call__(self, block: pyarrow.Table) -> pyarrow.Table:
        answers = _BlockAnswers([])
        work = Batch(
            self._llm,
            self._answers,
            answers,
            self._job.params,
            cast("StructureOptions", self._job.structure),
            read_ahead=self._job.block_lines,
        )
        for _ in work.run(RawLine(**row) for row in block.to_pylist()):
            pass
        if answers.rows:
            answers.rows[0]["num_tokens"] = work.num_tokens
        return pyarrow.Table.from_pylist(answers.rows, schema=_ANSWERS)


@dataclass(slots=True)
class RayBatch:
    """A batch that runs on `workers` actors, each with `cpus` CPUs and `gpus` GPUs."""

    job: Job
    file: AnswerFile
    workers: int
    cpus: int
    gpus: int = 0
    ordered: bool = True
    num_tokens: int = 0

    def run(self, lines: Iterator[RawLine]) -> Generator[None]:
        """Answer all of `lines` that have no answer yet; yield after each block. Raises
        MachineError if there is no cluster, or if Ray gives up."""
        _quiet()
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise MachineError(
                f"there is no Ray cluster: {error}",
                hint="set RAY_ADDRESS to that of a cluster; without it, a local one starts",
            ) from None
        try:
            yield from self._map(lines)
        except RayError as error:
            why = str(error).strip().splitlines()[-1]
            raise MachineError(
                f"Ray gave up the batch: {why}", hint="run the same command again to continue"
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
        """Yield the unanswered lines in blocks. Ray's object store holds the blocks, and spills
        them to disk when it is full."""
        unanswered = (line for line in lines if not self.file.has(line))
        while rows := [_row(line) for line in islice(unanswered, self.job.block_lines)]:
            yield pyarrow.Table.from_pylist(rows, schema=_ROWS)


def _row(line: RawLine) -> dict[str, Any]:
    return {"number": line.number, "digest": line.digest, "data": line.data}


def _quiet() -> None:
    """Silence Ray's log below warnings: the program prints its own progress."""
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.WARNING)
