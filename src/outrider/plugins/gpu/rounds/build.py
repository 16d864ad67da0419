"""Builder of captured rounds; it decides whether an engine's rounds can be CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from outrider.core.config import EXACT_SAMPLERS, LOSSY_SAMPLERS, EngineConfig
from outrider.core.plugins import OFF
from outrider.core.protocols import CausalLM, Drafter
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.engine.stages import Stages
from outrider.models.llama import GPT2Model, LlamaModel
from outrider.plugins.gpu.rounds.host_round import HostRound
from outrider.plugins.gpu.rounds.memory import DraftModel, RoundMemory, StackModel
from outrider.plugins.gpu.rounds.program import (
    GraphCache,
    Launcher,
    MakeProbs,
    RoundSizes,
    launcher_for,
)
from outrider.plugins.gpu.rounds.round import GraphRound, Refusals
from outrider.plugins.gpu.rounds.sampling import (
    RULES,
    Decisions,
    GreedyProbs,
    RoundProbs,
    TorchRoundProbs,
)
from outrider.plugins.gpu.rounds.trees import TorchTreeProbs
from outrider.plugins.gpu.rounds.verify import MakeTrees, VerifyCache


def captured_round(
    config: EngineConfig,
    stages: Stages,
    *,
    draft: CausalLM | None,
    window: Callable[[], int],
    launcher: Launcher | None = None,
) -> GraphRound | HostRound | str:
    """Return rounds over the models of `stages`, or a sentence that says why there are none.

    A draft model that drafts chains does so within the graph; all other drafts are made by the host
    and verified by a graph. `draft` is the model of a model drafter; `window` says how many tokens
    a sequence may hold. `launcher` None captures on CUDA and refuses other devices; tests run the
    same rounds eagerly.
    """
    target, drafting = _stack(stages.target), _drafting(stages.drafter, draft)
    if target is None:
        return "the layers of this target cannot be run one by one"
    refused = _policy_refusal(config) or _model_refusal(target, drafting)
    if refused is None and launcher is None:
        refused = _device_refusal(target, drafting)
    if refused is not None:
        return refused
    device = target.scratch.x_ND.device
    launcher = launcher or launcher_for(device)
    k = 0 if drafting is None else config.most_k
    make_probs, make_trees = _makers(target, config.sampler, k)
    others = _host_round(config, stages, target, launcher, make_trees)
    if isinstance(others, str) or (drafting is None and stages.drafter.name != OFF):
        return others
    sizes = RoundSizes(
        k=k,
        batch_size=config.most_batch,
        page_size=config.page_size,
        num_pages=-(-(window() + k) // config.page_size),
        makes_distributions=config.sampler in RULES,
    )
    table = GraphCache(
        sizes=sizes,
        target=target,
        draft=None if drafting is None else drafting.model,
        launcher=launcher,
        make_distributions=make_probs,
    )
    memory = RoundMemory(target, drafting, k)
    made = GraphRound(stages, table, memory, others, others.refusals)
    if config.schedule != "single":
        # Another lane's stream could get the pages of a text that ended in a launched round.
        target.state.before_close = made.settle
    return made


def _host_round(
    config: EngineConfig,
    stages: Stages,
    target: StackModel,
    launcher: Launcher,
    make_trees: MakeTrees,
) -> HostRound | str:
    needs = stages.drafter.needs
    if needs.num_likely:
        return f"drafter {stages.drafter.name!r} reads the target's likely next tokens"
    if len(needs.hidden_layers) != target.state.hidden_SKD.shape[1]:
        return f"drafter {stages.drafter.name!r} reads states that the target does not store"
    table = VerifyCache(
        target=target,
        hidden_layers=needs.hidden_layers,
        most=max(config.most_k, config.tree_nodes),
        batch_size=config.most_batch,
        launcher=launcher,
        make_trees=make_trees,
    )
    return HostRound(stages, target, table, config.sampler, Refusals())


def _policy_refusal(config: EngineConfig) -> str | None:
    if config.schedule == "ssd":
        return "schedule 'ssd' drafts ahead of verdicts that the host reads"
    if config.sampler in LOSSY_SAMPLERS:
        return f"sampler {config.sampler!r} is lossy"
    if config.sampler not in EXACT_SAMPLERS:
        return f"sampler {config.sampler!r} is another package's"
    return None


def _model_refusal(target: StackModel, drafting: DraftModel | None) -> str | None:
    if any(_chooses(model) for model in (target, drafting and drafting.model)):
        return "the host chooses the experts of each token"
    if target.state.frames is not None:
        return "local layers have memory of their own"
    return None


def _device_refusal(target: StackModel, drafting: DraftModel | None) -> str | None:
    models = [target] if drafting is None else [target, drafting.model]
    device = target.scratch.x_ND.device
    if device.type != "cuda":
        return f"they run on cuda, not on {device.type}"
    if any(_attention(model) == "reference" for model in models):
        return "the reference attention waits for the host"
    return None


def _stack(model: CausalLM | None) -> StackModel | None:
    match model:
        case LlamaModel() | GPT2Model():
            return model
        case _:
            return None


def _drafting(drafter: Drafter, model: CausalLM | None) -> DraftModel | None:
    stack = _stack(model)
    match drafter:
        case ModelDrafter() if stack is not None and not drafter.sampler.branches:
            return DraftModel(stack, drafter)
        case _:
            return None


def _chooses(model: StackModel | None) -> bool:
    return isinstance(model, LlamaModel) and bool(model.config.sparse_layers)


def _attention(model: StackModel) -> str:
    """Return the name of the model's attention implementation."""
    return next(choice.name for choice in model.kernels.choices if choice.op == "attention")


def torch_distributions(sampler: str, k: int, probs_BKV: Tensor | None) -> RoundProbs:
    """Return the definition of a round's decisions, in tensor operators of any device."""
    if probs_BKV is None:
        return GreedyProbs()
    decisions = Decisions.of_round(k, probs_BKV.device)
    return TorchRoundProbs(RULES[sampler], decisions, probs_BKV)


def _makers(target: StackModel, sampler: str, k: int) -> tuple[MakeProbs, MakeTrees]:
    """Return makers of draws and judgements: fused kernels over scratch memory of the graphs'
    stream, which are compiled here, or the definitions."""
    device = target.scratch.x_ND.device
    if _attention(target) != "triton":
        return partial(torch_distributions, sampler, k), partial(TorchTreeProbs, device)
    # Imported here: Triton comes with PyTorch for CUDA alone.
    from outrider.plugins.gpu.rounds.triton import RoundKernels

    kernels = RoundKernels(device)
    kernels.compile_ahead(target.spec.vocab_size)
    return partial(kernels.make_probs, sampler), kernels.make_trees
