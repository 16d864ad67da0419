"""Engines in child processes for programs without a server: batches and lists of prompts.

An `EnginePool` sends only plain values to its engines. It therefore lacks those features of `LLM`
that need objects of the same process: its models, mask functions and controller objects.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, cast

import torch

from outrider.api.llm import LLM
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
from outrider.core.env import cache_folder, compiler
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.options import EngineOptions
from outrider.core.params import SamplingParams, engine_config, params_for_each
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import cpu_identity
from outrider.kernels.native.tuning import library_key
from outrider.kernels.operators import Choice
from outrider.models.checkpoint import open_checkpoint
from outrider.server.frames import Load
from outrider.server.placement import Placement, device_of, placements
from outrider.server.port import ChatPrompt, EngineCard, EngineLostError, EngineRequest
from outrider.server.process_port import ProcessPort
from outrider.server.replicas import ReplicasPort

T = TypeVar("T")
# How often a request is restarted if its engine dies and its text cannot be continued. Its seed
# makes it the same text.
_MOST_BEGUN = 3


class PooledRequest:
    """A request, and its result once it has ended. `has_read` is true once its prompt was read."""

    def __init__(self) -> None:
        self.has_read, self.done = False, False
        self.error: Exception | None = None
        self._result: GenerationResult | None = None

    def events(self) -> tuple[()]:
        """Return no events: unlike an `LLM`, a pool does not keep them."""
        return ()

    def end(self, result: GenerationResult | None, error: Exception | None) -> None:
        self._result, self.error, self.done = result, error, True

    def result(self) -> GenerationResult:
        """Return the result. Raises the error of a failed request."""
        if self.error is not None:
            raise self.error
        if self._result is None:
            raise ConfigError("the request has not ended.", hint="EnginePool.advance until it has")
        return self._result


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
        config = replace(config, device=device_of(devices, config.device))
        self._open(model, draft, config, placements(replicas, devices, config))

    @classmethod
    def of(
        cls, model: str, draft: str | None, config: EngineConfig, engines: Sequence[Placement]
    ) -> Self:
        """Open a pool with an engine for each placement."""
        found = cls.__new__(cls)
        found._open(model, draft, config, engines)
        return found

    def _open(
        self, model: str, draft: str | None, config: EngineConfig, engines: Sequence[Placement]
    ) -> None:
        self.config = config
        # One request more than the batch size waits at each engine, so that no engine idles.
        self._most = len(engines) * (config.most_batch + 1)
        # If engines are lost, one engine may have all requests.
        most_queued = self._most + config.max_waiting
        loads = [Load(model, draft, config, most_queued, one) for one in engines]
        self._port = ReplicasPort(list(map(ProcessPort, loads)))
        # The caller's thread writes the first count, the event loop's thread the second.
        self._num_submitted, self._num_ended = 0, 0
        self._news = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
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
        return tuple(replica.port.process_id for replica in self._port.replicas)

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
        self._loop.call_soon_threadsafe(self._begin, submitted, request)
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
        asked = [
            (prompt, replace(wanted, n=1), sample)
            for prompt, wanted in zip(batch, each, strict=True)
            for sample in range(wanted.n)
        ]
        waiting, begun = deque(asked), list[PooledRequest]()
        while waiting or not all(one.done for one in begun):
            while waiting and self.has_free_slot:
                begun.append(self._submit(*waiting.popleft(), structure))
            if not all(one.done for one in begun):
                self.advance()
        errors = [one.error for one in begun]
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
            failed.end(None, error)
            return failed

    def _result(self, request: PooledRequest) -> GenerationResult:
        if isinstance(request.error, OutriderError):
            card = self.card
            return GenerationResult.failed(request.error, drafter=card.drafter, k=card.k)
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

    def _begin(self, asked: EngineRequest, request: PooledRequest) -> None:
        task = self._loop.create_task(self._follow(asked, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, asked: EngineRequest, request: PooledRequest) -> None:
        result, error = None, None
        for _ in range(_MOST_BEGUN):
            try:
                stream = self._port.stream(asked)
                async for _event in stream:
                    if not request.has_read:
                        request.has_read = True
                        self._news.set()
                result, error = stream.result, None
                break
            except EngineLostError as lost:
                error = lost
            except Exception as failed:  # noqa: BLE001 - raised by `PooledRequest.result`
                error = failed
                break
        request.end(result, error)
        self._num_ended += 1
        self._news.set()


# Identity of an engine's arithmetic: engines with equal identities write the same texts.
#
# A text that one engine began is continued at another one only if their identities are equal.
_SHOWN = 16
# Number and size in bytes of the blocks that are read of a large file.
_NUM_BLOCKS, _BLOCK = 64, 1 << 16
_SMALL_FILES = (".json", ".jinja", ".model", ".txt")


def numerics_of(llm: LLM) -> str:
    """Return the identity: hardware, model, number formats and every operator's kernel."""
    config = llm.config
    kernels = map(_kernel, llm.kernels.choices)
    budget = [f"kv_budget {config.kv_budget} {config.kv_window}"] if config.kv_budget else []
    return ", ".join([
        _hardware(llm.device),
        f"model {model_digest(llm.folder)}",
        f"{config.dtype} {config.quantise}",
        f"kv {config.kv_dtype}",
        *budget,
        *kernels,
    ])  # fmt: skip


def _kernel(choice: Choice) -> str:
    # Kinds among which a timing chose compute the same bits, so the kind does not matter.
    kind = "" if choice.timings else choice.kind
    return f"{choice.op}={choice.name} {kind}".strip()


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"{name} {major}.{minor}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    library = built_kernels(compiler(), cache_folder()).library
    native = "" if library is None else library_key(library)
    of_cpu = hashlib.sha256(f"{cpu_identity()}\0{native}".encode()).hexdigest()[:_SHOWN]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {capability} {of_cpu}, torch {torch.__version__}"


def model_digest(model: Path) -> str:
    """Return a digest of a folder or GGUF file: names, sizes and contents. Large weight files are
    not read whole: blocks spread over the file are enough to distinguish models."""
    checkpoint = open_checkpoint(model)
    entries = () if checkpoint.is_gguf else model.iterdir()
    small = (one for one in entries if one.suffix in _SMALL_FILES)
    digest = hashlib.sha256()
    for file in sorted({*checkpoint.files(), *filter(Path.is_file, small)}):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= _NUM_BLOCKS * _BLOCK:
                digest.update(opened.read())
                continue
            for number in range(_NUM_BLOCKS):
                opened.seek((size - _BLOCK) * number // (_NUM_BLOCKS - 1))
                digest.update(opened.read(_BLOCK))
    return digest.hexdigest()[:_SHOWN]
