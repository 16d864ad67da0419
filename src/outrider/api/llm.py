"""Text in, text out: load a pair once, then stream, generate and chat.

llm = LLM("outrider/embedded")
for event in llm.stream("def quicksort(items):"):
    print(event.text, end="")
print(llm.last_result.summary())
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import get_ident

from outrider.api.desk import Desk
from outrider.api.loading import LoadedPair, load_pair, machine_of
from outrider.api.memory import MemoryWatch, gauge
from outrider.api.profile import HasKernels
from outrider.api.reader import Reader
from outrider.api.requests import RequestMaker
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.ticket import Ticket
from outrider.api.tokenizer import Tokenizer
from outrider.core.budget import JobTrace
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams, params_for_each
from outrider.core.protocols import Controller
from outrider.core.shaping import AllowedTokens
from outrider.core.spec import ModelSpec
from outrider.engine.build import build_engine
from outrider.engine.parts import Parts
from outrider.engine.residents import Counts
from outrider.kernels.registry import Kernels
from outrider.models.loading import pick_device

EMBEDDED = "outrider/embedded"
Prompt = str | Sequence[int]
Message = Mapping[str, str]
TextStream = Generator[TextEvent, None, None]


class LLM:
    """A target model, perhaps a draft model, and an engine that runs requests on them.

    `model` and `draft` are aliases, folders or hub ids. The embedded target brings its own draft
    unless the configuration names another drafter. `on_job` hears of every job of every
    lane; `controller`, where given, chooses the budget of every round instead of the one that the
    configuration names. Raises CheckpointError, VocabularyError, ConfigError or MachineError, each
    with a hint.
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
        self._desk = Desk(self._memory)
        pair, kernels = self._pair, self.kernels
        parts = Parts(
            pair.target,
            pair.draft,
            kernels.argmax,
            pair.translator,
            kernels.sampling,
            machine_of(pair.target, self.device),
            pair.child,
            pair.heads,
            pair.own,
            pair.corpus,
        )
        self._engine = build_engine(
            self.config,
            parts,
            num_slots=self._pair.num_slots,
            sink=self._desk.record,
            jobs=on_job,
            controller=controller,
        )
        self._desk.engine = self._engine
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
        return self.drafter == "none" or self.config.sampler in EXACT_SAMPLERS

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

        `allowed` masks the vocabulary after every token (core/shaping.py), drafted ones included.
        Raises ConfigError at once when the prompt does not fit the window or `n` is above 1,
        and CapacityError on the first event asked for when the arena could never hold them.
        """
        params = params or SamplingParams()
        if params.n > 1:
            raise ConfigError("a stream has one completion, n asks for more.", hint="use generate")
        ids = self._requests.ids(prompt)
        return self._follow(self._requests.reader(ids, params, allowed, live=True))

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
        groups: list[list[Reader]] = []
        each = params_for_each(params, len(batch))
        for ids, wanted in zip(self._requests.ids_of_all(batch), each, strict=True):
            live = bool(wanted.stop)
            make = partial(self._requests.reader, ids, wanted, allowed, live=live)
            groups.append([make(sample=sample) for sample in range(wanted.n)])
        self._run(groups)
        return [self._result(reader) for group in groups for reader in group]

    def _run(self, groups: Sequence[Sequence[Reader]]) -> None:
        """All readers to their end. The others of a group start when its first one has read the
        prompt, so that they find its pages."""
        left = {reader.seq.seq_id: reader for group in groups for reader in group}
        first = deque(group[0] for group in groups)
        others = deque(group for group in groups if len(group) > 1)
        ready: deque[Reader] = deque()
        try:
            while left:
                while others and _has_read(others[0][0]):
                    ready += others.popleft()[1:]
                self._desk.feed(ready, first)
                for reader in self._desk.advance():
                    if left.pop(reader.seq.seq_id, None) is not None:
                        reader.check()
        finally:
            for reader in left.values():
                self._desk.retire(reader)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        allowed: AllowedTokens | None = None,
    ) -> Ticket:
        """Hand a request in beside others; `advance` runs them all. Raises ConfigError as `stream`
        does, CapacityError if the arena could never hold it, QueueFullError if too many wait."""
        params = params or SamplingParams()
        if params.n > 1:
            raise ConfigError("a request has one completion, n asks for more.", hint="use generate")
        reader = self._requests.reader(self._requests.ids(prompt), params, allowed, live=True)
        self._desk.submit(reader)
        return Ticket(reader, self, self._result)

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
        self._desk.advance()

    def cancel(self, ticket: Ticket) -> None:
        """End a request now and free its memory; one that has ended stays as it is. Raises
        ConfigError for a request of another LLM."""
        if ticket.owner is not self:
            raise ConfigError(
                "this request was handed in to another LLM.", hint="cancel it where it was"
            )
        if not ticket.done:
            ticket.reader.was_cancelled = True
            self._desk.retire(ticket.reader)

    def forget(self) -> None:
        """Let the drafter forget what it learnt from requests so far, so that runs which repeat
        prompts can be compared. Raises ConfigError while requests run."""
        if self._engine.has_work:
            raise ConfigError("requests are running.", hint="forget after they have ended")
        self._engine.residents.drafting.forget()

    def close(self) -> None:
        """End threads and processes that this object started. Using it again starts new ones, but
        for a target shared by processes, which is gone."""
        self._engine.close()
        if self._pair.end is not None:
            self._pair.end()

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> TextStream:
        """Stream the assistant's next turn, through the checkpoint's own chat template."""
        return self.stream(self._requests.ids_of_chat(messages), params)

    def fitting_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """How many of `params.max_tokens` fit after `prompt`. Raises ConfigError if none does."""
        return self._requests.limit(len(self._requests.ids(prompt)), params)

    def _follow(self, reader: Reader) -> TextStream:
        owner = get_ident()
        self._desk.submit(reader)
        try:
            while not reader.has_ended:
                self._desk.advance()
                yield from reader.events()
                reader.check()
        finally:
            if get_ident() == owner:
                self._desk.retire(reader)
                self._result(reader)
            else:
                # The collector closed it, in whatever thread: the next call here ends the request.
                self._desk.drop(reader)

    def _result(self, reader: Reader) -> GenerationResult:
        self._last = reader.result(
            drafter=self.drafter,
            k=self._pair.k,
            profile=self.config.profile,
            exact=self.exact,
            memory=self._memory,
        )
        return self._last


def _has_read(reader: Reader) -> bool:
    """Whether its prompt is in memory, for others to find, or will never be."""
    return reader.seq.num_emitted > 0 or reader.has_ended
