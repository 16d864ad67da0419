"""Captured rounds run eagerly around tiny models, and what a CUDA graph would refuse of them.

Refused are operators that tell the host a number, that choose a shape by data, or that bring a new
tensor from the host. Noted are all operators with their shapes, and the memory that was there
before the run: a captured run replays both, so they must be the same from run to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from doubles.rig import MANY, Request, exchange_round, live, round_of
from doubles.tiny_checkpoints import random_model, variant
from outrider.core.config import EngineConfig
from outrider.core.draft import Outcome, RoundTrace
from outrider.core.errors import NumericsError
from outrider.core.params import SamplingParams
from outrider.drafters.common.context import LoadedModels
from outrider.drafters.common.draft_model import SelfDraftSpec
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.round import LiveSequence
from outrider.engine.stages import Stages
from outrider.kernels.plan import PackedPlan
from outrider.models.decoder import Decoder, ModelCapacity
from outrider.models.heads import HeadsToLoad
from outrider.models.llama import GPT2Model, LlamaModel
from outrider.plugins.gpu.rounds.build import captured_round
from outrider.plugins.gpu.rounds.host_round import HostRound
from outrider.plugins.gpu.rounds.program import EagerLauncher, Launcher
from outrider.plugins.gpu.rounds.round import GraphRound

PAGE, SLOTS, WINDOW = 4, 512, 96
PROMPTS = [[1, 5, 9], [3], [8, 8, 8, 8, 8, 8, 8], [4, 2] * 6, [11, 60, 12]]


@cache
def tiny(name: str, seed: int, role: str = "target") -> LlamaModel | GPT2Model:
    """A model of the variant so called, one a role, shared by tests: every run closes what it
    opened."""
    del role
    capacity = ModelCapacity(num_slots=SLOTS, page_size=PAGE, max_rows=128, max_logits=64)
    model = random_model(variant(name), seed=seed, capacity=capacity)
    assert isinstance(model, LlamaModel | GPT2Model)
    return model


@dataclass(slots=True)
class GraphRig:
    """Runs requests by rounds of one kind or the other; without a draft nothing is drafted."""

    target: LlamaModel | GPT2Model
    draft: LlamaModel | GPT2Model | None
    config: EngineConfig
    launcher: Launcher = field(default_factory=EagerLauncher)
    num_slots: int = SLOTS
    heads: HeadsToLoad | None = None
    own: SelfDraftSpec | None = None
    made: GraphRound | HostRound | None = None
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])
    sequences: list[LiveSequence] = field(default_factory=list[LiveSequence])
    jobs: list[list[Outcome]] = field(default_factory=list[list[Outcome]])

    def engine(self, *, captured: bool) -> Engine:
        config = replace(self.config, page_size=PAGE, fused_round=False)
        kernels = self.target.kernels
        parts = LoadedModels(
            self.target,
            self.draft,
            kernels.argmax,
            sampling=kernels.sampling,
            heads=() if self.heads is None else (self.heads,),
            own=self.own,
        )
        engine = build_engine(
            parts.resolve(config), parts, num_slots=self.num_slots, sink=self.traces.append
        )
        if captured:
            stages = round_of(engine)
            assert isinstance(stages, Stages)
            self.made = self.captured(stages)
            exchange_round(engine, self.made)
        return engine

    def captured(self, stages: Stages) -> GraphRound | HostRound:
        config = replace(self.config, page_size=PAGE)
        made = captured_round(
            config, stages, draft=self.draft, window=lambda: WINDOW, launcher=self.launcher
        )
        assert not isinstance(made, str), made
        return made

    def run(
        self, requests: Sequence[Request], *, captured: bool, errors: int = 0
    ) -> list[list[int]]:
        """What each request got, but for `errors`; every memory must be empty again at the end."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        free = [model.state.num_free_tokens for model in models]
        self.traces.clear()
        self.jobs.clear()
        engine = self.engine(captured=captured)
        self.submit(engine, requests)
        while engine.has_work:
            self.jobs.append(engine.step())
            assert len(self.jobs) < MANY
        for model, before in zip(models, free, strict=True):
            model.state.check()
            assert model.state.num_free_tokens == before
        found = [seq.error for seq in self.sequences if seq.error is not None]
        assert len(found) == errors, found
        return [seq.tokens[seq.prompt_length :] for seq in self.sequences]

    def check_poison(self, wanted: Sequence[Request]) -> None:
        """Logits that are no numbers cost one request: the first of `wanted`, beside one that reads
        a token of such a state, has its text."""
        expected = self.run(wanted, captured=True)
        table_VD = self.target._tables.embeddings  # pyright: ignore[reportPrivateUsage]
        poison = next(t for t in range(len(table_VD)) if t not in [*wanted[0].prompt, *expected[0]])
        kept_D = table_VD[poison].clone()
        table_VD[poison] = torch.nan
        try:
            bad = Request([1, poison], wanted[1].params)
            outputs = self.run([wanted[0], bad], captured=True, errors=1)
        finally:
            table_VD[poison] = kept_D
        assert outputs[0] == expected[0]
        assert isinstance(self.sequences[1].error, NumericsError)

    def submit(self, engine: Engine, requests: Sequence[Request]) -> list[LiveSequence]:
        self.sequences = [live(seq_id, request) for seq_id, request in enumerate(requests)]
        for seq in self.sequences:
            engine.submit(seq)
        return self.sequences


