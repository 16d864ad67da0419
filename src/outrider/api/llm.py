"""Text in, text out: load a pair once, then stream, generate and chat.

llm = LLM("outrider/embedded")
for event in llm.stream("def quicksort(items):"):
    print(event.text, end="")
print(llm.last_result.summary())
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from outrider.api.loading import LoadedPair, load_pair
from outrider.api.memory import MemoryWatch, gauge
from outrider.api.profile import HasKernels
from outrider.api.reader import Reader
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import StopMatcher
from outrider.api.tokenizer import Tokenizer, spellings
from outrider.core.budget import RoundTrace
from outrider.core.config import EXACT_SAMPLERS, EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams, params_for_each
from outrider.core.sequence import LiveSequence
from outrider.core.shaping import AllowedTokens, Shaper
from outrider.core.spec import ModelSpec
from outrider.drafters.prediction import check_prediction
from outrider.engine.build import Parts, build_engine
from outrider.kernels.registry import Kernels
from outrider.models.loading import pick_device

EMBEDDED = "outrider/embedded"
Prompt = str | Sequence[int]
Message = Mapping[str, str]
TextStream = Generator[TextEvent, None, None]


class LLM:
    """A target model, perhaps a draft model, and an engine that runs requests on them.

    `model` and `draft` are aliases, folders or hub ids. The embedded target brings its own draft
    unless the configuration names another drafter. Raises CheckpointError, VocabularyError,
    ConfigError or MachineError, each with a hint.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED,
        *,
        draft: str | Path | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.device = pick_device(self.config.device)
        self._memory = MemoryWatch(gauge(self.device), active=self.config.profile)
        self._pair: LoadedPair = load_pair(str(model), draft and str(draft), self.config)
        self._memory.end_load()
        self._readers: dict[int, Reader] = {}
        pair, kernels = self._pair, self.kernels
        parts = Parts(pair.target, pair.draft, kernels.argmax, pair.translator, kernels.sampling)
        self._engine = build_engine(
            self.config, parts, num_slots=self._pair.num_slots, sink=self._record
        )
        self._seq_ids = count()
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
        return self._pair.notes

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
        Raises ConfigError at once when prompt and draft do not fit the window or `n` is above 1,
        and CapacityError on the first event asked for when the arena could never hold them.
        """
        params = params or SamplingParams()
        if params.n > 1:
            raise ConfigError("a stream has one completion, n asks for more.", hint="use generate")
        return self._follow(self._reader(self._ids(prompt), params, allowed, live=True))

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
        texts = iter(self.tokenizer.encode_batch([p for p in batch if isinstance(p, str)]))
        for prompt, wanted in zip(batch, params_for_each(params, len(batch)), strict=True):
            ids = self._checked(next(texts) if isinstance(prompt, str) else prompt)
            live = bool(wanted.stop)
            reader = (self._reader(ids, wanted, allowed, sample=i, live=live) for i in count())
            groups.append(list(islice(reader, wanted.n)))
        self._run(groups)
        return [self._result(reader) for group in groups for reader in group]

    def _run(self, groups: Sequence[Sequence[Reader]]) -> None:
        """All readers to their end. The others of a group start when its first one has read the
        prompt, so that they find its pages."""
        readers = [reader for group in groups for reader in group]
        waiting = {id(group[0]): list(group[1:]) for group in groups}
        try:
            for group in groups:
                self._submit(group[0])
            while any(reader.seq.finish is None for reader in readers):
                for group in groups:
                    if group[0].seq.num_emitted:
                        for reader in waiting.pop(id(group[0]), []):
                            self._submit(reader)
                self._advance()
                for reader in readers:
                    reader.check()
        finally:
            for reader in readers:
                self._retire(reader)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> TextStream:
        """Stream the assistant's next turn, through the checkpoint's own chat template."""
        text = self.tokenizer.chat(messages)
        return self.stream(self.tokenizer.encode(text, add_special=False), params)

    def fitting_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """How many of `params.max_tokens` fit after `prompt`. Raises ConfigError if none does."""
        return self._limit(len(self._ids(prompt)), params)

    def _ids(self, prompt: Prompt) -> list[int]:
        return self._checked(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def _follow(self, reader: Reader) -> TextStream:
        self._submit(reader)
        try:
            while reader.seq.finish is None:
                self._advance()
                yield from reader.events()
                reader.check()
        finally:
            self._retire(reader)
            self._result(reader)

    def _submit(self, reader: Reader) -> None:
        self._engine.submit(reader.seq)
        self._readers[reader.seq.seq_id] = reader
        reader.start()

    def _retire(self, reader: Reader) -> None:
        self._engine.cancel(reader.seq.seq_id)
        self._readers.pop(reader.seq.seq_id, None)

    def _advance(self) -> None:
        """One engine job; what it emitted goes to whoever reads it, also beside this request."""
        for outcome in self._engine.step():
            self._readers[outcome.seq_id].take(outcome)

    def _record(self, trace: RoundTrace) -> None:
        reader = self._readers[trace.seq_id]
        reader.traces.append(trace)
        reader.pass_bytes.append(self._memory.during(trace.pass_index))

    def _reader(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        allowed: AllowedTokens | None,
        *,
        sample: int = 0,
        live: bool,
    ) -> Reader:
        limit = self._limit(len(ids), params)
        check_prediction(params.prediction, drafter=self.drafter)
        guess = self.tokenizer.encode(params.prediction, add_special=False)
        seq = LiveSequence(
            seq_id=next(self._seq_ids),
            tokens=list(ids),
            prompt_length=len(ids),
            params=params,
            limit=limit,
            stop_ids=frozenset() if params.ignore_eos else self._pair.stop_ids,
            shaper=self._shaper(len(ids), params, allowed),
            sample=sample,
            prediction=tuple(i for i in guess if i < self.spec.vocab_size),
            pick=self.kernels.sampling.pick,
        )
        notes = () if limit == params.max_tokens else (self._cap_note(limit, params.max_tokens),)
        return Reader(seq, StopMatcher(self.tokenizer, params.stop, params.min_tokens), live, notes)

    def _shaper(
        self, prompt_length: int, params: SamplingParams, allowed: AllowedTokens | None
    ) -> Shaper | None:
        size = self.spec.vocab_size
        foreign = [i for i in params.logit_bias or () if i >= size]
        if foreign:
            raise ConfigError(
                f"logit_bias names ids outside the vocabulary of {size}: {foreign[:5]}."
            )
        shaper = Shaper(
            params,
            prompt_length,
            stop_ids=frozenset() if params.ignore_eos else self._pair.stop_ids,
            bad_words=tuple(
                word for word in spellings(self.tokenizer, params.bad_words) if max(word) < size
            ),
            allowed=allowed,
        )
        return shaper if shaper.active else None

    def _cap_note(self, limit: int, wanted: int) -> str:
        window, reason = self._pair.window, self._pair.window_reason
        return f"at most {limit} of {wanted} tokens fit the window of {window} ({reason})"

    def _checked(self, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise ConfigError("the prompt is empty.", hint="give at least one token of text")
        foreign = [i for i in ids if type(i) is not int or not 0 <= i < self.spec.vocab_size]
        if foreign:
            raise ConfigError(
                f"the prompt has ids outside the vocabulary of {self.spec.vocab_size}: "
                f"{foreign[:5]}."
            )
        return list(ids)

    def _limit(self, num_prompt: int, params: SamplingParams) -> int:
        """How many tokens may be emitted: a whole draft must fit the window after the last."""
        window, k = self._pair.window, self._pair.k
        if num_prompt + k + 1 >= window:
            raise ConfigError(
                f"a prompt of {num_prompt} tokens with k={k} does not fit a window of {window} "
                f"tokens ({self._pair.window_reason}).",
                hint="shorten the prompt, lower --k, or raise --context if the models allow it",
            )
        return min(params.max_tokens, window - num_prompt - k - 1)

    def _result(self, reader: Reader) -> GenerationResult:
        self._last = reader.result(
            drafter=self.drafter,
            k=self._pair.k,
            profile=self.config.profile,
            exact=self.exact,
            memory=self._memory,
        )
        return self._last
