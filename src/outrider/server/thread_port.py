"""An `EnginePort` over an engine in this process: an AsyncLLM, which a thread loads.

It is for tests, embedding and small deployments: a crash of the engine ends the server too.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar, cast

import torch

from outrider.api.async_llm import AsyncLLM, EngineThread
from outrider.api.callers import ChatIds, PromptReader
from outrider.api.llm import LLM
from outrider.api.memory import WEIGHTS
from outrider.api.request import AsyncRequest, result_of
from outrider.api.result import GenerationResult, TextEvent
from outrider.api.stream import TokenDecoder
from outrider.api.structure import StructureOptions
from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.draft import JobTrace, RoundTrace
from outrider.core.env import cache_folder, compiler
from outrider.core.errors import ConfigError, within_memory
from outrider.core.fields import WHOLE, size
from outrider.core.params import SamplingParams
from outrider.core.plugins import drafter_named
from outrider.estimate.forecast import forecast, sheet_like
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import cpu_identity
from outrider.kernels.native.tuning import library_key
from outrider.kernels.operators import Choice
from outrider.models.checkpoint import open_checkpoint, read_sampling
from outrider.server.port import (
    ChatPrompt,
    EngineCard,
    EngineRequest,
    EngineState,
    EngineStatus,
    NotReadyError,
    Part,
    Promise,
    failure_of,
    is_repeatable,
)

T = TypeVar("T")
# Tokens of a typical question and answer in a chat.
_CONTEXT, _NEW_TOKENS = 128, 128


def promise_of(llm: LLM) -> Promise | None:
    """Return the predicted speed-up of one text of the engine before it has run; None without a
    drafter or without figures for this device.

    The playground compares it with the measurement of a race. It only knows the sizes of target and
    drafter, the kind of device, and typical acceptance of such drafters, so its interval is wide.
    """
    if not llm.k:
        return None
    weights = {name: held for name, held in llm.memory.items() if name.startswith(WEIGHTS)}
    gpu = None if llm.device.type == "cpu" else str(llm.device)
    try:
        found = forecast(
            llm.spec,
            drafter_named(llm.drafter),
            llm.k,
            sheet_like(llm.device.type, gpu),
            num_bytes=sum(weights.values()) - weights.get(f"{WEIGHTS}target", 0),
            context=_CONTEXT + _NEW_TOKENS / 2,
        )
    except ConfigError:
        return None
    return Promise(speed_up=found.speed_up, low=found.low, high=found.high)


class ThreadStream(AsyncIterator[TextEvent]):
    """The events of one request of this process. `is_repeatable` says that another engine could
    continue its text."""

    engine: int | None = None

    def __init__(
        self, engine: EngineThread, request: AsyncRequest, *, is_repeatable: bool = False
    ) -> None:
        self._engine, self._request = engine, request
        self._is_repeatable, self._num_rounds = is_repeatable, 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextEvent:
        try:
            event = await self._engine.next_event(self._request)
        except BaseException as error:
            self.cancel()
            if error is self._engine.broke:
                # The engine failed, so the error is not specific to this request.
                raise NotReadyError("closed") from error
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def parts(self, number: int) -> AsyncGenerator[Part]:
        """Yield the events as parts of answer `number`, and at last its result or its failure.
        Leaving early cancels the request."""
        try:
            async for event in self:
                rounds = self._rounds(len(event.token_ids)) if self._is_repeatable else []
                yield Part(number, event, rounds)
            last = Part(number, result=self.result)
        except Exception as error:  # noqa: BLE001 - an error of a request ends that request alone
            last = Part(number, failure=failure_of(error))
        finally:
            self.cancel()
        yield last

    @property
    def has_ended(self) -> bool:
        """True if the request has ended and all its events were read."""
        return self._request.ended and not self._request.events

    def _rounds(self, num_tokens: int) -> list[RoundTrace]:
        """Return the next rounds, up to those that wrote `num_tokens` more tokens; rounds that
        only read the prompt are included. Each round is returned once."""
        handle, found = self._request.handle, list[RoundTrace]()
        traces = [] if handle is None else handle.reader.traces
        while num_tokens > 0 and self._num_rounds < len(traces):
            found.append(traces[self._num_rounds])
            self._num_rounds += 1
            num_tokens -= found[-1].num_emitted
        return found

    @property
    def result(self) -> GenerationResult:
        return result_of(self._request)

    def cancel(self) -> None:
        if not self._request.ended:
            self._engine.leave(self._request)


# The load of lanes is of the last seconds, or of the last jobs if these are fewer.
SECONDS = 4.0
_MOST_JOBS = 4096


class LaneLoad:
    """Load of all lanes. The engine's thread calls `note` for each job; any may read `words`."""

    def __init__(self, clock: Clock = HOST_CLOCK) -> None:
        self._clock = clock
        self._jobs: deque[JobTrace] = deque(maxlen=_MOST_JOBS)
        self._lanes: dict[str, None] = {}

    def note(self, job: JobTrace) -> None:
        self._lanes.setdefault(job.lane)
        self._jobs.append(job)

    @property
    def words(self) -> Mapping[str, str]:
        """The busy share of each lane in the last seconds, in words."""
        now, jobs = self._clock(), tuple(self._jobs)
        # In a burst, the stored jobs may cover less time: then the share is of that time.
        whole = len(jobs) == _MOST_JOBS and jobs[0].began > now - SECONDS
        since = jobs[0].began if whole else now - SECONDS
        busy = dict.fromkeys(tuple(self._lanes), 0.0)
        for job in jobs:
            busy[job.lane] += max(job.ended - max(job.began, since), 0.0)
        return {
            lane: f"{min(seconds / (now - since), 1):.0%} busy" for lane, seconds in busy.items()
        }


