"""Engines in child processes for programs without a server: batches and lists of prompts.

An `EnginePool` sends only plain values to its engines. It therefore lacks those features of `LLM`
that need objects of the same process: its models, mask functions and controller objects.

Each engine has a GPU or a share of the cores that this process may use. Hardware threads of one
core stay together, and so do the cores of a NUMA node, as far as equal shares allow. An engine uses
as many threads as its share has cores, unless configured otherwise.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self, TypeVar, Unpack, cast

from outrider.api.prompts import (
    Message,
    Prompt,
    RequestOptions,
    conversation,
    one_prompt,
    sampling_of,
    several_prompts,
    structure_in,
)
from outrider.api.result import GenerationResult
from outrider.api.structure import StructureOptions
from outrider.api.tokenizer import Tokenizer
from outrider.api.turns import OfOneProcess
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, OutriderError, did_you_mean
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, engine_config, params_for_each
from outrider.kernels.native.cpu import allowed_cores
from outrider.server.port import (
    ALONE,
    ChatPrompt,
    EngineCard,
    EngineLostError,
    EngineRequest,
    Load,
    Placement,
)
from outrider.server.process_port import ProcessPort
from outrider.server.replicas import ReplicasPort

T = TypeVar("T")
# How often a request is restarted if its engine dies and its text cannot be continued. Its seed
# makes it the same text.
_MOST_BEGUN = 3
_DEVICE = re.compile(r"cuda(?::(\d{1,3}))?", re.ASCII)


@dataclass(eq=False, slots=True)
class PooledRequest:
    """A request, and the future of its result. `has_read` is true once its prompt was read."""

    answer: Future[GenerationResult] = field(default_factory=Future[GenerationResult])
    has_read: bool = False

    @property
    def done(self) -> bool:
        return self.answer.done()

    def events(self) -> tuple[()]:
        """Return no events: unlike an `LLM`, a pool does not keep them."""
        return ()

    def result(self) -> GenerationResult:
        """Return the result. Raises the error of a failed request."""
        if not self.done:
            raise ConfigError("the request has not ended.", hint="EnginePool.advance until it has")
        return self.answer.result()


class EnginePool(OfOneProcess):
    """Engines of one model: `replicas` of them, or one on each of `devices` (`cuda:0`, `cuda:1`).
    Options are those of `LLM`. A pool is for use from one thread; `close` ends its processes."""

    def __init__(
        self,
        model: str = "outrider/embedded",
        *,
        draft: str | None = None,
        replicas: int = 1,
        devices: Sequence[str] = (),
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = engine_config(config, cast("Mapping[str, object]", options))
        self._open(model, draft, config, Engines.of(replicas, devices, config))

    @classmethod
    def of(cls, model: str, draft: str | None, config: EngineConfig, engines: Engines) -> Self:
        found = cls.__new__(cls)
        found._open(model, draft, config, engines)
        return found

    def _open(self, model: str, draft: str | None, config: EngineConfig, engines: Engines) -> None:
        self.config = engines.config(config)
        # One request more than the batch size waits at each engine, so that no engine idles.
        self._most = len(engines) * (config.most_batch + 1)
        # If engines are lost, one engine may have all requests.
        most_queued = self._most + config.max_waiting
        loads = engines.loads(model, draft, config, most_queued)
        self._port = ReplicasPort(list(map(ProcessPort, loads)))
        # The caller's thread writes the first count, the event loop's thread the second.
        self._num_submitted, self._num_ended = 0, 0
        self._news = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="outrider-pool", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._port.start())
        except BaseException:
            self._stop()
            raise

    @property
    def card(self) -> EngineCard:
        return self._port.card

    @property
    def tokenizer(self) -> Tokenizer:
        return cast("Tokenizer", self._port.decoder)

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        """Process ids of the engines."""
        return tuple(replica.process_id for replica in self._port.replicas)

    @property
    def has_free_slot(self) -> bool:
        """Return whether one more request would start soon."""
        return self._num_submitted - self._num_ended < self._most

    def encode(self, prompt: Prompt) -> list[int]:
        given = one_prompt(prompt)
        return self._run(self._port.encode(given)) if isinstance(given, str) else given

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        return self._run(self._port.encode_chat(ChatPrompt(messages=conversation(messages)))).ids

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        **structure: Unpack[StructureOptions],
    ) -> PooledRequest:
        """Submit a request. It runs in the background; `advance` waits for news of it."""
        submitted = EngineRequest(
            prompt_ids=ids,
            params=(params or SamplingParams()).seeded(),
            structure=structure,
            sample=sample,
        )
        request = PooledRequest()
        self._num_submitted += 1
        answer = self._answer(submitted, request)
        request.answer = asyncio.run_coroutine_threadsafe(answer, self._loop)
        request.answer.add_done_callback(self._note_end)
        return request

    def advance(self) -> None:
        """Wait until a request has begun or ended."""
        self._news.wait()
        self._news.clear()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Generate like `LLM.generate`: `n` results for each prompt, in order. A request that
        cannot run has a result with its `error`; if all have one, the first error is raised."""
        batch, structure = several_prompts(prompts), structure_in(options)
        each = [one.seeded() for one in params_for_each(params, len(batch), sampling_of(options))]
        begun: list[PooledRequest] = []
        for prompt, wanted in zip(batch, each, strict=True):
            for sample in range(wanted.n):
                while not self.has_free_slot:
                    self.advance()
                begun.append(self._submit(prompt, replace(wanted, n=1), sample, structure))
        while not all(one.done for one in begun):
            self.advance()
        errors = [one.answer.exception() for one in begun]
        first = next(filter(None, errors), None)
        if first is not None and all(errors):
            raise first
        return [self._result(one) for one in begun]

    def _submit(
        self, prompt: Prompt, params: SamplingParams, sample: int, structure: StructureOptions
    ) -> PooledRequest:
        """Submit a prompt; if it cannot run, the returned request has ended with the error."""
        try:
            return self.submit(self.encode(prompt), params, sample=sample, **structure)
        except OutriderError as error:
            failed = PooledRequest()
            failed.answer.set_exception(error)
            return failed

    def _result(self, request: PooledRequest) -> GenerationResult:
        error, card = request.answer.exception(), self.card
        if isinstance(error, OutriderError):
            return GenerationResult.failed(error, drafter=card.drafter, k=card.k)
        return request.result()

    def close(self) -> None:
        """Stop the engines and all running requests."""
        if not self._loop.is_closed():
            self._run(self._port.aclose())
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, asked: EngineRequest, request: PooledRequest) -> GenerationResult:
        num_begun = 0
        while True:
            stream, num_begun = self._port.stream(asked), num_begun + 1
            try:
                async for _ in stream:
                    if not request.has_read:
                        request.has_read = True
                        self._news.set()
                return stream.result
            except EngineLostError:
                if num_begun == _MOST_BEGUN:
                    raise

    def _note_end(self, _: object) -> None:
        self._num_ended += 1
        self._news.set()


