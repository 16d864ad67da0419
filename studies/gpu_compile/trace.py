"""Which launches engines and captured rounds make: drafters, requests, dtypes, schemes, windows.

`engines` runs the embedded models as `LLM` does, with captured rounds and stage by stage. `rounds`
runs captured rounds of models of real sizes, and counts what a round launches and reads. `verdicts`
judges host drafts over real vocabularies.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast, get_args

import torch
from gpu_check import models
from gpu_check.counting import Operators
from gpu_check.rounds import Bench, Launches, text
from gpu_check.setting import Setting
from gpu_compile.meta import META, Form, Launch, Recorder, no_weights
from torch import Tensor

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.core.rng import RoundKeys
from outrider.kernels import registry
from outrider.kernels.operators import DTYPES
from outrider.models.configs import GPT2Config, LlamaConfig
from outrider.models.llama import GPT2Model, LlamaModel
from outrider.models.weights import Placement
from outrider.plugins.gpu.rounds.sampling import Filters, Rows
from outrider.plugins.gpu.rounds.trees import DRAWN_WAYS, Way
from outrider.plugins.gpu.rounds.triton import RoundKernels, TritonTreeProbs
from outrider.plugins.gpu.rounds.verdicts import TreeDrafts
from outrider_lab.models.inflate import ModelShape

PROMPT = "def f(x):"
# 11 drafters.
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none", "k": 0},
    "model": {"drafter": "model", "k": 3},
    "model tree": {"drafter": "model", "k": 3, "tree_nodes": 6},
    "mtp": {"drafter": "mtp", "k": 3},
    "mtp tree": {"drafter": "mtp", "k": 3, "tree_nodes": 8},
    "eagle": {"drafter": "eagle", "k": 3},
    "eagle tree": {"drafter": "eagle", "k": 3, "tree_nodes": 8},
    "medusa tree": {"drafter": "medusa", "k": 3, "tree_nodes": 8},
    "ngram": {"drafter": "ngram", "k": 3},
    "suffix tree": {"drafter": "suffix", "k": 3, "tree_nodes": 8},
    "layer-skip": {"drafter": "layer-skip", "k": 3},
}
_SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3}
# 8 kinds of requests.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": _SAMPLED,
    "top-k and top-p": {**_SAMPLED, "top_k": 20, "top_p": 0.9},
    "min-p": {**_SAMPLED, "min_p": 0.1},
    "penalties": {**_SAMPLED, "repetition_penalty": 1.2, "presence_penalty": 0.1},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "mask": _SAMPLED,
    "round events": {**_SAMPLED, "round_events": True},
}
FEW, FEW_REQUESTS = ("none", "model", "eagle tree"), ("greedy", "sampled")
# dtype, scheme, context, drafters, requests: the first is the product of all drafters and all
# requests. The contexts give page tables of few columns and of a multiple of 16.
How = tuple[str, str, int, tuple[str, ...], tuple[str, ...]]
ENGINES: tuple[How, ...] = (
    ("bfloat16", "none", 160, tuple(DRAFTERS), tuple(REQUESTS)),
    ("bfloat16", "none", 480, FEW, FEW_REQUESTS),
    ("bfloat16", "int8", 160, FEW, FEW_REQUESTS),
    ("bfloat16", "int4", 160, FEW, FEW_REQUESTS),
    ("float16", "none", 160, FEW, FEW_REQUESTS),
    ("float32", "none", 160, FEW, FEW_REQUESTS),
)
NUM_TOKENS = 4


class Fallbacks(logging.Handler):
    """Collects what engines warn of: a request that went another way than the one traced."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def engines(recorder: Recorder, chosen: tuple[How, ...] = ENGINES) -> Iterator[str]:
    """A name for each engine and kind of request that ran to its end. Raises AssertionError for one
    that did not, that went another way, or that launched what no load had compiled."""
    fallbacks = Fallbacks()
    logging.getLogger("outrider").addHandler(fallbacks)
    for dtype, scheme, context, drafters, requests in chosen:
        for drafter in drafters:
            for fused in (True, False):
                way = "captured" if fused else "by stages"
                recorder.seen.clear()
                llm = LLM(
                    device="cuda",
                    dtype=dtype,
                    quantise=scheme,
                    context=context,
                    batch_size=2,
                    fused_round=fused,
                    **DRAFTERS[drafter],
                )
                fallbacks.messages.clear()
                loaded = set(recorder.seen)
                for kind in requests:
                    name = f"{drafter}, {kind}, {dtype}, {scheme}, context {context}, {way}"
                    _request(llm, kind, name)
                    if fallbacks.messages:
                        raise AssertionError(f"{name}: {fallbacks.messages[0]}")
                    _check_ahead(recorder, loaded, name)
                    yield name


def _request(llm: LLM, kind: str, name: str) -> None:
    """Alone, where that makes other launches, and beside another."""
    every = torch.ones(llm.spec.vocab_size, dtype=torch.bool)

    def all_tokens(_: Sequence[int]) -> Tensor:
        return every

    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **REQUESTS[kind])
    allowed = all_tokens if kind == "mask" else None
    both = [PROMPT, PROMPT * 4]
    for prompts in ([PROMPT], both) if kind in FEW_REQUESTS else (both,):
        results = llm.generate(prompts, params, allowed=allowed)
        if not all(len(result.token_ids) == NUM_TOKENS for result in results):
            raise AssertionError(f"{name}: {results[0].error}")


