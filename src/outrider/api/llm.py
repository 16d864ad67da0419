"""`LLM`, the Python API: load a pair once, then stream, generate and chat.

llm = LLM("outrider/embedded")
for event in llm.stream("def quicksort(items):"):
    print(event.text, end="")
print(llm.last_result.summary())
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

from outrider.api.loading import LoadedPair, load_pair
from outrider.api.memory import MemoryWatch, gauge
from outrider.api.output import OutputStream, RequestRouter
from outrider.api.profile import HasKernels
from outrider.api.request import RequestHandle, RequestMaker
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.tokenizer import Tokenizer
from outrider.api.turns import Turns
from outrider.core.budget import JobTrace
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.drafter_kinds import KINDS
from outrider.core.errors import ConfigError
from outrider.core.interrupts import deferred, deliver
from outrider.core.logits import AllowedTokens
from outrider.core.params import SamplingParams, params_for_each
from outrider.core.protocols import Controller
from outrider.core.spec import ModelSpec
from outrider.engine.build import build_engine
from outrider.engine.requests import Counts
from outrider.kernels.registry import Kernels
from outrider.models.loading import pick_device

EMBEDDED = "outrider/embedded"
Prompt = str | Sequence[int]
Message = Mapping[str, str]


class TextStream(Generator[TextEvent, None, None]):
    """The events of a request, an event a round. Whoever asks for the next one drives the engine.

    `close`, or letting go of it, cancels the request and frees its memory. Threads that ask one
    stream take turns: each event is told once.
    """

    def __init__(
        self, turns: Turns, reader: OutputStream, events: Generator[TextEvent, None, None]
    ) -> None:
        self._turns, self._reader, self._events = turns, reader, events
        self._askers = Turns()

    def send(self, value: None, /) -> TextEvent:
        try:
            with self._asking():
                return self._events.send(value)
        except StopIteration:
            raise
        except BaseException:
            # An interrupt may be told when an event is there already.
            self.close()
            raise

    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> TextEvent:
        del tb
        given = val if isinstance(val, BaseException) else typ
        with self._asking():
            return self._events.throw(given if isinstance(given, BaseException) else given())

    def close(self) -> None:
        with self._asking():
            self._events.close()

    @contextmanager
    def _asking(self) -> Generator[None]:
        with self._turns.call(), self._askers.call(), self._askers.turn():
            self._reader.is_asked = True
            try:
                yield
            finally:
                self._reader.is_asked = False


class LLM:
    """A target model, perhaps a draft model, and an engine that runs requests on them.

    `model` and `draft` are aliases, folders or hub ids. The embedded target brings its own draft
    unless the configuration names another drafter. `on_job` hears of every job of every lane;
    `controller`, where given, chooses every round's budget in place of the configured one. Raises
    CheckpointError, VocabularyError, ConfigError or MachineError, each with a hint.

    It may be used from several threads: their calls take turns, job by job, and their requests
    share passes (api/turns.py). A forked child may not use it. Ctrl-C comes between jobs, and
    cancels what the interrupted call asked for; the object can be used again.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED,
        *,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
        on_job: Callable[[JobTrace], None] | None = None,
        controller: Controller | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.device = pick_device(self.config.device)
        self._memory = MemoryWatch(gauge(self.device), active=self.config.profile)
        self._pair: LoadedPair = load_pair(str(model), draft and str(draft), self.config)
        self._memory.end_load()
        self._router = RequestRouter(self._memory)
        self._engine = build_engine(
            self._pair.plan.resolved,
            self._pair,
            num_slots=self._pair.plan.num_slots,
            sink=self._router.record,
            jobs=on_job,
            controller=controller,
        )
        self._router.engine = self._engine
        self._turns = Turns(self._engine.executor.is_here)
        self._requests = RequestMaker(self._pair, self.drafter)
        self._last: GenerationResult | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._pair.tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self._pair.target.spec

    @property
    def kernels(self) -> Kernels:
        return self._pair.target.kernels

    @property
    def models(self) -> Mapping[str, HasKernels]:
        """The target and, if there is one, the draft model, by these names."""
        found = {"target": self._pair.target, "draft": self._pair.draft}
        return {role: model for role, model in found.items() if model is not None}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should hear once: fallbacks taken, limits that are not the defaults."""
        return (*self._pair.notes, *self._engine.residents.drafting.notes)

    @property
    def drafter(self) -> str:
        """The drafter in use; "none" means speculation is off."""
        return self._engine.drafter.name

    @property
    def exact(self) -> bool:
        """Whether what is written follows the target's own law; lossy samplers may change it."""
        return not KINDS[self.drafter].drafts or self.config.sampler in EXACT_SAMPLERS

    @property
    def free_tokens(self) -> int:
        """Arena tokens that no running request holds."""
        return self._pair.target.state.num_free_tokens

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of each part that stays in memory, as they were reckoned before loading: weights,
        arenas, scratch and logits of every lane."""
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
    ) -> TextStream:
        """Yield an event a round. Leaving early cancels the request and frees its memory.

        `allowed` masks the vocabulary after every token (core/logits.py), drafted ones included.
        Raises ConfigError at once when the prompt does not fit the window or `n` is above 1,
        and CapacityError on the first event asked for when the arena could never hold them.
        """
        params = params or SamplingParams()
        if params.n > 1:
            raise ConfigError("a stream has one completion, n asks for more.", hint="use generate")
        with self._turns.call():
            ids = self._requests.ids(prompt)
            reader = self._requests.reader(ids, params, allowed, live=True)
        return TextStream(self._turns, reader, self._follow(reader))

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        allowed: AllowedTokens | None = None,
    ) -> list[GenerationResult]:
        """Run all prompts, up to `batch_size` at once; `n` results for each, in order.

        `params` are one for all or one for each prompt.
        """
        batch = [prompts] if isinstance(prompts, str) else prompts
        if any(isinstance(prompt, int) for prompt in batch):
            raise ConfigError("generate takes a list of prompts.", hint="wrap the ids in a list")
        with self._turns.call():
            groups: list[list[OutputStream]] = []
            each = params_for_each(params, len(batch))
            for ids, wanted in zip(self._requests.ids_of_all(batch), each, strict=True):
                live = bool(wanted.stop)
                make = partial(self._requests.reader, ids, wanted, allowed, live=live)
                groups.append([make(sample=sample) for sample in range(wanted.n)])
            self._run(groups)
            return [self._result(reader) for group in groups for reader in group]

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
                        while others and _has_read(others[0][0]):
                            ready += others.popleft()[1:]
                        self._router.feed(ready, first)
                        self._router.advance()
                deliver()
                while ended:
                    reader = ended.popleft()
                    del left[reader.seq.seq_id]
                    reader.check()
        finally:
            with self._turns.turn():
                for reader in left.values():
                    self._router.retire(reader)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        allowed: AllowedTokens | None = None,
    ) -> RequestHandle:
        """Hand a request in beside others; `advance` runs them all. Raises ConfigError as `stream`
        does, CapacityError if the arena could never hold it, QueueFullError if too many wait."""
        params = params or SamplingParams()
        if params.n > 1:
            raise ConfigError("a request has one completion, n asks for more.", hint="use generate")
        reader: OutputStream | None = None
        try:
            with self._turns.call():
                ids = self._requests.ids(prompt)
                reader = self._requests.reader(ids, params, allowed, live=True)
                with self._turns.turn():
                    self._router.submit(reader)
            return RequestHandle(reader, self, self._result)
        except BaseException:
            # Told of an interrupt at the end, the caller has no handle.
            if reader is not None:
                self._router.drop(reader)
            raise

    @property
    def has_work(self) -> bool:
        """Whether a submitted request waits or runs."""
        return self._engine.has_work

    @property
    def counts(self) -> Counts:
        """Requests submitted, refused, completed, failed, cancelled and pre-empted so far."""
        return self._engine.residents.counts

    def advance(self) -> None:
        """Run submitted requests until some of them got tokens, or a chunk of a prompt was read."""
        with self._turns.call(), self._turns.turn():
            self._router.advance()

    def cancel(self, handle: RequestHandle) -> None:
        """End a request now and free its memory; one that has ended stays as it is. Within a
        callback, it ends with the job. Raises ConfigError for a request of another LLM."""
        if handle.owner is not self:
            raise ConfigError(
                "this request was handed in to another LLM.", hint="cancel it where it was"
            )
        if self._turns.in_turn:
            handle.reader.was_cancelled = not handle.done
            self._router.drop(handle.reader)
            return
        with self._turns.call(), self._turns.turn():
            if not handle.done:
                handle.reader.was_cancelled = True
                self._router.retire(handle.reader)

    def forget(self) -> None:
        """Let the drafter forget what it learnt from requests so far, so that runs which repeat
        prompts can be compared. Raises ConfigError while requests run."""
        with self._turns.call(), self._turns.turn():
            self._router.sweep()
            if self._engine.has_work:
                raise ConfigError("requests are running.", hint="forget after they have ended")
            self._engine.residents.drafting.forget()

    def close(self) -> None:
        """End threads and processes that this object started. Using it again starts new ones, but
        for a target shared by processes, which is gone."""
        with self._turns.call(), self._turns.turn():
            self._engine.close()
            if self._pair.end is not None:
                self._pair.end()

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> TextStream:
        """Stream the assistant's next turn, through the checkpoint's own chat template."""
        return self.stream(self._requests.ids_of_chat(messages), params)

    def fitting_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """How many of `params.max_tokens` fit after `prompt`. Raises ConfigError if none does."""
        return self._requests.limit(len(self._requests.ids(prompt)), params)

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
        with deferred(told=False):
            if reader.has_ended:
                self._result(reader)
                return
            with self._turns.turn(now=not reader.is_asked) as given:
                if given:
                    self._router.retire(reader)
                    self._result(reader)
                else:
                    self._router.drop(reader)

    def _result(self, reader: OutputStream) -> GenerationResult:
        self._last = reader.result(
            drafter=self.drafter,
            k=self._pair.plan.resolved.k,
            profile=self.config.profile,
            exact=self.exact,
            memory=self._memory,
        )
        return self._last


def _has_read(reader: OutputStream) -> bool:
    """Whether its prompt is in memory, for others to find, or will never be."""
    return reader.seq.num_emitted > 0 or reader.has_ended