@dataclass(frozen=True, slots=True)
class Engines:
    """Placements of a model's engines. `device` is the device setting of each engine."""

    device: str
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, replicas: int, devices: Sequence[str], config: EngineConfig) -> Self:
        """Return `replicas` engines, or one for each device. Raises ConfigError for invalid devices
        or numbers."""
        if devices and replicas > 1:
            hint = "leave --replicas out"
            raise ConfigError("--devices says how many engines there are.", hint=hint)
        gpus, kinds = _gpus(devices), {name.partition(":")[0] for name in devices}
        if len(kinds) > 1:
            raise ConfigError(
                f"--devices {','.join(devices)}: texts of different kinds of devices differ.",
                hint="devices of one kind",
            )
        device, number = next(iter(kinds), config.device), max(replicas, len(devices))
        ranks = config.tensor_parallel
        if number > 1 and ranks > 1:
            raise ConfigError(
                f"{number} engines, each of {ranks} ranks: ranks take all devices.",
                hint="leave --tensor-parallel or --replicas out",
            )
        if number == 1:
            return cls(device, (Placement(gpu=gpus[0]) if gpus else ALONE,))
        counted = [None] * number if device in ("cpu", "mps") else list(range(number))
        shares = zip(shares_of(allowed_cores(), number), gpus or counted, strict=True)
        engines = [Placement(cores=cores, gpu=gpu, num_engines=number) for cores, gpu in shares]
        return cls(device, tuple(engines))

    def __len__(self) -> int:
        return len(self.placements)

    def config(self, config: EngineConfig) -> EngineConfig:
        return replace(config, device=self.device)

    def shared(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of one engine. Raises MachineError for a missing device."""
        own = self.config(config)
        for one in self.placements:
            one.check_device(own.device)
        return self.placements[0].shared(own)

    def loads(
        self, target: str, draft: str | None, config: EngineConfig, max_queued: int
    ) -> list[Load]:
        own = self.config(config)
        return [Load(target, draft, own, max_queued, one) for one in self.placements]

    @property
    def described(self) -> list[str]:
        """The placement of each engine, in words."""
        return [one.describe(self.device) for one in self.placements]


def _gpus(devices: Sequence[str]) -> list[int | None]:
    found: list[int | None] = []
    for name in devices:
        match = _DEVICE.fullmatch(name)
        if match is None and name not in ("cpu", "mps"):
            known = ("cpu", "mps", "cuda:0", "cuda:1")
            raise ConfigError(f"--devices: {name!r} is no device.", hint=did_you_mean(name, known))
        gpu = int(match[1] or 0) if match else None
        if gpu in found:
            hint = "--replicas shares the cores out" if name == "cpu" else "each one once"
            raise ConfigError(f"--devices names {name} twice.", hint=hint)
        found.append(gpu)
    return found


def shares_of(cores: Sequence[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """Divide the cores into `number` parts, as equal as possible; few cores are shared."""
    if len(cores) < number:
        return [cores[i % len(cores)] for i in range(number)]
    bounds = [len(cores) * i // number for i in range(number + 1)]
    return [
        tuple(sorted(thread for core in cores[start:end] for thread in core))
        for start, end in pairwise(bounds)
    ]
