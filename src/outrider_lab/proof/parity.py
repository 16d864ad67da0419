"""Part three's runs: the user's own pair writes the same text with speculation and without it.

Plain decoding of each prompt, one at a time, is the reference. Then each drafter, draft length,
batch size and prompt chunk size writes the same prompts greedily, and once more with a temperature
under a sampler that ties text to the seed. Every token is compared. Greedy acceptance must be equal
as well, prompt by prompt, whatever the batch and the chunks: a drafter that saw another context
would draft other tokens long before it changed a text.

The arena holds BATCH sequences only, so that a prompt's pages are overwritten before it comes again
and every run reads it anew. Two more runs read none: prompts are known from before, in memory or in
a prompt store after a restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.api.found import found_drafts
from outrider.api.llm import LLM
from outrider.api.plan import resolve_pair
from outrider.api.result import GenerationResult
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.draft import common_prefix
from outrider.core.errors import ConfigError
from outrider.core.files import open_regular
from outrider.core.params import SamplingParams
from outrider.core.plugins import AUTO, COPY, drafter_named
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
    """A target, perhaps a draft model, and the user's settings. `draft` None: no draft model.
    `found` are the drafts that drafter auto takes without being named, by the kind of drafter."""

    target: str
    draft: str | None
    config: EngineConfig
    params: SamplingParams
    found: Mapping[str, Path] = field(default_factory=dict[str, Path])

    @property
    def drafter(self) -> str:
        """The drafter under these settings; "none" is no speculation at all."""
        return resolve_pair(resolve(self.target), self.draft, self.config)[0].drafter.name

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters to check, each alone: the user's own, look-ups, since they need no model,
        the copy in fewer bits where there may be one, and all others that drafter auto takes."""
        folder = resolve(self.target)
        target = read_config(folder)
        copies = self.draft is None and not why_no_copy(folder, target, self.config)
        names = (self.drafter, "ngram", *([COPY] if copies else []), *self.found)
        return tuple(dict.fromkeys(names))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(resolve(self.target))

    def open(self, config: EngineConfig) -> LLM:
        """The pair under other settings; a drafter that auto found drafts from its folder."""
        folder = self.found.get(config.drafter)
        named = folder is not None and folder != resolve(self.target)
        return LLM(self.target, draft=str(folder) if named else self.draft, config=config)


def subject_of(
    target: str, draft: str, config: EngineConfig, params: SamplingParams
) -> ParitySubject:
    """Return a subject; `draft` may be auto or none. Raises ConfigError if nothing drafts."""
    if draft == "none" and config.drafter == "auto":
        config = replace(config, drafter="ngram")
    named = {"auto": draft_of(target, config.drafter), "none": None}.get(draft, draft)
    found = ParitySubject(target, named, config, params, _found(target, named, config))
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


def _found(target: str, draft: str | None, config: EngineConfig) -> Mapping[str, Path]:
    if draft is not None or config.drafter != AUTO:
        return {}
    folder = resolve(target)
    drafts = found_drafts(folder, read_config(folder), config).drafts
    return {one.kind: one.folder for one in drafts}


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
# Endings of the names of cells whose prompts were read before.
KNOWN, RESTARTED = ", prompts known", ", prompts known after a restart"
_SMALL_PAGE = 4
KS = (1, 4)
CHUNKS = (16, 64)
TEMPERATURE = 0.8
# Samplers whose text is a function of the seed, so that it can be compared at a temperature.
SEEDED = ("coupled", "match")
_LEAST_TOKENS = 16

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCell:
    """One configuration that writes all prompts; `together` of them are in flight at once. With
    `known`, KNOWN or RESTARTED, prompts were read before: in the same engine, or before it was
    closed and opened again over a prompt store."""

    drafter: str
    k: int
    chunk: int
    together: int
    params: SamplingParams
    sampler: str
    controller: str = "fixed"
    known: str = ""

    @property
    def name(self) -> str:
        how = "greedy" if self.params.greedy else f"{self.sampler} at {self.params.temperature:g}"
        where = f"batch {self.together}, chunks of {self.chunk}"
        length = f"K={self.k}" if self.controller == "fixed" else f"{self.controller} to {self.k}"
        return f"{how}, {self.drafter} {length}, {where}{self.known}"

    @property
    def same_drafts(self) -> tuple[object, ...]:
        """The key of cells that must draft and accept alike. A cell is like no other if its drafts
        depend on other texts, which come in another order there, or on measured times."""
        key = (self.drafter, self.k, self.sampler, self.params.greedy, self.controller)
        if self.drafter != AUTO and drafter_named(self.drafter).keeps_apart:
            return (*key, self.known)
        return (*key, self.known, self.together, self.chunk)


