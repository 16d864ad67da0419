"""Prompts from elsewhere: published sets fetched from the Hugging Face hub, and a user's file.

None of the sets is part of this package; articles belong to their publishers. The sets are parquet
files, whose reader (`pyarrow`) comes with the extra `data`; its absence is said and not worked
around. A user's file of questions has the format of Spec-Bench: each line has a `category` and
`turns`, of which the first is the prompt (Xia et al., "Unlocking Efficiency in Large Language Model
Inference", 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.core.errors import CheckpointError, ConfigError, MachineError
from outrider.core.files import FileKind, read_text
from outrider.core.plugins import install_command
from outrider.models.names import HubName
from outrider_lab.bench.workload import SUMMARIZE
from outrider_lab.measure.store import RecordError, parse

MAX_ARTICLE_TOKENS = 512
_BUILTIN_HINT = "`--source builtin` needs no network"


@dataclass(frozen=True, slots=True)
class Published:
    """A data set on the hub: which of its files to read, and how a row becomes a prompt.

    `max_tokens` bounds the article; the request below it is not counted.
    """

    repo: str
    files: str
    text_of: Callable[[Mapping[str, Any]], str | None]
    max_tokens: int | None = None


def _instruction(row: Mapping[str, Any]) -> str | None:
    """Only instructions that need no further input are prompts by themselves."""
    return None if row.get("input") else str(row["instruction"])


def _translation(row: Mapping[str, Any]) -> str:
    return f"Translate German to English: {row['translation']['de']}"


def _with_context(row: Mapping[str, Any]) -> str:
    return f"{row['context']}\n\nQuestion: {row['question']}\nAnswer:"


PUBLISHED: Mapping[str, Published] = {
    "code": Published(
        "openai/openai_humaneval", "openai_humaneval/test-*.parquet", lambda row: str(row["prompt"])
    ),
    "conversation": Published("tatsu-lab/alpaca", "data/train-*.parquet", _instruction),
    "summarization": Published(
        "abisee/cnn_dailymail",
        "3.0.0/test-*.parquet",
        lambda row: str(row["article"]) + SUMMARIZE,
        max_tokens=MAX_ARTICLE_TOKENS,
    ),
    "maths": Published(
        "openai/gsm8k", "main/test-*.parquet", lambda row: f"Question: {row['question']}\nAnswer:"
    ),
    "translation": Published("wmt/wmt14", "de-en/test-*.parquet", _translation),
    "retrieval": Published("rajpurkar/squad", "plain_text/validation-*.parquet", _with_context),
}


def published_texts(domain: str, num: int, count_tokens: Callable[[str], int]) -> list[str]:
    """The first `num` prompts of the domain's published set that are short enough.

    Raises MachineError if the set cannot be fetched or read; its message says why.
    """
    if domain not in PUBLISHED:
        raise MachineError(f"there is no published set for {domain}.", hint=_BUILTIN_HINT)
    chosen = PUBLISHED[domain]
    read_rows = _parquet_reader()
    texts: list[str] = []
    for row in read_rows(_download(chosen)):
        text = chosen.text_of(row)
        if text is None or not _fits(text, chosen.max_tokens, count_tokens):
            continue
        texts.append(text)
        if len(texts) == num:
            break
    return texts


def _fits(text: str, max_tokens: int | None, count_tokens: Callable[[str], int]) -> bool:
    return max_tokens is None or count_tokens(text.removesuffix(SUMMARIZE)) <= max_tokens


def _parquet_reader() -> Callable[[Path], Iterator[Mapping[str, Any]]]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise MachineError(
            "the published sets are parquet files, and no parquet reader (pyarrow) is installed.",
            hint=f"{install_command('data')}; {_BUILTIN_HINT}",
        ) from None

    def read(path: Path) -> Iterator[Mapping[str, Any]]:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()

    return read


def _download(chosen: Published) -> Path:
    """The set's file, from the local cache or from the hub."""
    from huggingface_hub import (
        HfApi,
        snapshot_download,  # pyright: ignore[reportUnknownVariableType]
    )
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.hf_api import DatasetInfo

    from outrider.models.hub import TIMEOUT, asked

    def fetched(*, local: bool) -> list[Path]:
        # Prompts, which are read as data; records have their digest.
        folder = snapshot_download(
            chosen.repo,
            repo_type="dataset",
            allow_patterns=[chosen.files],
            local_files_only=local,
        )
        return sorted(Path(folder).glob(chosen.files))

    def ask() -> DatasetInfo:
        return HfApi().dataset_info(chosen.repo, timeout=TIMEOUT)

    try:
        found = list[Path]()
        with suppress(LocalEntryNotFoundError):
            found = fetched(local=True)
        if not found:
            asked(HubName(chosen.repo), ask)
            found = fetched(local=False)
    except (OSError, HFValidationError, CheckpointError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise MachineError(
            f"{chosen.repo} cannot be fetched from the hub: {reason}", hint=_BUILTIN_HINT
        ) from error
    if not found:
        raise MachineError(f"{chosen.repo} has no file {chosen.files}.", hint=_BUILTIN_HINT)
    return found[0]


# Categories that are a domain of ours; all others are conversation.
_DOMAINS: Mapping[str, str] = {
    "translation": "translation",
    "summarization": "summarization",
    "math_reasoning": "maths",
    "math": "maths",
    "rag": "retrieval",
    "coding": "code",
}
_FORMAT = '{"category": "translation", "turns": ["..."]}'


def questions_of(path: Path) -> dict[str, list[str]]:
    """First turns by domain, in the order of the file.

    Raises ConfigError, with the number of the line, for a file of something else.
    """
    try:
        lines = read_text(path, FileKind.PROMPTS).splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text.") from None
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            domain, text = _question(path, number, line)
            found.setdefault(domain, []).append(text)
    if not found:
        raise ConfigError(f"{path} holds no question.", hint=f"a line is {_FORMAT}")
    return found


def _question(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row: Mapping[str, Any] = parse(line)
    except RecordError as error:
        raise _unreadable(path, number, str(error)) from None
    turns, category = row.get("turns"), row.get("category")
    if not isinstance(category, str):
        raise _unreadable(path, number, "no category")
    match turns:
        case [str() as first, *_] if first:
            return _DOMAINS.get(category, "conversation"), first
        case _:
            raise _unreadable(path, number, "no turns")


def _unreadable(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {what}.", hint=f"a line is {_FORMAT}")
