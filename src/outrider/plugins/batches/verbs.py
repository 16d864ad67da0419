"""`outrider batch`: answer every line of a JSON lines or parquet file, and continue after errors.

Exit code 0 means that every line has an answer, 1 that some answers are errors.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider import __version__
from outrider.cli.call import Call
from outrider.cli.output import Meter, answer, duration, say
from outrider.cli.session import opened, structure_of, to_load
from outrider.cli.verb_options import BatchOptions
from outrider.core.errors import ConfigError, MachineError
from outrider.core.params import SamplingParams
from outrider.core.plugins import install_command
from outrider.plugins.batches.lines import (
    AnswerFile,
    Answers,
    RawLine,
    raw_line,
    raw_lines,
    read_line,
)
from outrider.plugins.batches.run import Batch

if TYPE_CHECKING:
    from outrider.plugins.batches.on_ray import RayBatch


def lines_of(path: Path) -> Iterator[RawLine]:
    """Yield the lines of a file. Raises MachineError if it cannot be read."""
    return _rows(path) if path.suffix == ".parquet" else raw_lines(path)


def _rows(path: Path) -> Iterator[RawLine]:
    """Yield the rows of a parquet file as JSON lines; columns that are null are left out."""
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise MachineError(
            f"{path} is a parquet file, and no reader for it (pyarrow) is installed.",
            hint=install_command("data"),
        ) from None
    number = 0
    try:
        for block in parquet.ParquetFile(path).iter_batches(1024):
            for row in block.to_pylist():
                number += 1
                record = {name: value for name, value in row.items() if value is not None}
                yield raw_line(number, json.dumps(record, ensure_ascii=False).encode())
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}, row {number}: {error}.", hint="columns as the keys of a line: prompt, seed"
        ) from None


# Blocks of lines for each Ray actor, so that at the end no actor idles for long.
_BLOCKS_EACH = 8
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ANY = SamplingParams()
# Seconds between two reports of progress: on a terminal, and elsewhere.
_SHOW_SECONDS, _LOG_SECONDS = 0.5, 10.0


def batch(call: Call[BatchOptions]) -> int:
    options, (source, target) = call.options, _files(call.arguments)
    if "workers" in call.given and not options.ray:
        raise ConfigError("--workers is only for --ray.", hint="--ray --workers N")
    with AnswerFile(target, fresh=options.fresh) as file:
        num_lines, names = 0, array("Q")
        for line in lines_of(source):
            # An output file with answers of other lines is an error before a model is loaded.
            file.has(line)
            num_lines += 1
            names.extend(map(_digest, _CUSTOM_ID.findall(line.data or b"")))
        if len(np.unique(names)) < len(names):
            _check_ids(source)
        del names
        work, run = _on_ray(call, file, num_lines) if options.ray else _here(call, file)
        meter = Meter("", num_lines, unit="lines", hidden=options.quiet)
        progress = Progress(num_lines, file, not options.quiet, meter)
        try:
            with meter:
                for _ in work.run(lines_of(source)):
                    progress.show(work.num_tokens)
        finally:
            if progress.shown:
                say(progress.text(work.num_tokens))
        if progress.shown and file.num_errors:
            say(f"why a line failed is its `error` in {target}")
        record = progress.record(work.num_tokens) | {"run": run}
        answer(options, record, None)
        return 1 if file.num_errors else 0


def _digest(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest())


def _check_ids(source: Path) -> None:
    """Check that OpenAI's lines have different custom_ids. Raises ConfigError."""
    seen: dict[str, int] = {}
    for line in lines_of(source):
        read = read_line(line.number, (line.data or b"").decode("utf-8-sig", "replace"), _ANY)
        if read.kind == "plain" or read.custom_id is None:
            continue
        first = seen.setdefault(read.custom_id, line.number)
        if first != line.number:
            raise ConfigError(
                f"{source}, lines {first} and {line.number}: both have the custom_id "
                f"{read.custom_id[:80]!r}, which identifies their answers.",
                hint="give each line a custom_id of its own",
            )