@dataclass(frozen=True, slots=True)
class CellTexts:
    """A cell's texts, how many tokens were drafted and accepted for each prompt, and how many
    tokens of all prompts were known."""

    cell: ParityCell
    texts: tuple[Ids, ...]
    acceptance: tuple[tuple[int, int], ...]
    exact_kernels: bool
    num_known: int = 0


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
        """Yield cells by the engine that runs them; opening one may take a while. The first ones
        are those of the largest K of every drafter, for runs that end early."""
        config, drafters = self.subject.config, self.subject.drafters
        for drafter in drafters:
            yield self._both(drafter, self.largest_k, self.greedy, config.sampler)
        yield from self._automatic()
        yield from self._known()
        for drafter in drafters:
            for k in sorted({*KS, config.most_k} - {self.largest_k}):
                yield self._both(drafter, k, self.greedy, config.sampler)
            yield self._both(drafter, self.largest_k, self.seeded, self.seeded_sampler)
        first = self._both(self.subject.drafter, self.largest_k, self.greedy, config.sampler)[0]
        for chunk in CHUNKS:
            yield [replace(first, chunk=chunk)]
        if config.resolved_controller != first.controller:
            yield [replace(first, controller=config.resolved_controller)]

    def _automatic(self) -> Iterator[list[ParityCell]]:
        """Yield cells in which drafter auto chooses among all drafts that it found."""
        if self.subject.found:
            for params, sampler in (
                (self.greedy, self.subject.config.sampler),
                (self.seeded, self.seeded_sampler),
            ):
                both = self._both(AUTO, self.largest_k, params, sampler)
                yield [replace(cell, controller=AUTO) for cell in both]

    def _known(self) -> Iterator[list[ParityCell]]:
        """Yield cells whose prompts were read before."""
        drafter = AUTO if self.subject.found else self.subject.drafter
        cell = self._both(drafter, self.largest_k, self.greedy, self.subject.config.sampler)[0]
        controller = AUTO if self.subject.found else "fixed"
        for known in (KNOWN, RESTARTED):
            yield [replace(cell, controller=controller, known=known)]

    def _both(self, drafter: str, k: int, params: SamplingParams, sampler: str) -> list[ParityCell]:
        alone = self._cell(drafter, k, params, sampler)
        return [replace(alone, together=BATCH), alone]

    def _cell(self, drafter: str, k: int, params: SamplingParams, sampler: str) -> ParityCell:
        chunk = self.subject.config.most_chunk
        return ParityCell(
            drafter=drafter, k=k, chunk=chunk, together=1, params=params, sampler=sampler
        )

    def write(self, group: Sequence[ParityCell]) -> list[CellTexts]:
        if group[0].known:
            return [self._again(cell) for cell in group]
        with closing(self.subject.open(self.config_of(group[0]))) as llm:
            return [self._written(llm, cell) for cell in group]

    def _again(self, cell: ParityCell) -> CellTexts:
        """The texts of a cell whose prompts are known."""
        with TemporaryDirectory(prefix="outrider-verify-") as folder:
            config = self.config_of(cell)
            if cell.known == RESTARTED:
                config = replace(config, prompt_store=folder)
                with closing(self.subject.open(config)) as llm:
                    self._written(llm, cell)
            with closing(self.subject.open(config)) as llm:
                if cell.known == KNOWN:
                    self._written(llm, cell)
                return self._written(llm, cell)

    def _written(self, llm: LLM, cell: ParityCell) -> CellTexts:
        results = _generate(llm, self.prompts, cell)
        return CellTexts(
            cell,
            tuple(result.token_ids for result in results),
            tuple((r.stats.num_drafted, r.stats.num_accepted) for r in results),
            llm.kernels.exact,
            sum(result.num_cached_tokens for result in results),
        )

    def config_of(self, cell: ParityCell) -> EngineConfig:
        config = self.subject.config
        longest = max(map(len, self.prompts)) + self.greedy.max_tokens + self.largest_k + 1
        num_texts = BATCH
        if cell.known:
            # Short prompts fill pages, and all texts stay in memory.
            num_texts += len(self.prompts)
            config = replace(config, page_size=_SMALL_PAGE, state_checkpoints=4 * num_texts)
        pages = -(-longest // config.page_size)
        return replace(
            config,
            drafter=cell.drafter,
            k=cell.k,
            sampler=cell.sampler,
            prefill_chunk=cell.chunk,
            batch_size=BATCH,
            arena_tokens=num_texts * pages * config.page_size,
            controller=cell.controller,
        )


def _generate(llm: LLM, prompts: Sequence[Ids], cell: ParityCell) -> list[GenerationResult]:
    must_have = () if cell.drafter == AUTO else drafter_named(cell.drafter).must_have
    guess = cell.params.prediction if "prediction" in must_have else ""
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
