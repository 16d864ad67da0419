"""Part three's runs: the user's own pair writes the same text with speculation and without it.

Plain decoding of each prompt, one at a time, is the reference. Then each drafter, draft length,
batch size and prompt chunk size writes the same prompts greedily, and once more with a temperature
under a sampler that ties text to the seed. Every token is compared. Greedy acceptance must be equal
as well, prompt by prompt, whatever the batch and the chunks: a drafter that saw another context
would draft other tokens long before it changed a text.

The arena holds BATCH sequences only, so that a prompt's pages are overwritten before it comes again
and every run reads it anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.api.llm import LLM
from outrider.api.plan import resolve_pair
from outrider.api.result import GenerationResult
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.draft import common_prefix
from outrider.core.errors import ConfigError
from outrider.core.files import open_regular
from outrider.core.params import SamplingParams
from outrider.core.plugins import COPY, drafter_named
from outrider.drafters.common.draft_model import why_no_copy
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.families import read_config
from outrider.models.gguf.reader import header_of
from outrider.models.loading import resolve
from outrider.pairs.catalog import draft_of
from outrider.plugins.proof.check import PROMPTS

_HEADER_LENGTH = 8


@dataclass(frozen=True, slots=True)
class ParitySubject:
    """A target, perhaps a draft model, and the user's settings. `draft` None: no draft model."""

    target: str
    draft: str | None
    config: EngineConfig
    params: SamplingParams

    @property
    def drafter(self) -> str:
        """The drafter under these settings; "none" is no speculation at all."""
        return resolve_pair(resolve(self.target), self.draft, self.config)[0].drafter.name

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters to check: the user's own, look-ups, since they need no model, and the copy
        that drafts by default."""
        folder = resolve(self.target)
        target = read_config(folder)
        copies = self.draft is None and not why_no_copy(folder, target, self.config)
        return tuple(dict.fromkeys((self.drafter, "ngram", *([COPY] if copies else []))))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(resolve(self.target))

    def open(self, config: EngineConfig) -> LLM:
        return LLM(self.target, draft=self.draft, config=config)


def subject_of(
    target: str, draft: str, config: EngineConfig, params: SamplingParams
) -> ParitySubject:
    """Return a subject; `draft` may be auto or none. Raises ConfigError if nothing drafts."""
    if draft == "none" and config.drafter == "auto":
        config = replace(config, drafter="ngram")
    named = {"auto": draft_of(target, config.drafter), "none": None}.get(draft, draft)
    found = ParitySubject(target, named, config, params)
    if not drafter_named(found.drafter).drafts:
        raise ConfigError(
            "speculation is off, so there is nothing to certify.",
            hint="choose a drafter (--drafter auto) and a draft length (--k 4)",
        )
    if "prediction" in drafter_named(found.drafter).must_have and not params.prediction:
        raise ConfigError(
            f"drafter {found.drafter!r} drafts nothing without a guess of the text, so there is "
            "nothing to certify.",
            hint=f"--drafter {found.drafter} needs --prediction TEXT",
        )
    return found


def fingerprint(name: str) -> str:
    """Return twelve hex digits of a model's config.json and the headers of its files.

    The headers name every tensor, its type, its shape and its offset in the file; the weights
    themselves are not read, so two trainings of one architecture look alike.
    """
    folder = resolve(name)
    digest = hashlib.sha256()
    config = open_checkpoint(folder).document(CONFIG).values
    digest.update(json.dumps(config, sort_keys=True).encode())
    for header in _headers(folder):
        digest.update(header)
    return digest.hexdigest()[:12]


def _headers(folder: Path) -> Iterator[bytes]:
    """Yield headers of safetensors, or of a GGUF file and those that belong to it."""
    if open_checkpoint(folder).is_gguf:
        for entry in header_of(folder).entries.values():
            location = f"{entry.path.name} {entry.offset}"
            yield f"{entry.name} {entry.kind.name} {entry.shape} {location}\n".encode()
        return
    for path in sorted(folder.glob("*.safetensors")):
        with open_regular(path) as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
            yield file.read(min(length, path.stat().st_size))


BATCH = 4
KS = (1, 4)
CHUNKS = (16, 64)
TEMPERATURE = 0.8
# Samplers whose text is a function of the seed, so that it can be compared at a temperature.
SEEDED = ("coupled", "match")
_LEAST_TOKENS = 16

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCell:
    """One configuration that writes all prompts; `together` of them are in flight at once."""

    drafter: str
    k: int
    chunk: int
    together: int
    params: SamplingParams
    sampler: str
    controller: str = "fixed"

    @property
    def name(self) -> str:
        how = "greedy" if self.params.greedy else f"{self.sampler} at {self.params.temperature:g}"
        where = f"batch {self.together}, chunks of {self.chunk}"
        length = f"K={self.k}" if self.controller == "fixed" else f"{self.controller} to {self.k}"
        return f"{how}, {self.drafter} {length}, {where}"

    @property
    def same_drafts(self) -> tuple[str, int, str, bool, str]:
        """The key of cells that must draft and accept alike."""
        return self.drafter, self.k, self.sampler, self.params.greedy, self.controller


@dataclass(frozen=True, slots=True)
class CellTexts:
    """A cell's texts, and how many tokens were drafted and accepted for each prompt."""

    cell: ParityCell
    texts: tuple[Ids, ...]
    acceptance: tuple[tuple[int, int], ...]
    exact_kernels: bool