def rig(k: int, sampler: str = "block", *, batch_size: int = 4, chunk: int = 256) -> GraphRig:
    """Target and draft of one family with other weights: some drafts are accepted, some are not."""
    config = EngineConfig(
        k=k, sampler=sampler, batch_size=batch_size, prefill_chunk=chunk, drafter="model"
    )
    return GraphRig(tiny("llama2", 3), tiny("llama2", 4, "draft"), config)


# What chat checkpoints advise, and what asks of each filter alone.
FILTERS: Sequence[Mapping[str, Any]] = (
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.05},
    {"top_k": 64, "top_p": 0.95, "min_p": 0.02},
)


def requests(
    temperatures: Sequence[float],
    *,
    max_tokens: int = 14,
    stops: frozenset[int] = frozenset(),
    filtered: bool = False,
) -> list[Request]:
    """One for each temperature; where they are `filtered`, each by filters of its own."""
    return [
        Request(
            prompt,
            SamplingParams(
                max_tokens=max_tokens + 3 * index,
                temperature=temperature,
                seed=41 + index,
                **(FILTERS[index % len(FILTERS)] if filtered else {}),
            ),
            stop_ids=stops,
            sample=index % 2,
        )
        for index, (prompt, temperature) in enumerate(zip(PROMPTS, temperatures, strict=False))
    ]


class DenseAttention:
    """Reads every slot of a sequence's table and masks: no number comes to the host, so a graph
    could capture it. Dead space must hold numbers.

    Shapes:  N = rows, A = query heads, G = KV heads, R = query heads a KV head, D = head size,
             T = table's positions, S = slots, E, O = fused heads.
    """

    def __call__(
        self,
        qkv_NE: Tensor,
        k_GSD: Tensor,
        v_GSD: Tensor,
        plan: PackedPlan,
        scale: float,
        out_NO: Tensor,
    ) -> None:
        num_kv_heads, _, head_dim = k_GSD.shape
        num_rows = qkv_NE.shape[0]
        within = torch.arange(plan.page_size, device=k_GSD.device)
        slots_NT = (plan.pages_BP[plan.seq_N][..., None] * plan.page_size + within).flatten(1)
        seen_NT = torch.arange(slots_NT.shape[1], device=k_GSD.device) < plan.visible_N[:, None]
        q_NGRD = qkv_NE[:, : out_NO.shape[1]].view(num_rows, num_kv_heads, -1, head_dim)
        k_NGTD = k_GSD[:, slots_NT].transpose(0, 1).float()
        v_NGTD = v_GSD[:, slots_NT].transpose(0, 1).float()
        mixed_NGRD = functional.scaled_dot_product_attention(
            q_NGRD, k_NGTD, v_NGTD, attn_mask=seen_NT[:, None, None], scale=scale
        )
        out_NO.copy_(mixed_NGRD.reshape(num_rows, -1))


def make_dense(model: Decoder) -> None:
    """Exchange attention of `model` for one that a graph could capture."""
    model.kernels = replace(model.kernels, attention=DenseAttention(), forward=None)


# On a CPU these read memory without an operator.
METHODS = ("tolist", "numpy", "cpu")
# By the name before the overload.
REFUSED = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "masked_select",
    "lift_fresh",
    "lift_fresh_copy",
    "_pin_memory",
    "record_stream",
}


class NotCapturableError(AssertionError):
    """A run did what no graph can hold."""


class CaptureGuard(TorchDispatchMode):
    """`calls` are operators with the shapes and dtypes of their tensors; `outside` are addresses of
    memory that they found, in the order in which it was met."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.calls: list[tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]] = []
        self.outside: dict[int, None] = {}
        self._made: dict[int, Tensor] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> CaptureGuard:
        def refuse(*_: object) -> NoReturn:
            raise NotCapturableError("a tensor is read on the host")

        for method in METHODS:
            self._patch.setattr(torch.Tensor, method, refuse)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.undo()
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        given = _tensors([args, kwargs])
        if name in REFUSED:
            raise NotCapturableError(f"{func} waits for the host or depends on data")
        if name.startswith("index") and any(t.dtype == torch.bool for t in _indices(name, args)):
            raise NotCapturableError(f"{func} has a shape that depends on a mask")
        for tensor in given:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made:
                self.outside.setdefault(address)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            address = tensor.untyped_storage().data_ptr()
            if address not in self.outside:
                self._made[address] = tensor  # kept, so that its address is not given out again
        self.calls.append((str(func), tuple((tuple(t.shape), t.dtype) for t in given)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _indices(name: str, args: Any) -> Iterable[Tensor]:
    return _tensors(args[1]) if name in ("index", "index_put", "index_put_") else ()
