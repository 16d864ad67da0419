"""`LLM`, the Python API: load a pair once, then stream, generate and chat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Self, Unpack

from outrider.api.chat_messages import ChatOptions
from outrider.api.grammar import Grammar
from outrider.api.loading import check_names, load_pair
from outrider.api.memory import MemoryWatch, gauge
from outrider.api.output import OutputStream, RequestRouter
from outrider.api.profile import HasKernels
from outrider.api.prompts import Message, Prompt, conversation, one_prompt, several_prompts
from outrider.api.request import RequestHandle, RequestMaker, check_any
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.structure import RequestOptions, sampling_of
from outrider.api.text_stream import TextStream
from outrider.api.tokenizer import Tokenizer
from outrider.api.turns import OfOneProcess, Turns
from outrider.core.budget import JobTrace
from outrider.core.config import EngineConfig
from outrider.core.constraint import AllowedTokens
from outrider.core.errors import ConfigError, OutriderError, within_memory
from outrider.core.fields import size
from outrider.core.interrupts import deferred, deliver
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, engine_config, params_for_each, params_for_one
from outrider.core.protocols import Controller
from outrider.core.spec import ModelSpec
from outrider.engine.build import build_engine
from outrider.engine.requests import Counts
from outrider.kernels.kinds import pick_device
from outrider.kernels.operators import Kernels

EMBEDDED = "outrider/embedded"


class LLM(OfOneProcess):
    """A target model, perhaps a draft model, and an engine that runs requests on them.

    `model` and `draft` are aliases, folders or hub ids. The embedded target brings its own draft
    unless the configuration names another drafter. Fields of EngineConfig may be given as keywords,
    as in `LLM(model, drafter="ngram", quantise="int8")`. `on_job` hears of every job of every lane;
    `controller`, an object where given, chooses every round's budget. `weights_of` is an LLM of the
    same target, whose weights it uses where it can. Raises CheckpointError, VocabularyError,
    ConfigError or MachineError.

    Threads may share it: their calls take turns, job by job, and their requests share passes
    (api/turns.py). A forked child may not use it. Ctrl-C comes between jobs, and cancels what the
    interrupted call asked for; it can be used again. As a context manager it closes itself.
    """

    @within_memory("loading")
    def __init__(
        self,
        model: str | Path = EMBEDDED,
        *,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
        on_job: Callable[[JobTrace], None] | None = None,
        controller: Controller | str | None = None,
        weights_of: LLM | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_names(model=model, draft=draft)
        by_name = {"controller": controller} if isinstance(controller, str) else {}
        self.config = engine_config(config, {**options, **by_name})
        self.device = pick_device(self.config.device)
        self._memory = MemoryWatch(gauge(self.device), active=self.config.profile)
        shared = weights_of and weights_of._pair
        self._pair = load_pair(str(model), draft and str(draft), self.config, weights_of=shared)
        self._memory.end_load()
        self._router = RequestRouter(self._memory)
        self._engine = build_engine(
            self._pair.plan.resolved,
            self._pair,
            num_slots=self._pair.plan.num_slots,
            sink=self._router.record,
            jobs=on_job,
            controller=None if isinstance(controller, str) else controller,
        )
        self._router.engine = self._engine
        self._turns = Turns(self._engine.executor.is_here)
        self.requests = RequestMaker(self._pair, self._engine.residents.limits.longest)
        self._last: GenerationResult | None = None
        self._name = str(model)

    def __repr__(self) -> str:
        held = size(sum(self.memory.values()))
        drafter = "no drafter" if self.drafter == "none" else f"drafter {self.drafter}"
        return f"<LLM {self._name} on {self.device}: {drafter}, {held} of memory>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._pair.tokenizer

    @property
    def folder(self) -> Path:
        return self._pair.plan.folder

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._pair.stop_ids

    @property
    def spec(self) -> ModelSpec:
        return self._pair.target.spec

    @property
    def kernels(self) -> Kernels:
        return self._pair.target.kernels

    @property
    def models(self) -> Mapping[str, HasKernels]:
        """By the names target and, if there is one, draft."""
        found = (("target", self._pair.target), ("draft", self._pair.draft))
        return {role: model for role, model in found if model is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should hear once: fallbacks taken, limits that are not the defaults."""
        return (*self._pair.notes, *self._engine.residents.drafting.notes)

    @property
    def drafter(self) -> str:
        return self._engine.drafter.name

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those that a request may choose, the one in use first (SamplingParams.drafter)."""
        return self._pair.plan.resolved.choosable

    @property
    def k(self) -> int:
        """Draft tokens in a row at most; 0 where nothing is drafted."""
        return self._pair.plan.resolved.k

    @property
    def fixed_k(self) -> bool:
        return self._pair.plan.resolved.settings.controller == "fixed"

    @property
    def exact(self) -> bool:
        """Whether texts follow the target's own distribution: not with a lossy sampler."""
        return not self.k or self.config.claims_exact

    @property
    def free_tokens(self) -> int:
        """Arena tokens that no running request holds."""
        return self._pair.target.state.num_free_tokens

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of weights, arenas, scratch and logits of lanes, as reckoned before loading."""
        return {p.name: p.num_bytes for p in self._pair.memory if p.when == "held"}

    @property
    def last_result(self) -> GenerationResult:
        """The result of the newest request that ended."""
        if self._last is None:
            raise ConfigError("no request has ended yet.", hint="read a stream to its end first")
        return self._last

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        allowed: AllowedTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> TextStream:
        """Yield an event a round. Leaving early cancels the request and frees its memory.

        `options` are fields of SamplingParams, in place of those of `params`, and what the text
        must be (api/structure.py); `allowed` is a mask of one's own (core/constraint.py).
        Raises ConfigError at once when the prompt does not fit the window or `n` is above 1,
        and CapacityError on the first event asked for when the arena could never hold them.
        """
        params = params_for_one(params, sampling_of(options))
        with self._turns.call():
            ids = self.requests.ids(one_prompt(prompt))
            masked = self.requests.constraint(allowed, options)
            reader = self.requests.reader(ids, params, masked, live=True)
        drop = self._router.drop
        return TextStream(self._turns, reader, self._follow(reader), self._result, drop)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        allowed: AllowedTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Run all prompts, up to `batch_size` at once; `n` results for each, in order.

        A prompt is text, or ids as a list, an array or a tensor; rows of ids are prompts. `params`
        are one for all or one for each. A prompt that cannot be run has a result with its `error`,
        beside those of the others; where none can be run, the first error is raised.
        """
        batch = several_prompts(prompts)
        each = [one.seeded() for one in params_for_each(params, len(batch), sampling_of(options))]
        with self._turns.call():
            masked = self.requests.constraint(allowed, options)
            groups = [
                self.requests.group(prompt, wanted, masked)
                for prompt, wanted in zip(self.requests.ids_of_all(batch), each, strict=True)
            ]
            self._run([group for group in groups if isinstance(group, list)])
            check_any(groups)
            results: list[GenerationResult] = []
            for group, wanted in zip(groups, each, strict=True):
                readers = group if isinstance(group, list) else []
                results += [self._result(reader) for reader in readers]
                if isinstance(group, OutriderError):
                    results += [self.failed(group)] * wanted.n
            return results

    def _run(self, groups: Sequence[Sequence[OutputStream]]) -> None:
        """All readers to their end, whoever's turn ends them. The others of a group start when its
        first one has read the prompt, so that they find its pages."""
        ended: deque[OutputStream] = deque()
        left = {reader.seq.seq_id: reader for group in groups for reader in group}
        for reader in left.values():
            reader.on_end = ended.append
        first = deque(group[0] for group in groups)
        others = deque(group for group in groups if len(group) > 1)
        ready: deque[OutputStream] = deque()
        try:
            while left:
                with self._turns.turn():
                    if not ended:
                        while others and others[0][0].has_read:
                            ready += others.popleft()[1:]
                        self._router.feed(ready, first)
                        self._router.advance()
                deliver()
                while ended:
                    del left[ended.popleft().seq.seq_id]
        finally:
            self._router.end([*left.values()], self._turns.turn())

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        allowed: AllowedTokens | Grammar | None = None,
        sample: int = 0,
        written: Sequence[int] = (),
        **options: Unpack[RequestOptions],
    ) -> RequestHandle:
        """Hand a request in beside others; `advance` runs them. `written` is what a broken text has
        already. Raises as `stream`, at once."""
        params = params_for_one(params, sampling_of(options))
        reader: OutputStream | None = None
        try:
            with self._turns.call():
                ids = self.requests.ids(one_prompt(prompt))
                masked = self.requests.constraint(allowed, options)
                reader = self.requests.reader(ids, params, masked, sample=sample, live=True)
                reader.go_on(self.requests.checked(written) if written else ())
                with self._turns.turn():
                    self._router.submit(reader)
            return RequestHandle(reader, self, self._result)
        except BaseException:  # told of an interrupt at the end, the caller has no handle
            if reader is not None:
                self._router.drop(reader)
            raise

    def encode(self, prompt: Prompt) -> list[int]:
        """The checked ids of a prompt. Any thread may call it, without waiting for a turn."""
        with self._turns.call():
            return self.requests.ids(one_prompt(prompt))

    def encode_chat(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Ids by the checkpoint's own chat template (api/chat_messages.py). What is not in them as
        it was given is logged."""
        with self._turns.call():
            return self.requests.ids_of_chat(conversation(messages), **options).logged()

    @property
    def has_free_place(self) -> bool:
        """Whether one more request would start at once, where there is memory for it."""
        return self._engine.has_free_place

    def give_way(self, handle: RequestHandle) -> bool:
        """Let a running request wait for the one that came last, and then go on. Whether it can."""
        with self._turns.call(), self._turns.turn():
            return self._engine.give_way(handle.reader.seq.seq_id)

    @property
    def has_work(self) -> bool:
        """Whether a submitted request waits or runs."""
        return self._engine.has_work

    @property
    def counts(self) -> Counts:
        """Requests submitted, refused, completed, failed, cancelled and pre-empted so far."""
        return self._engine.residents.counts

    def advance(self) -> None:
        """Run submitted requests until some got tokens, or a chunk of a prompt was read."""
        with self._turns.call(), self._turns.turn():
            self._router.advance()

    def cancel(self, handle: RequestHandle) -> None:
        """End a request now and free its memory; one that has ended stays as it is. Within a
        callback, it ends with the job. Raises ConfigError for a request of another LLM."""
        if handle.owner is not self:
            raise ConfigError("this request is another LLM's.", hint="cancel it where it was")
        handle.reader.was_cancelled |= not handle.done
        if self._turns.in_turn:
            self._router.drop(handle.reader)
            return
        with self._turns.call():
            self._router.end([handle.reader], self._turns.turn())

    def forget(self) -> None:
        """Let the drafter forget what it learnt, for runs that repeat prompts to be compared.
        Raises ConfigError while requests run."""
        with self._turns.call(), self._turns.turn():
            self._router.sweep()
            if self._engine.has_work:
                raise ConfigError("requests are running.", hint="forget after they have ended")
            self._engine.residents.drafting.forget()

    def close(self) -> None:
        """End its threads and processes; another use starts new ones, but not shared targets."""
        with self._turns.call(), self._turns.turn():
            self._engine.close()
            if self._pair.end is not None:
                self._pair.end()

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> TextStream:
        """Stream the assistant's next turn. Text is one message of the user's;
        `llm.chat("hello").text` is the whole turn."""
        return self.stream(self.encode_chat(messages), params, **options)

    def fitting_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """How many of `params.max_tokens` fit after `prompt`. Raises ConfigError if none does."""
        return self.requests.limit(len(self.requests.ids(one_prompt(prompt))), params)

    def _follow(self, reader: OutputStream) -> Generator[TextEvent, None, None]:
        """Within calls of `TextStream`, but for the end of one that nobody closed."""
        with self._turns.turn():
            self._router.submit(reader)
        try:
            while not reader.has_ended:
                with self._turns.turn():
                    if not reader.has_ended:
                        self._router.advance()
                deliver()
                yield from reader.events()
                reader.check()
        finally:
            self._leave(reader)

    def _leave(self, reader: OutputStream) -> None:
        """End the request of a stream that ended, was closed or was let go. The collector, which
        cannot wait, may run in any thread and in the midst of a job: then the next job ends it."""
        with nullcontext() if reader.is_asked else deferred(delivers=False):
            if not reader.has_ended:
                self._router.end([reader], self._turns.turn(now=not reader.is_asked))
            if reader.has_ended:
                self._result(reader)

    def _result(self, reader: OutputStream) -> GenerationResult:
        profile = self.config.profile
        self._last = reader.result(
            drafter=self.drafter, k=self.k, profile=profile, exact=self.exact, memory=self._memory
        )
        return self._last

    def failed(self, error: OutriderError) -> GenerationResult:
        return GenerationResult.failed(error, drafter=self.drafter, k=self.k)
