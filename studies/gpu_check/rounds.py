"""Engines and rounds to be timed: the engine's own classes, captured on CUDA, eager elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from gpu_check.counting import launches_of
from gpu_check.models import PAGE
from gpu_check.setting import Setting

from outrider.core.config import EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.drafters.common.context import LoadedModels
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.lanes import InlineLanes
from outrider.engine.round import LiveSequence
from outrider.engine.stages import Stages
from outrider.models.llama import LlamaModel
from outrider.plugins.gpu.rounds.build import captured_round
from outrider.plugins.gpu.rounds.memory import PageTables, StaticPass
from outrider.plugins.gpu.rounds.program import EagerLauncher, MakeProbs, launcher_for
from outrider.plugins.gpu.rounds.round import GraphRound

_NEEDS = DraftNeeds()
_CHUNK = 128


@dataclass(slots=True)
class Bench:
    """A pair and the rounds that run it. `make_distributions` exchanges what draws and judges;
    without a draft model another drafter may be named."""

    setting: Setting
    target: LlamaModel
    draft: LlamaModel | None
    k: int
    batch: int
    sampler: str = "block"
    drafter: str = ""
    tree_nodes: int = 0
    make_distributions: MakeProbs | None = None
    traces: list[RoundTrace] = field(default_factory=list[RoundTrace])

    def engine(self, *, captured: bool = True) -> Engine:
        """With captured rounds, or with stages."""
        config = EngineConfig(
            k=self.k,
            sampler=self.sampler,
            batch_size=self.batch,
            page_size=PAGE,
            prefill_chunk=_CHUNK,
            drafter=self.drafter or ("none" if self.draft is None else "model"),
            tree_nodes=self.tree_nodes,
            fused_round=False,
        )
        kernels = self.target.kernels
        parts = LoadedModels(self.target, self.draft, kernels.argmax, sampling=kernels.sampling)
        slots = self.target.state.num_free_tokens
        engine = build_engine(
            parts.resolve(config), parts, num_slots=slots, sink=self.traces.append
        )
        if not captured:
            return engine
        assert isinstance(engine.executor, InlineLanes)
        stages = engine.executor.round
        assert isinstance(stages, Stages)
        engine.executor.exchange(self._captured(config, stages))
        return engine

    def _captured(self, config: EngineConfig, stages: Stages) -> GraphRound:
        window = min(self.target.spec.max_tokens, self.target.state.num_free_tokens // self.batch)
        launcher = None if self.setting.on_cuda else EagerLauncher()
        made = captured_round(
            config, stages, draft=self.draft, window=lambda: window, launcher=launcher
        )
        assert isinstance(made, GraphRound), f"rounds cannot be captured: {made}"
        if self.make_distributions is not None:
            made.table.make_distributions = self.make_distributions
        return made

    def run(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]], *, captured: bool = True
    ) -> list[list[int]]:
        """Texts of all requests, run to their ends."""
        return run_all(self.engine(captured=captured), requests)

    def launches(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Launches:
        """Rounds of `prompts`, to be launched one by one without an engine."""
        engine = self.engine()
        assert isinstance(engine.executor, InlineLanes)
        made = engine.executor.round
        assert isinstance(made, GraphRound)
        seqs: list[LiveSequence] = []
        for seq_id, prompt in enumerate(prompts):
            read(self.target, seq_id, prompt[:-1])
            engine.drafter.open(seq_id, prompt)
            seqs.append(LiveSequence(seq_id, list(prompt), len(prompt), params, params.max_tokens))
        entries = [made.memory.enter(seq, self.k) for seq in seqs]
        made.table.enter(entries)
        return Launches(engine, made, seqs)


@dataclass(slots=True)
class Launches:
    """Rounds that nobody reads. Close it before its sequence ids are used again."""

    engine: Engine
    made: GraphRound
    seqs: Sequence[LiveSequence]

    def launch(self) -> None:
        self.made.table.launch()

    def counts(self) -> dict[str, int]:
        """Kernels that a round launches, as `launches_of` counts them. Runs one eagerly."""
        table = self.made.table
        sampled = any(not seq.params.greedy for seq in self.seqs)
        bucket = table.buffers.mirror_B.shape[0]
        return launches_of(table.program(bucket, sampled=sampled))

    def stand_still(self) -> None:
        """Rows without room do all the work of a round and move nowhere: context stays as it is."""
        self.made.table.buffers.remaining_B.zero_()

    def close(self) -> None:
        for seq in self.seqs:
            self.engine.residents.target.state.close(seq.seq_id)
            self.engine.drafter.close(seq.seq_id)


def read(model: LlamaModel, seq_id: int, tokens: Sequence[int]) -> None:
    """Open a sequence and commit `tokens`."""
    start = model.state.open(seq_id, tokens)
    for at in range(start, len(tokens), _CHUNK):
        part = tokens[at : at + _CHUNK]
        model.step([StepRow.chain(seq_id, part, logits_from=len(part))], _NEEDS)
        model.state.commit({seq_id: range(len(part))})


def text(length: int, vocab_size: int, *, seed: int = 0) -> list[int]:
    """Token ids of a fixed text that looks like nothing."""
    return [(7919 * (i + 1) + 104_729 * seed) % (vocab_size - 8) + 4 for i in range(length)]


def captured_pass(
    model: LlamaModel, setting: Setting, *, rows: int, context: int, seq_id: int = 0
) -> Callable[[], None]:
    """A pass over a chain of `rows` tokens behind `context` committed ones of an open sequence, all
    logits wanted; each call is one launch."""
    model.state.reserve({seq_id: rows})
    device = setting.device
    columns = [model.state.pages(seq_id)]
    pages_BP = torch.tensor(columns, dtype=torch.int32, device=device)
    tables = PageTables.of(pages_BP, PAGE)
    tokens_BX = torch.tensor([text(rows, model.spec.vocab_size)], device=device)
    positions_BX = torch.arange(context, context + rows, device=device)[None]
    one = StaticPass.of(model, num_rows=rows, num_logits=rows, page_size=PAGE)

    def program() -> None:
        with torch.inference_mode():
            one(tokens_BX, positions_BX, tables, None)

    launcher = launcher_for(device)
    return launcher.make(program, lambda: None)


def run_all(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[list[int]]:
    """Texts of all requests, run to their ends. Raises what one of them failed of."""
    seqs = [
        LiveSequence(i, list(prompt), len(prompt), params, params.max_tokens)
        for i, (prompt, params) in enumerate(requests)
    ]
    for seq in seqs:
        engine.submit(seq)
    while engine.has_work:
        engine.step()
    errors = [seq.error for seq in seqs if seq.error is not None]
    if errors:
        raise errors[0]
    return [seq.tokens[seq.prompt_length :] for seq in seqs]