def hybrid(recorder: Recorder) -> None:
    """The embedded hybrid, with each memory of its states."""
    for rollback in ("ring", "replay"):
        for drafter in ("none", "ngram"):
            recorder.seen.clear()
            llm = LLM(
                "outrider/embedded-hybrid",
                config=EngineConfig(
                    device="cuda",
                    dtype="bfloat16",
                    state_rollback=rollback,
                    batch_size=2,
                    context=160,
                    **DRAFTERS[drafter],
                ),
            )
            loaded = set(recorder.seen)
            llm.generate(
                [PROMPT, PROMPT * 4], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
            )
            _check_ahead(recorder, loaded, f"hybrid, {rollback}, {drafter}")


def _check_ahead(recorder: Recorder, loaded: set[Form], name: str) -> None:
    if late := recorder.seen - loaded:
        raise AssertionError(f"{name}: compiled within a request: {late}")


# Sizes of Llama 3 of these names, with heads of 64 (1b, 0.4b) and 128.
SIZES: dict[str, tuple[ModelShape, int]] = {
    "0.4b": (ModelShape(1024, 24, 16, 8, 4096), 64),
    "1b": (ModelShape(2048, 16, 32, 8, 8192), 64),
    "8b": (ModelShape(4096, 32, 32, 8, 14336), 128),
    "70b": (ModelShape(8192, 80, 64, 8, 28672), 128),
}
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Case:
    """A captured round: its models, and the request that it runs."""

    target: str
    draft: str = ""
    k: int = 0
    sampled: bool = False
    dtype: str = "bfloat16"
    scheme: str = "none"
    window: int = 4096
    batch: int = 1
    vocabulary: int = 128_256

    @property
    def name(self) -> str:
        plain = Case(self.target)
        parts = [self.target + (f" with {self.draft}, K={self.k}" if self.draft else "")]
        parts.append("sampled" if self.sampled else "greedy")
        parts += [
            f"{name} {getattr(self, name)}" if name in ("window", "batch", "vocabulary") else
            getattr(self, name)
            for name in ("dtype", "scheme", "window", "batch", "vocabulary")
            if getattr(self, name) != getattr(plain, name)
        ]  # fmt: skip
        return ", ".join(parts)