@dataclass(frozen=True, slots=True)
class ParityTask:
    """Prompts as ids, and the settings that all cells share."""

    subject: ParitySubject
    prompts: tuple[Ids, ...]
    greedy: SamplingParams
    seeded: SamplingParams

    @property
    def seeded_sampler(self) -> str:
        own = self.subject.config.sampler
        return own if own in SEEDED else SEEDED[0]

    @property
    def largest_k(self) -> int:
        return max(*KS, self.subject.config.most_k)

    def plain(self, params: SamplingParams, sampler: str) -> CellTexts:
        """Return the reference texts, without a drafter."""
        return self.write([self._cell("none", 0, params, sampler)])[0]

    def groups(self) -> Iterator[list[ParityCell]]:
        """Yield cells by the engine that runs them; opening one may take a while."""
        config = self.subject.config
        for drafter in self.subject.drafters:
            for k in sorted({*KS, config.most_k}):
                yield self._both(drafter, k, self.greedy, config.sampler)
            yield self._both(drafter, self.largest_k, self.seeded, self.seeded_sampler)
        first = self._both(self.subject.drafter, self.largest_k, self.greedy, config.sampler)[0]
        for chunk in CHUNKS:
            yield [replace(first, chunk=chunk)]
        if config.resolved_controller != first.controller:
            yield [replace(first, controller=config.resolved_controller)]

    def _both(self, drafter: str, k: int, params: SamplingParams, sampler: str) -> list[ParityCell]:
        alone = self._cell(drafter, k, params, sampler)
        return [replace(alone, together=BATCH), alone]

    def _cell(self, drafter: str, k: int, params: SamplingParams, sampler: str) -> ParityCell:
        chunk = self.subject.config.prefill_chunk
        return ParityCell(
            drafter=drafter, k=k, chunk=chunk, together=1, params=params, sampler=sampler
        )

    def write(self, group: Sequence[ParityCell]) -> list[CellTexts]:
        llm = self.subject.open(self.config_of(group[0]))
        return [
            CellTexts(
                cell,
                tuple(result.token_ids for result in results),
                tuple((r.stats.num_drafted, r.stats.num_accepted) for r in results),
                llm.kernels.exact,
            )
            for cell in group
            for results in [_generate(llm, self.prompts, cell)]
        ]

    def config_of(self, cell: ParityCell) -> EngineConfig:
        config = self.subject.config
        longest = max(map(len, self.prompts)) + self.greedy.max_tokens + self.largest_k + 1
        pages = -(-longest // config.page_size)
        return replace(
            config,
            drafter=cell.drafter,
            k=cell.k,
            sampler=cell.sampler,
            prefill_chunk=cell.chunk,
            batch_size=BATCH,
            arena_tokens=BATCH * pages * config.page_size,
            controller=cell.controller,
        )


def _generate(llm: LLM, prompts: Sequence[Ids], cell: ParityCell) -> list[GenerationResult]:
    guess = cell.params.prediction if "prediction" in drafter_named(cell.drafter).must_have else ""
    params = replace(cell.params, prediction=guess)
    if cell.together == BATCH:
        return llm.generate(prompts, params)
    return [llm.generate([prompt], params)[0] for prompt in prompts]


def task(subject: ParitySubject, *, max_tokens: int) -> ParityTask:
    """Return the prompts that fit the pair's window, with at most `max_tokens` for each.

    Opens the pair to find out. Raises ConfigError if no prompt fits.
    """
    largest_k = max(*KS, subject.config.most_k)
    llm = subject.open(replace(subject.config, k=largest_k, batch_size=1, controller="fixed"))
    wanted = replace(subject.params, max_tokens=max_tokens, min_tokens=0)
    num_fitting: dict[Ids, int] = {}
    for prompt in PROMPTS:
        ids = tuple(llm.tokenizer.encode(prompt))
        with suppress(ConfigError):  # this one does not fit
            num_fitting[ids] = llm.fitting_tokens(ids, wanted)
    least = min(_LEAST_TOKENS, max_tokens)
    fitting = {ids: num for ids, num in num_fitting.items() if num >= least}
    if not fitting:
        raise ConfigError(
            "no prompt of the certificate fits the window.",
            hint="raise --context if the models allow it",
        )
    params = replace(
        wanted,
        max_tokens=min(fitting.values()),
        n=1,
        logprobs=False,
        top_logprobs=0,
        round_events=False,
        temperature=0.0,
    )
    drawn = replace(
        params,
        max_tokens=max(params.max_tokens // 2, 1),
        temperature=subject.params.temperature or TEMPERATURE,
    )
    return ParityTask(subject, tuple(fitting), params, drawn)


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first difference of a text from the plain one: token number `position` of the prompt's
    text. A token is None if its text had ended."""

    cell: ParityCell
    prompt: int
    position: int
    plain: int | None
    speculative: int | None


def differences(written: CellTexts, plain: CellTexts) -> list[TokenDifference]:
    """Return the first difference of each prompt that has one."""
    found: list[TokenDifference] = []
    for prompt, (text, wanted) in enumerate(zip(written.texts, plain.texts, strict=True)):
        if text != wanted:
            at = common_prefix(text, wanted)
            ours, theirs = ((*ids, None)[at] for ids in (text, wanted))
            found.append(TokenDifference(written.cell, prompt, at, plain=theirs, speculative=ours))
    return found