class ThreadPort:
    """An engine that `load` loads in a thread of its own; `load` passes its jobs to `lanes`."""

    def __init__(
        self, load: Callable[[], LLM], *, max_queued: int = 1_000, lanes: LaneLoad | None = None
    ) -> None:
        self._load, self._max_queued = load, max_queued
        self._lanes = lanes or LaneLoad()
        self._state: EngineState = "loading"
        self._owner: AsyncLLM | None = None
        self._card: EngineCard | None = None
        self._num_tokens = 0

    async def start(self) -> None:
        """Load the engine. Raises the errors of loading."""
        self._state = "loading"
        try:
            llm = await _in_thread(self._load)
            self._card = card_of(llm)
            # Nothing runs yet, so this is the whole capacity.
            self._num_tokens = llm.free_tokens
            self._owner = AsyncLLM(llm, max_queued=self._max_queued)
        except BaseException:
            self._state = "failed"
            raise
        self._state = "ready"

    @property
    def card(self) -> EngineCard:
        if self._card is None:
            raise NotReadyError(self._state)
        return self._card

    @property
    def status(self) -> EngineStatus:
        owner = self._owner
        if owner is None:
            return EngineStatus(state=self._state)
        counts = owner.llm.counts
        left = counts.submitted - counts.completed - counts.failed - counts.cancelled
        num_running = min(left, counts.live)
        broke = owner.engine.broke is not None and self._state == "ready"
        return EngineStatus(
            state="failed" if broke else self._state,
            num_running=num_running,
            num_waiting=left - num_running + owner.engine.num_queued,
            kv_usage=max(0.0, 1 - owner.llm.free_tokens / max(1, self._num_tokens)),
            num_preempted=counts.preempted,
            lanes=self._lanes.words,
        )

    @property
    def job_seconds(self) -> float:
        """Seconds that the current job has been running; 0 while the engine is idle."""
        return 0.0 if self._owner is None else self._owner.engine.job_seconds

    @property
    def decoder(self) -> TokenDecoder:
        return self._ready().llm.tokenizer

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        return await self._read(lambda reader: reader.ids_of_text(prompt, add_special=add_special))

    async def encode_chat(self, chat: ChatPrompt) -> ChatIds:
        return await self._read(chat.ids)

    async def _read(self, read: Callable[[PromptReader], T]) -> T:
        owner = self._ready()

        def run() -> T:
            with within_memory("answering"):
                return read(owner.llm.requests)

        return await owner.encoded(run)

    def stream(self, request: EngineRequest) -> ThreadStream:
        engine = self._ready().engine
        submitted = AsyncRequest(
            asyncio.get_running_loop(),
            request.prompt_ids,
            replace(request.params, cache_salt=request.cache_salt),
            structure=cast("StructureOptions", request.structure),
            sample=request.sample,
            written=request.written,
            key=request.key,
            weight=request.weight,
        )
        engine.add(submitted)
        can_move = is_repeatable(self.card, request.params)
        return ThreadStream(engine, submitted, is_repeatable=can_move)

    async def aclose(self) -> None:
        await self._shut("closed")

    async def unload(self) -> None:
        """Unload the engine until `start` is called again."""
        await self._shut("unloaded")

    async def _shut(self, state: EngineState) -> None:
        self._state = state
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.aclose()

    def _ready(self) -> AsyncLLM:
        if self._owner is None or self._state != "ready":
            raise NotReadyError(self._state)
        return self._owner


async def _in_thread(load: Callable[[], LLM]) -> LLM:
    """Run `load` in a daemon thread, which does not keep an ending server alive."""
    loaded: Future[LLM] = Future()
    # It cannot be cancelled: a thread that loads goes on.
    loaded.set_running_or_notify_cancel()

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:  # noqa: BLE001 - raised by awaiting the future
            loaded.set_exception(error)

    threading.Thread(target=run, name="outrider-load", daemon=True).start()
    return await asyncio.wrap_future(loaded)


def card_of(llm: LLM) -> EngineCard:
    """Return the card of a loaded LLM."""
    config, tokenizer = llm.config, llm.tokenizer
    files = tokenizer.config
    return EngineCard(
        model=str(llm.folder.name),
        window=llm.fitting_tokens([0], SamplingParams(max_tokens=WHOLE)) + 1,
        vocab_size=llm.spec.vocab_size,
        num_parameters=llm.spec.num_parameters,
        drafters=llm.drafters,
        drafter=llm.drafter,
        k=llm.k,
        sampler=config.sampler,
        exact=llm.exact,
        fixed_k=llm.fixed_k,
        has_chat_template=tokenizer.has_chat_template,
        chat_template=tokenizer.templates.source or "",
        tool_template=tokenizer.templates.tool_source,
        bos=_token(files.get("bos_token")),
        eos=_token(files.get("eos_token")),
        numerics=numerics_of(llm),
        tokenizer=str(tokenizer.path),
        notes=tuple(llm.notes),
        promise=promise_of(llm),
        sampling=read_sampling(llm.folder),
        response_template=tokenizer.templates.response,
        facts={
            "device": str(llm.device),
            "memory": size(sum(llm.memory.values())),
            "batch_size": str(llm.requests.plan.settings.most_batch),
            "at_once": llm.requests.plan.at_once,
        },
    )


def _token(entry: object) -> str:
    """Return a token of tokenizer_config.json, a string or an object with its content."""
    if isinstance(entry, dict):
        entry = cast("dict[str, object]", entry).get("content")
    return entry if isinstance(entry, str) else ""


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
