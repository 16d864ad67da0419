"""`LLM`, the Python API: load a pair once, then stream, generate and chat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, Self, Unpack, cast, overload

from outrider.api.callers import (
    Message,
    OfOneProcess,
    Prompt,
    RequestOptions,
    Turns,
    conversation,
    one_prompt,
    sampling_of,
    several_prompts,
)
from outrider.api.chat_messages import ChatOptions
from outrider.api.grammar import Grammar
from outrider.api.loading import check_names, load_pair
from outrider.api.output import MemoryWatch, OutputStream, RequestRouter, TextStream, gauge
from outrider.api.request import RequestHandle, RequestMaker, check_any, error_of
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace
from outrider.core.errors import ConfigError, OutriderError, within_memory
from outrider.core.fields import size
from outrider.core.logits import AllowedTokens
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, engine_config, params_for_each, params_for_one
from outrider.core.process import deferred, deliver
from outrider.core.protocols import Controller
from outrider.core.spec import ModelSpec
from outrider.drafters.common.context import DraftFunction, drafter_named_after
from outrider.engine.build import build_engine
from outrider.engine.requests import Counts
from outrider.kernels.operators import HasKernels, Kernels, pick_device

EMBEDDED = "outrider/embedded"


class LLM(OfOneProcess):
    """A target model, perhaps a draft model, and an engine that runs requests on them.

    `model` and `draft` are aliases, folders or hub ids. The embedded target brings its own draft
    unless the configuration names another drafter. Fields of EngineConfig may be given as keywords,
    as in `LLM(model, drafter="ngram", quantise="int8")`. `drafter` may also be a function
    `guess(ids, most)`, which returns its guess of the next ids, at most so many. `on_job` is called
    after every job of every lane; a `controller` object chooses every round's budget. `weights_of`
    is an LLM of the same target, whose weights are shared if possible. Raises CheckpointError,
    VocabularyError, ConfigError or MachineError.

    Threads may share it: their calls take turns, job by job, and their requests share passes
    (api/callers.py). A forked child may not use it. Ctrl-C is handled between jobs, and cancels the
    requests of the interrupted call; the LLM can be used again. As a context manager it closes
    itself.
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
        named: dict[str, object] = {**options}
        if isinstance(controller, str):
            named["controller"] = controller
        if callable(named.get("drafter")):
            named["drafter"] = drafter_named_after(cast("DraftFunction", named["drafter"]))
        self.config = engine_config(config, named)
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
        """The models by role: target and, if there is one, draft."""
        found = (("target", self._pair.target), ("draft", self._pair.draft))
        return {role: model for role, model in found if model is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, once per LLM: fallbacks, limits other than the defaults."""
        return (*self._pair.notes, *self._engine.residents.drafting.notes)

    @property
    def drafter(self) -> str:
        return self._engine.drafter.name

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that a request may choose, the present one first (SamplingParams.drafter)."""
        return self._pair.plan.resolved.choosable

    @property
    def k(self) -> int:
        """Most draft tokens in a row; 0 if nothing is drafted."""
        return self._pair.plan.resolved.k

    @property
    def fixed_k(self) -> bool:
        return self._pair.plan.resolved.settings.controller == "fixed"

    @property
    def exact(self) -> bool:
        """True if texts follow the target's own distribution: not with a lossy sampler."""
        return not self.k or self.config.claims_exact

    @property
    def free_tokens(self) -> int:
        """Arena tokens that no running request holds."""
        return self._pair.target.state.num_free_tokens

    @property
    def memory(self) -> Mapping[str, int]:
        """Planned bytes of weights, arenas, scratch and logits of lanes, by name."""
        return {p.name: p.num_bytes for p in self._pair.memory if p.when == "held"}

    @property
    def last_result(self) -> GenerationResult:
        """The result of the newest ended request."""
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
        """Yield an event per round. Leaving early cancels the request and frees its memory.

        `options` are fields of SamplingParams, which replace those of `params`, and structures of
        the text (api/structure.py); `allowed` is your own mask (core/logits.py).
        Raises ConfigError at once if the prompt does not fit the window or `n` is above 1,
        and CapacityError on the first event if the arena could never hold them.
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
        """Run all prompts, up to `batch_size` at once. Returns `n` results for each, in order.

        A prompt is text, or ids as a list, an array or a tensor; rows of ids are prompts. `params`
        is one for all or one for each. A prompt that cannot be run has a result with its `error`,
        while the others run; if none can be run, the first error is raised.
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
            check_any([error_of(group) for group in groups])
            results: list[GenerationResult] = []
            for group, wanted in zip(groups, each, strict=True):
                failed = isinstance(group, OutriderError)
                results += [self.failed(group)] * wanted.n if failed else map(self._result, group)
            return results

    def _run(self, groups: Sequence[Sequence[OutputStream]]) -> None:
        """Run all readers to their end, in turns of any thread. The others of a group start when
        its first one has read the prompt, so that they find its pages."""
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
        """Submit a request; `advance` runs it, along with others. `written` are the tokens that an
        interrupted text has already. Raises the errors of `stream`, at once."""
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
        except BaseException:  # interrupted at the end, so that the caller has no handle
            if reader is not None:
                self._router.drop(reader)
            raise

    def encode(self, prompt: Prompt) -> list[int]:
        """The checked ids of a prompt. Any thread may call it; it does not wait for a turn."""
        with self._turns.call():
            return self.requests.ids(one_prompt(prompt))

    def encode_chat(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Ids by the checkpoint's own chat template (api/chat_messages.py). Changes are logged."""
        with self._turns.call():
            return self.requests.ids_of_chat(conversation(messages), **options).logged()

    @property
    def has_free_slot(self) -> bool:
        """True if one more request would start at once, given the memory for it."""
        return self._engine.has_free_slot

    def give_way(self, handle: RequestHandle) -> bool:
        """Let a running request wait for the newest one, and then go on. True if it can."""
        with self._turns.call(), self._turns.turn():
            return self._engine.give_way(handle.reader.seq.seq_id)

    @property
    def has_work(self) -> bool:
        """True if a submitted request waits or runs."""
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
        """End a request now and free its memory; an ended one stays as it is. Called in a callback,
        it ends the request with the job. Raises ConfigError for a request of another LLM."""
        if handle.owner is not self:
            raise ConfigError("this request is another LLM's.", hint="cancel it where it was")
        handle.reader.was_cancelled |= not handle.done
        if self._turns.in_turn:
            self._router.drop(handle.reader)
            return
        with self._turns.call():
            self._router.end([handle.reader], self._turns.turn())

    def forget(self) -> None:
        """Reset what the drafter learnt, so that repeated prompts can be compared. Raises
        ConfigError while requests run."""
        with self._turns.call(), self._turns.turn():
            self._router.sweep()
            if self._engine.has_work:
                raise ConfigError("requests are running.", hint="forget after they have ended")
            self._engine.residents.drafting.forget()

    def close(self) -> None:
        """End its threads and processes; another use starts new ones, but not shared targets."""
        with self._turns.call(), self._turns.turn():
            self._engine.close()
            for end in filter(None, (self._pair.flush, self._pair.end)):
                end()

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True] = True,
        **options: Unpack[RequestOptions],
    ) -> TextStream: ...
    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False],
        **options: Unpack[RequestOptions],
    ) -> GenerationResult: ...
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        **options: Unpack[RequestOptions],
    ) -> TextStream | GenerationResult:
        """The assistant's next turn: a stream of events, or the whole as a result. A text is one
        message of the user; `llm.chat("hello").text` is the whole turn too."""
        events = self.stream(self.encode_chat(messages), params, **options)
        return events if stream else events.result()

    def fitting_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """The number of `params.max_tokens` that fit after `prompt`. Raises ConfigError for 0."""
        return self.requests.limit(len(self.requests.ids(one_prompt(prompt))), params)

    def _follow(self, reader: OutputStream) -> Generator[TextEvent, None, None]:
        """Events of a request, within calls of `TextStream`, or of the collector at its end."""
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
        """End the request of a stream that ended, was closed or was dropped. The garbage collector,
        which cannot wait, may call it in any thread, even within a job: then the next job ends
        it."""
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
