"""Tensor-parallel model as rank 0 sees it: one CausalLM whose weights and KV arena ranks share.

Rank 0 has the sequences and their pages and plans each pass; the others run their parts over the
same slots. On CPUs a pass is one native call in every rank, within which the ranks meet
(csrc/ranks.h), so it may be part of a native round. Each rank sums a part of the inputs of some
products, so logits differ from those of one process in their last bits (by at most 1e-4 in float32
on the models of the tests), and greedy text differs only where two tokens tie that closely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.core.errors import ConfigError, ContractError, MachineError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.kernels.native.cpu import num_physical_cores
from outrider.kernels.native.forward import Forward
from outrider.kernels.operators import Kernels, pick_device
from outrider.kernels.plan import PackedPlan
from outrider.models.checkpoint import open_checkpoint
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import LoadOptions
from outrider.models.families import LLAMA_FAMILIES, model_type_of, native_config_of
from outrider.models.llama import LlamaModel
from outrider.models.llama_weights import Comm
from outrider.models.loading import load_model
from outrider.plugins.parallel import messages
from outrider.plugins.parallel.comm import RankError
from outrider.plugins.parallel.meeting import Meeting
from outrider.plugins.parallel.ranks import LOADED, SILENT_SECONDS, RankGroup, RankSetup

# Reading a large share from a slow disk takes a while.
LOAD_SECONDS = 1800.0
FOLLOWER = "outrider.plugins.parallel.ranks"
T = TypeVar("T")


class Peers(Protocol):
    """The followers, as their leader sees them (ranks.py)."""

    @property
    def process_ids(self) -> list[int]: ...
    def tell(self, message: Sequence[int]) -> None: ...
    def check(self) -> None: ...
    def lose(self, reason: str) -> RankError: ...
    def end(self, reason: str) -> RankError: ...


class Orders:
    """Runs rank 0's actions that are more than one native call. They run on one thread, one after
    another and each to its end, so that no interrupt leaves ranks waiting for each other."""

    def __init__(self, comm: Comm, ranks: Peers) -> None:
        self._ranks = ranks
        self._turn = nullcontext() if comm.memory is None else comm.memory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank0")
        # The thread must run before an interrupt can come: a pool does not count a thread that an
        # interrupt finds starting, and would start another.
        self._thread.submit(int).result()

    def in_turn(self, act: Callable[[], T]) -> T:
        """The result of `act`, which runs after all earlier ones, to its end in any case."""

        def alone() -> T:
            # Native passes of other lanes run on threads of their own.
            with self._turn:
                return act()

        return self._thread.submit(alone).result()

    def announce(self, plan: PackedPlan, wanted_M: Tensor) -> None:
        """Make the other ranks begin a pass. Called within `in_turn`."""
        self._ranks.tell(messages.pass_message(plan, wanted_M))
        self._ranks.check()

    def copy_slots(self, source: Sequence[int], target: Sequence[int]) -> None:
        self.in_turn(lambda: self._ranks.tell(messages.copy_message(source, target)))


class ShardedLM:
    """A `Decoder` of which this process has rank 0's share. Rank 0 runs everything but its peers'
    parts of a pass: engine, drafter and sampling need not know of ranks."""

    def __init__(self, model: LlamaModel, comm: Comm, ranks: Peers) -> None:
        self._model, self._ranks = model, ranks
        self._orders = Orders(comm, ranks)
        model.lead(self._orders.announce)
        model.state.on_copy = self._orders.copy_slots

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def config(self) -> DecoderConfig:
        return self._model.config

    @property
    def kernels(self) -> Kernels:
        return self._model.kernels

    @kernels.setter
    def kernels(self, kernels: Kernels) -> None:
        self._model.kernels = kernels

    @property
    def state(self) -> PagedKV:
        return self._model.state

    @property
    def logits(self) -> Tensor:
        return self._model.logits

    def forward(self) -> Forward | None:
        """The native call of `LlamaModel.forward`; it notifies the other ranks itself."""
        return self._model.forward()

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the followers, rank 1 first."""
        return self._ranks.process_ids

    def twin(self) -> ShardedLM | None:
        """A model for another lane, which may draft or verify in parallel; passes take turns."""
        made = self._model.twin()
        if made is None:
            return None
        other = copy(self)
        other._model = made
        return other

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """Run a step. Raises RankError if a follower is gone, CapacityError with nothing staged."""
        self._ranks.check()
        # Everything that can be refused is refused here, before any rank has begun.
        self.state.reserve({row.seq_id: len(row.tokens) for row in rows})
        if self._model.runs_native(needs):
            try:
                return self._model.step(rows, needs)
            except MachineError as error:
                raise self._ranks.lose(f"a pass failed: {error}") from error
        return self._orders.in_turn(lambda: self._by_operators(rows, needs))

    def _by_operators(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        try:
            return self._model.step(rows, needs)
        except BaseException as error:
            raise self._ranks.lose(f"a pass failed: {error}") from error

    def close(self) -> None:
        """End the followers; the model cannot run afterwards. Garbage collection does it too."""
        self._ranks.end("they were ended when it was closed")


def load_sharded(folder: Path, options: LoadOptions, *, size: int, name: str = "") -> ShardedLM:
    """Load a model as `load_model` does, in `size` processes, of which this is rank 0.

    On a CPU the ranks share its cores, or `options.threads`; on CUDA each has a device. Raises
    ConfigError if the model cannot be split so, RankError if a process does not start.
    """
    refuse_split(folder, options, size)
    cores = options.threads or num_physical_cores()
    options = replace(options, threads=max(cores // size, 1))
    setup = RankSetup(folder=str(folder.resolve()), name=name, options=options)
    meeting = Meeting.on(pick_device(options.device), size, native=not options.force_reference)
    ranks = RankGroup(FOLLOWER, meeting, setup.to_dict())
    comm = ranks.meet()
    try:
        model = load_model(folder, options, name=name, comm=comm)
        if not isinstance(model, LlamaModel):
            raise ContractError("only decoders of the Llama family can be split")
        ranks.hear(LOADED, LOAD_SECONDS)
        ranks.patience = SILENT_SECONDS
    except BaseException:
        ranks.close()
        raise
    return ShardedLM(model, comm, ranks)


def refuse_split(folder: Path, options: LoadOptions, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share the model of `folder`."""
    wish = f"tensor_parallel={size}"
    checkpoint = open_checkpoint(folder)
    family = model_type_of(checkpoint)
    config = native_config_of(checkpoint) if family in LLAMA_FAMILIES else None
    if not isinstance(config, LlamaConfig):
        raise ConfigError(
            f"{wish}: models of type {family} run in one process only.",
            hint=f"leave --tensor-parallel at 1, or choose one of: {', '.join(LLAMA_FAMILIES)}",
        )
    if options.quantise != "none":
        raise ConfigError(
            f"{wish}: quantised weights cannot be split.",
            hint="leave --quantise at none, or --tensor-parallel at 1",
        )
    device = pick_device(options.device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{wish}: on {device.type} there is one process.",
            hint="use --device cpu, or leave --tensor-parallel at 1",
        )
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"{wish}: every rank needs a device, and PyTorch sees {torch.cuda.device_count()}.",
            hint="lower --tensor-parallel, or use --device cpu",
        )
    check_split(config, size)


def check_split(config: LlamaConfig, size: int) -> None:
    """Raise ConfigError unless `size` ranks can have equal parts of every layer."""
    counts: Mapping[str, int] = {
        "key/value heads": config.num_kv_heads,
        "features of the FFN": config.ffn_size,
    }
    for what, num in counts.items():
        if num % size:
            fitting = [n for n in range(2, 65) if not config.num_kv_heads % n | config.ffn_size % n]
            listed = ", ".join(map(str, fitting))
            raise ConfigError(
                f"tensor_parallel={size}: the target has {num} {what}, which {size} ranks "
                "cannot share equally.",
                hint=f"--tensor-parallel takes {listed}" if listed else "leave it at 1",
            )
