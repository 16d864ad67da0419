"""Counts of launches, on a CPU: how often a round on CUDA would ask the device for work.

Every operator is asked for twice. The wrapper of its Triton kernels runs without them, and what it
would launch is counted; PyTorch's reference then computes the result. PyTorch's own operators are
counted as they are dispatched, but for those that only look at a tensor in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from common import DRAFT, TARGET, Report, note, study
from gpu_check.counting import launches_kernel
from options import Options
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import LLM, EngineConfig, SamplingParams
from outrider.cache import pages
from outrider.engine.lanes import InlineLanes
from outrider.engine.stages import Stages
from outrider.kernels import registry
from outrider.kernels.operators import OPS, Kernels
from outrider.plugins.gpu.kernels import delta_ops, filters, launchers, ops, trees
from outrider.plugins.gpu.kernels.eager import EagerProbs
from outrider.plugins.gpu.kernels.ops import TritonOps
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.rounds import build
from outrider.plugins.gpu.rounds.build import captured_round
from outrider.plugins.gpu.rounds.round import GraphRound
from outrider.plugins.gpu.rounds.trees import TorchTreeProbs
from outrider.plugins.gpu.rounds.triton import RoundKernels

CPU = torch.device("cpu")
NUM_TOKENS = 24
PROMPT = "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\n"
# By drafter: what --draft names, and the nodes of a tree, 0 for chains.
DRAFTERS: Mapping[str, tuple[str, str | None, int]] = {
    "none": ("none", None, 0),
    "model": ("model", DRAFT, 0),
    "model, tree": ("model", DRAFT, 7),
    "ngram": ("ngram", None, 0),
    "suffix, tree": ("suffix", None, 7),
    "eagle": ("eagle", "outrider/embedded-eagle", 0),
    "eagle, tree": ("eagle", "outrider/embedded-eagle", 7),
    "medusa, tree": ("medusa", "outrider/embedded-medusa", 7),
    "mtp": ("mtp", "outrider/embedded-mtp", 0),
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "penalised": {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
}


class Count(TorchDispatchMode):
    """`host` are launches that the host asks for one by one, `nodes` those within a graph."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.host = self.nodes = 0
        self._is_within, self._is_paused = False, False

    def add(self, *_: object, **__: object) -> None:
        """Instead of a launch."""
        if not self._is_paused:
            self.host += not self._is_within
            self.nodes += self._is_within

    @contextmanager
    def paused(self) -> Generator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        # Numbers of the host that become a tensor are copied, where there is a device.
        if launches_kernel(func, args, made) or func.overloadpacket.__name__ == "lift_fresh":
            self.add()
        return made

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        """A launcher: a run of a program is one launch."""
        prepare()

        def launch() -> None:
            self.add()
            self._is_within = True
            try:
                program()
            finally:
                self._is_within = False

        return launch

    def twice(self, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """`plain`, after the launches of `kernel`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            kernel(*args, **kwargs)
            with self.paused():
                return plain(*args, **kwargs)

        return call


@dataclass(frozen=True, slots=True)
class Twice:
    """Two objects with the same methods, of which the first is counted alone."""

    count: Count
    kernels: Any
    plain: Any

    def __getattr__(self, name: str) -> Callable[..., Any]:
        plain = getattr(self.plain, name)

        def kernel(*args: Any, **kwargs: Any) -> None:
            # Kernels may write over logits that the definition is yet to read.
            with self.count.paused():
                copies = [one.clone() if isinstance(one, Tensor) else one for one in args]
            getattr(self.kernels, name)(*copies, **kwargs)

        return self.count.twice(kernel, plain)


def counted_kernels(count: Count, **_: object) -> Kernels:
    """Operators of a CPU, with the launches of those of CUDA."""
    plain = registry.choose(device=CPU, dtype=torch.float32, force_reference=True)
    room = Workspace(CPU)
    triton, eager = TritonOps(room), EagerProbs(room, CPU)
    names = OPS[: OPS.index("delta")]
    decoder = {
        name: count.twice(getattr(triton, name), getattr(plain, name))
        for name in names
        if name not in ("sigmoid_mul", "gelu_mul", "soft_cap")
    }
    sampling = {
        name: count.twice(getattr(eager, name), getattr(plain.sampling, name))
        for name in ("softmax", "pick", "leftover", "top_k", "keep_likely")
    }
    return replace(
        plain,
        **decoder,
        argmax=count.twice(eager.argmax, plain.argmax),
        sampling=replace(plain.sampling, **sampling),
    )


@contextmanager
def counting(count: Count) -> Generator[None]:
    """Models that are loaded within have counted operators, and kernels are not launched."""
    # Copies to a device that a CPU does not make.
    copied = count.twice(count.add, pages._tensor)  # pyright: ignore[reportPrivateUsage]
    with ExitStack() as patches:
        choose = partial(counted_kernels, count)
        patches.enter_context(mock.patch("outrider.models.loading.choose", choose))
        patches.enter_context(mock.patch.object(pages, "_tensor", copied))
        for module in MODULES:
            patches.enter_context(mock.patch.object(module, "launch", count.add))
        yield


MODULES = (ops, launchers, filters, trees, delta_ops)


@dataclass(frozen=True, slots=True)
class Found:
    """Of one request: its text, and behind its first round tokens, launches a round, rounds."""

    token_ids: tuple[int, ...]
    num_tokens: int
    host: float
    nodes: float
    num_rounds: int

    def told(self) -> dict[str, float]:
        per_token = self.host * self.num_rounds / self.num_tokens
        return {
            "host": round(self.host, 1),
            "nodes": round(self.nodes),
            "a_token": round(per_token, 1),
        }


def run(name: str, kind: str, *, captured: bool) -> Found:
    drafter, draft, tree_nodes = DRAFTERS[name]
    count = Count()
    config = EngineConfig(
        drafter=drafter, k=4, tree_nodes=tree_nodes, batch_size=1, schedule="single",
        controller="fixed", watchdog="off", device="cpu", fused_round=False, context=256,
        profile=True,
    )  # fmt: skip
    with counting(count):
        llm = LLM(TARGET, draft=draft, config=config)
        engine = llm._engine  # pyright: ignore[reportPrivateUsage]
        assert isinstance(engine.executor, InlineLanes)
        stages = engine.executor.round
        assert isinstance(stages, Stages)
        if captured:
            made = _captured(count, config, stages, llm)
            engine.executor.exchange(made)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1, **KINDS[kind])
        llm.generate([PROMPT], params)  # shapes are met once before
        with count:
            for index, _ in enumerate(llm.stream(PROMPT, params)):
                if not index:
                    # The prompt, and the first round, which reads the end of it.
                    count.host = count.nodes = 0
    result = llm.last_result
    emitted = [trace.num_emitted for trace in result.rounds if trace.num_emitted]
    rounds, tokens = len(emitted) - 1, sum(emitted[1:])
    return Found(tuple(result.token_ids), tokens, count.host / rounds, count.nodes / rounds, rounds)


def _captured(count: Count, config: EngineConfig, stages: Stages, llm: LLM) -> Any:
    kernels = RoundKernels(CPU)

    def trees_of(way: Any, k: int) -> Any:
        plain = TorchTreeProbs(CPU, way, k)
        return Twice(count, kernels.make_trees(way, k), plain)

    def probs_of(probs_BKV: Tensor | None) -> Any:
        k = 0 if config.drafter == "none" else config.most_k
        plain = build.torch_distributions(config.sampler, k, probs_BKV)
        return Twice(count, kernels.make_probs(config.sampler, probs_BKV), plain)

    draft = cast("Any", llm.models.get("draft"))
    made = captured_round(config, stages, draft=draft, window=lambda: 256, launcher=count)
    if isinstance(made, GraphRound):
        made.table.make_distributions = probs_of
    others: Any = made.others if isinstance(made, GraphRound) else made
    others.table.make_trees = trees_of
    return made


@study()
def launches(options: Options, report: Report) -> None:
    """How often does a round on CUDA ask the device for work, stage by stage and captured?

    Counted on a CPU, for the embedded target of eight layers, one request at once. `host` are
    launches that the host asks for, a round; `nodes` those within its graph; `a_token` the first by
    tokens. Texts of both sides must be the same.
    """
    names = list(DRAFTERS)[:4] if options.quick else list(DRAFTERS)
    holds = True
    for name in names:
        for kind in KINDS:
            by_stages = run(name, kind, captured=False)
            captured = run(name, kind, captured=True)
            same = captured.token_ids == by_stages.token_ids
            holds = holds and same
            cell = {
                "drafter": name,
                "requests": kind,
                "tokens_a_round": round(captured.num_tokens / captured.num_rounds, 2),
                "same_text": same,
            }
            cell |= {f"stages_{key}": value for key, value in by_stages.told().items()}
            cell |= {f"captured_{key}": value for key, value in captured.told().items()}
            note(report, **cell)
    assert holds, "some texts differ"