def _here(call: Call[BatchOptions], file: AnswerFile) -> tuple[Batch, dict[str, object]]:
    """Return the batch for this machine, and its entry in the record of the run."""
    options = call.options
    llm, record = opened(options, call.resolved)
    work = Batch(
        llm,
        Answers(call.resolved.program().target, llm.tokenizer),
        file,
        call.resolved.sampling(),
        structure_of(options),
        ordered=not options.unordered,
        read_ahead=options.read_ahead,
    )
    return work, record


def _on_ray(
    call: Call[BatchOptions], file: AnswerFile, num_lines: int
) -> tuple[RayBatch, dict[str, object]]:
    """Return the same for a Ray cluster, after checking that the model can be loaded."""
    from outrider.plugins.cluster.settings import check_ray

    check_ray()
    if call.options.replicas > 1 or call.options.devices:
        raise ConfigError("--replicas and --devices are not for --ray.", hint="--workers N")
    from outrider.api.plan import plan_pair
    from outrider.plugins.batches.on_ray import Job, RayBatch

    options, (target, draft, engine) = call.options, to_load(call.resolved)
    engine = replace(engine, threads=engine.threads or 1)
    plan_pair(target, draft, engine)
    block_lines = max(1, (num_lines - file.num_answers) // (_BLOCKS_EACH * options.workers))
    job = Job(
        model=target,
        draft=draft,
        engine=engine,
        params=call.resolved.sampling(),
        structure=dict(structure_of(options)),
        block_lines=min(block_lines, options.read_ahead),
    )
    ranks = engine.tensor_parallel
    work = RayBatch(
        job,
        file,
        workers=options.workers,
        cpus=ranks * engine.threads,
        gpus=ranks if engine.device.startswith("cuda") else 0,
        ordered=not options.unordered,
    )
    return work, {"version": __version__, "settings": call.resolved.decided()}


def _files(words: tuple[str, ...]) -> tuple[Path, Path]:
    if len(words) != 2:
        raise ConfigError(
            "batch takes a file to read and a file to write.",
            hint="outrider batch prompts.jsonl answers.jsonl",
        )
    source, target = map(Path, words)
    if source.resolve() == target.resolve():
        raise ConfigError(f"{source} cannot be read and written at once.", hint="name two files")
    if not source.exists():
        raise ConfigError(f"{source}: no such file.", hint='lines such as {"prompt": "hello"}')
    return source, target


@dataclass(slots=True)
class Progress:
    """Progress of a batch: a bar on a terminal, else some lines. Rates are of this run."""

    num_lines: int
    file: AnswerFile
    shown: bool
    meter: Meter
    began: float = field(default_factory=monotonic)
    num_before: int = field(init=False)
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self.num_before = self.file.num_answers
        self._last = self.began
        if self.shown and self.num_before:
            say(f"{self.num_before:,} of {self.num_lines:,} lines are answered")

    def show(self, num_tokens: int) -> None:
        every = _SHOW_SECONDS if self.meter.drawn else _LOG_SECONDS
        if not self.shown or monotonic() - self._last < every:
            return
        self._last = monotonic()
        if self.meter.drawn:
            self.meter.reach(self.file.num_answers, title=" · ".join(self._rates(num_tokens)))
        else:
            say(self.text(num_tokens))

    def text(self, num_tokens: int) -> str:
        number = self.file.num_answers
        seconds = monotonic() - self.began
        parts = [f"{number:,} of {self.num_lines:,} lines", *self._rates(num_tokens)]
        rate = (number - self.num_before) / max(seconds, 1e-9)
        if rate and number < self.num_lines:
            parts.append(f"{duration((self.num_lines - number) / rate)} left")
        elif number >= self.num_lines:
            parts.append(duration(seconds))
        return " · ".join(parts)

    def _rates(self, num_tokens: int) -> list[str]:
        seconds = max(monotonic() - self.began, 1e-9)
        rate = (self.file.num_answers - self.num_before) / seconds
        failed = [f"{self.file.num_errors:,} failed"] if self.file.num_errors else []
        return [*failed, f"{rate:.1f} lines/s", f"{num_tokens / seconds:.0f} tokens/s"]

    def record(self, num_tokens: int) -> dict[str, object]:
        return {
            "lines": self.num_lines,
            "answered": self.file.num_answers - self.file.num_errors,
            "failed": self.file.num_errors,
            "answered_before": self.num_before,
            "tokens": num_tokens,
            "seconds": round(monotonic() - self.began, 3),
        }
