"""The pair under test: how it is opened for each comparison, and what it is called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.api.llm import LLM
from outrider.api.plan import source_of
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.files import open_regular
from outrider.core.params import SamplingParams
from outrider.drafters.prediction import check_prediction
from outrider.models.json_object import JsonObject
from outrider.models.loading import resolve
from outrider.pairs.catalog import draft_of

_HEADER_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Subject:
    """A target, perhaps a draft model, and the user's settings. `draft` None: no draft model."""

    target: str
    draft: str | None
    config: EngineConfig
    params: SamplingParams

    @property
    def drafter(self) -> str:
        """What proposes under these settings; "none" is no speculation at all."""
        return source_of(resolve(self.target), self.draft, self.config).drafter

    @property
    def drafters(self) -> tuple[str, ...]:
        """What parity is checked for: the user's drafter, and look-ups for they need no model."""
        return tuple(dict.fromkeys((self.drafter, "ngram")))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(resolve(self.target))

    def open(self, config: EngineConfig) -> LLM:
        return LLM(self.target, draft=self.draft, config=config)


def subject_of(target: str, draft: str, config: EngineConfig, params: SamplingParams) -> Subject:
    """`draft` may be auto or none. Raises ConfigError for what there is nothing to certify of."""
    if draft == "none" and config.drafter == "auto":
        config = replace(config, drafter="ngram")
    named = {"auto": draft_of(target, config.drafter), "none": None}.get(draft, draft)
    found = Subject(target, named, config, params)
    if found.drafter == "none":
        raise ConfigError(
            "speculation is off, so there is nothing to certify.",
            hint="choose a drafter (--drafter auto) and a draft length (--k 4)",
        )
    check_prediction(params.prediction, drafter=found.drafter)
    return found


def fingerprint(name: str) -> str:
    """Twelve hex digits of a model's config.json and its safetensors headers.

    The headers name every tensor, its type, its shape and its place in the file; the weights
    themselves are not read, so two trainings of one architecture look alike.
    """
    folder = resolve(name)
    digest = hashlib.sha256()
    config = JsonObject.read(folder / "config.json").values
    digest.update(json.dumps(config, sort_keys=True).encode())
    for header in _headers(folder):
        digest.update(header)
    return digest.hexdigest()[:12]


def _headers(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.safetensors")):
        with open_regular(path) as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
            yield file.read(min(length, path.stat().st_size))