# The rounds that the table has, and then those whose forms alone are wanted.
TABLED = (
    Case("1b"),
    Case("8b"),
    Case("8b", sampled=True),
    Case("8b", scheme="int8"),
    Case("8b", scheme="int4"),
    Case("8b", window=131_072),
    Case("8b", batch=16),
    Case("8b", "0.4b", 4),
    Case("8b", "0.4b", 4, sampled=True),
    Case("70b"),
    Case("70b", scheme="int4"),
)
OTHERS = (
    Case("1b", sampled=True, vocabulary=50_257),
    Case("1b", sampled=True, vocabulary=262_144),
    Case("1b", "0.4b", 1, sampled=True),
    Case("1b", "0.4b", 16, sampled=True),
    Case("1b", scheme="int4"),
    Case("8b", dtype="float16", sampled=True),
    Case("1b", dtype="float16"),
    Case("8b", dtype="float32"),
    Case("1b", dtype="float32"),
    Case("70b", sampled=True, window=131_072),
)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one captured round launches, and the bytes that its programs ask for: of weights; of
    activations, which every program of a linear reads again; of keys and values; of the rest."""

    launches: dict[str, int]
    operators: int
    bytes: dict[str, int]

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())


def model_of(case: Case, name: str, capacity: models.ModelCapacity) -> LlamaModel:
    """Of the sizes of `name`, without a value."""
    shape, head_dim = SIZES[name]
    config = replace(
        _llama(),
        vocab_size=case.vocabulary,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        ffn_size=shape.ffn_size,
        head_dim=head_dim,
        max_tokens=131_072,
    )
    return LlamaModel(config, no_weights(DTYPES[case.dtype]), **_built(case, name, capacity))


def _llama() -> LlamaConfig:
    return replace(models.small_config(), tie_word_embeddings=False)


def _built(case: Case, name: str, capacity: models.ModelCapacity) -> dict[str, Any]:
    dtype = DTYPES[case.dtype]
    kernels = registry.choose(device=META, dtype=dtype, quantise=case.scheme)
    placement = Placement(name, dtype, META, case.scheme)
    return {"kernels": kernels, "placement": placement, "capacity": capacity}


def rounds(case: Case, recorder: Recorder) -> tuple[RoundCost, list[Launch]]:
    """The second round of `case`, and its launches."""
    capacity = models.room_for(case.batch, case.window, rows=case.batch * (case.k + 1) + 128)
    target = model_of(case, case.target, capacity)
    draft = model_of(replace(case, scheme="none"), case.draft, capacity) if case.draft else None
    return _counted(case, recorder, target, draft)


def gpt2_round(recorder: Recorder) -> None:
    config = GPT2Config(
        family="gpt2",
        vocab_size=50_257,
        hidden_size=768,
        ffn_size=3072,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        max_tokens=1024,
    )
    case = Case("gpt2", window=1024, vocabulary=config.vocab_size)
    capacity = models.room_for(1, 1024, rows=128)
    weights = no_weights(torch.bfloat16)
    target = GPT2Model(config, weights, **_built(case, "gpt2", capacity))
    _counted(case, recorder, cast("LlamaModel", target), None)


# Tokens of GPT-2, Llama 3 and Gemma.
VOCABULARIES = (50_257, 128_256, 262_144)
_NODES = 7


def verdicts() -> None:
    """On host drafts, of every way, filtered and not, over vocabularies that no engine here has."""
    ints_2 = torch.ones(2, dtype=torch.int64, device=META)
    floats_2, masses_2 = ints_2.float(), ints_2.double()
    depths_2W = ints_2[:, None].expand(2, _NODES + 1).contiguous()
    nodes_2K = depths_2W[:, 1:].contiguous()
    for size, way, filtered in product(VOCABULARIES, get_args(Way), (False, True)):
        judge = TritonTreeProbs(RoundKernels(META), way)
        filters = Filters(ints_2, masses_2, floats_2) if filtered else None
        rows = Rows(floats_2, ints_2, RoundKeys(ints_2, ints_2, ints_2), filters)
        q_2KV = torch.empty(2, _NODES, size, device=META)
        for q in (None, q_2KV) if way in DRAWN_WAYS else (None,):
            drafts = TreeDrafts(nodes_2K, nodes_2K, ints_2 != 0, q)
            judge.judge(torch.empty(2, _NODES + 1, size, device=META), drafts, depths_2W, rows)


def _counted(
    case: Case, recorder: Recorder, target: LlamaModel, draft: LlamaModel | None
) -> tuple[RoundCost, list[Launch]]:
    params = SamplingParams(max_tokens=64, temperature=0.8 if case.sampled else 0.0, seed=1)
    bench = Bench(Setting(META, quick=False), target, draft, k=case.k, batch=case.batch)
    prompts = [text(CONTEXT, case.vocabulary, seed=seed) for seed in range(case.batch)]
    launches: Launches = bench.launches(prompts, params)
    launches.launch()
    recorder.last = made = list[Launch]()
    with Operators() as operators:
        launches.launch()
    recorder.last = None
    launches.close()
    cost = RoundCost(
        dict(sorted(Counter(one.name for one in made).items())),
        operators.counts.total(),
        _bytes(made, case.batch),
    )
    return cost, made


def _bytes(launches: list[Launch], batch: int) -> dict[str, int]:
    found = Counter(weights=0, activations=0, keys=0, rest=0)
    for one in launches:
        found.update(bytes_of(one, CONTEXT * batch))
    return dict(found)


# Of linears, what a pass reads once, and what every program of some outputs reads.
_WEIGHTS = ("weight_ptr", "factor_ptr", "scale_ptr")
_ROWS = ("x_ptr", "values_ptr", "row_scale_ptr", "row_factor_ptr")
# Kernels that read of each row of logits a number or a piece, and those that read whole rows, of
# both distributions.
_FEW = ("ratio_kernel", "pick_kernel", "decide_kernel")
_BOTH = ("left_kernel", "uncovered_kernel")
# Memory of which a launch reads a part.
_IN_PART = ("k_ptr", "v_ptr", "table_ptr", "pages_ptr", "cos_ptr", "sin_ptr")
# Without norms of heads these are the tables of cosines.
_NORMS = ("q_weight_ptr", "k_weight_ptr")
_PARTS = ("best_ptr", "total_ptr", "mixed_ptr")


def bytes_of(launch: Launch, num_keys: int) -> dict[str, int]:
    """Bytes that the programs of one launch ask for, where the texts' tokens are `num_keys`."""
    named = {name: one for name, one in launch.by_name.items() if isinstance(one, Tensor)}
    if "weight_ptr" in named and len(launch.grid) == 2:
        rows = sum(named[name].nbytes for name in named if name in _ROWS)
        return {
            "weights": sum(named[name].nbytes for name in named if name in _WEIGHTS),
            "activations": rows * launch.grid[1],
            "rest": named["out_ptr"].nbytes,
        }
    if launch.name == "attend_kernel":
        k_GSD = named["k_ptr"]
        token = k_GSD.shape[0] * k_GSD.shape[2] * k_GSD.element_size()
        return {"keys": 2 * num_keys * token, "rest": named["qkv_ptr"].nbytes}
    if launch.name in _FEW:
        return {}
    if launch.name in _BOTH:
        return {"rest": 2 * launch.grid[0] * launch.by_name["size"] * torch.float32.itemsize}
    left_out = (*_IN_PART, *_NORMS, *(_PARTS if launch.name == "merge_kernel" else ()))
    whole = {id(one): one.nbytes for name, one in named.items() if name not in left_out}
    return {"rest": sum(whole.values())}
