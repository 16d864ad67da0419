"""Prompts by domain, with their lengths in tokens: what a benchmark reads, and where it came from.

A data set is built from texts and a tokenizer, saved as one JSON file, and loaded again without
either. Prompts are named by domain and place (`code_000`), so that two runs mean the same prompt by
the same name; the fingerprint of a domain's texts says whether they do.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.bench.provenance import write_json
from outrider.bench.records import RecordError, made, parse
from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.files import Kind, read_text

PER_DOMAIN = 50
TINY_PER_DOMAIN = 5
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_count` is by the tokenizer of the data set."""

    prompt_id: str
    domain: str
    raw_text: str
    token_count: int


@dataclass(frozen=True, slots=True)
class DomainStats:
    """Lengths of one domain's prompts, in tokens."""

    domain: str
    source: str
    n: int
    min: int
    mean: float
    max: int


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """`tokenizer` names the model whose tokenizer counted; `sources` says for each domain whether
    its prompts are built in or which published set they are from."""

    prompts: tuple[Prompt, ...]
    tokenizer: str
    sources: Mapping[str, str]

    @classmethod
    def build(
        cls,
        texts: Mapping[str, Sequence[str]],
        count_tokens: Callable[[str], int],
        *,
        tokenizer: str,
        sources: Mapping[str, str],
    ) -> PromptDataset:
        """The texts of each domain, in their order."""
        prompts = (
            Prompt(f"{domain}_{i:03d}", domain, text, count_tokens(text))
            for domain, listed in texts.items()
            for i, text in enumerate(listed)
        )
        return cls(tuple(prompts), tokenizer, dict(sources))

    @classmethod
    def load(cls, path: Path) -> PromptDataset:
        """Raises ConfigError for a file that `save` did not write."""
        hint = f"write it with `outrider prompts --output {path}`"
        try:
            return _dataset(parse(read_text(path, Kind.PROMPTS)))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}.", hint=hint) from None
        except (RecordError, UnicodeDecodeError) as error:
            found = f"{path} is not a saved set of prompts: {error}."
            raise ConfigError(found, hint=hint) from None

    def save(self, path: Path) -> None:
        rows = [asdict(prompt) for prompt in self.prompts]
        head = {"schema": _SCHEMA, "tokenizer": self.tokenizer, "sources": dict(self.sources)}
        write_json(path, {**head, "prompts": rows})

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def domains(self) -> tuple[str, ...]:
        """In order of their first prompts."""
        return tuple(dict.fromkeys(prompt.domain for prompt in self.prompts))

    def get_all(self) -> tuple[Prompt, ...]:
        return self.prompts

    def get_by_domain(self, domain: str) -> tuple[Prompt, ...]:
        """Raises ConfigError for a domain that the set has not."""
        if domain not in self.domains:
            raise ConfigError(f"no domain {domain!r}.", hint=did_you_mean(domain, self.domains))
        return tuple(prompt for prompt in self.prompts if prompt.domain == domain)

    def tiny(self, per_domain: int = TINY_PER_DOMAIN) -> PromptDataset:
        """The first few prompts of every domain."""
        kept = [p for domain in self.domains for p in self.get_by_domain(domain)[:per_domain]]
        return PromptDataset(tuple(kept), self.tokenizer, self.sources)

    def statistics(self) -> list[DomainStats]:
        found: list[DomainStats] = []
        for domain in self.domains:
            lengths = [prompt.token_count for prompt in self.get_by_domain(domain)]
            found.append(
                DomainStats(
                    domain=domain,
                    source=self.sources[domain],
                    n=len(lengths),
                    min=min(lengths),
                    mean=round(statistics.mean(lengths), 1),
                    max=max(lengths),
                )
            )
        return found

    def fingerprint(self, domain: str) -> str:
        """12 hexadecimal digits that change with any text of `domain`."""
        return fingerprint([prompt.raw_text for prompt in self.get_by_domain(domain)])


@dataclass(frozen=True, slots=True)
class _Saved:
    """The fields of a file."""

    schema: int
    tokenizer: str
    sources: Mapping[str, str]
    prompts: Sequence[Mapping[str, Any]]


def _dataset(record: Mapping[str, Any]) -> PromptDataset:
    """Raises RecordError for what `save` would not write."""
    if record.get("schema") != _SCHEMA:
        raise RecordError(f"its schema is {record.get('schema')!r:.40}")
    saved = made(_Saved, record)
    prompts = tuple(_prompt(i, row) for i, row in enumerate(saved.prompts, start=1))
    if len({prompt.prompt_id for prompt in prompts}) < len(prompts):
        raise RecordError("two prompts have one name")
    for domain in {prompt.domain for prompt in prompts} - saved.sources.keys():
        raise RecordError(f"nothing says where {domain!r:.40} is from")
    return PromptDataset(prompts, saved.tokenizer, saved.sources)


def _prompt(number: int, row: Mapping[str, Any]) -> Prompt:
    """Entry `number` of a file, counted from 1."""
    try:
        return made(Prompt, row)
    except RecordError as error:
        raise RecordError(f"in prompt {number}, {error}") from None


def fingerprint(texts: Sequence[str]) -> str:
    """12 hexadecimal digits of `texts` in their order."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:12]
