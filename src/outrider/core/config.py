"""Engine configuration: one frozen dataclass, validated when built.

`ResolvedConfig` (resolve.py) has the meaning of `auto`, `LoadPlan` (api/plan.py) the values that
loading determines (window, KV cache size); nothing here changes after construction.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.env import MOST_THREADS
from outrider.core.fields import WHOLE, check_fields, documented, setting
from outrider.core.mechanisms import (
    DEVICES,
    QUANTISE,
    ControllerSettings,
    DebugSettings,
    DrafterSettings,
    HybridSettings,
    LaneSettings,
)
from outrider.core.plugins import AUTO, KINDS, ControllerKind, Plugins, RuleKind

DRAFTERS = KINDS.built_in
DEFAULT_K, MOST_K, MOST_BATCH = 4, 64, 64
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8")
# Costs on SmolLM2-135M-Instruct (benchmarks/results/quality-r-2core-zen3.json): the growth of
# perplexity, and the share of positions where the first choice stays.
QUANTISE_COSTS = {"int8": (0.0328, 0.8754), "int4": (0.002, 0.964)}
EXACT_SAMPLERS = ("block", "token", "match", "coupled")
# Exact samplers whose noise depends on seed, sample and position alone: a seed has one text.
SEED_TIED_SAMPLERS = ("match", "coupled")
UNTIED_SAMPLERS = ("block", "token")
LOSSY_SAMPLERS = ("typical", "p_min", "threshold", "top_k", "nucleus")
RULES = Plugins("rule", RuleKind, (*EXACT_SAMPLERS, *LOSSY_SAMPLERS))
CONTROLLERS = ("auto", "fixed", "band", "slo", "goodput")
OTHER_CONTROLLERS = Plugins("controller", ControllerKind, CONTROLLERS)
SCHEDULES = ("single", "pd", "pdv", "ssd", "auto")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CoreSettings:
    """Settings of every engine."""

    drafter: str = setting(
        AUTO,
        "Method that proposes tokens; auto takes the drafter that --draft implies, else look-ups "
        "in the text, together with an MTP block, heads, a draft model or a 4-bit copy of the "
        "target where there is one.",
        choices=DRAFTERS,
        others=KINDS.names,
    )
    k: int | None = setting(
        None,
        "Draft at most this many tokens at once; unset is the best k that the draft folder states "
        f"for this machine, else {DEFAULT_K}.",
        minimum=0,
        maximum=MOST_K,
        kind=int,
    )
    tree_nodes: int = setting(
        0,
        "Draft trees of at most this many tokens, where the drafter can branch; 0 drafts chains.",
        minimum=0,
        maximum=256,
    )
    sampler: str = setting(
        "block",
        "Acceptance rule. Exact: block accepts most, coupled and match tie text to the seed. "
        "Lossy, for study: the last five.",
        choices=RULES.built_in,
        others=RULES.names,
        harmless=EXACT_SAMPLERS,
    )
    leniency: float = setting(
        0.0, "Threshold of a lossy sampler; 0 is that sampler's default.", minimum=0, maximum=1000
    )
    controller: str = setting(
        "auto",
        "Method that chooses the draft length up to k: band by acceptance, slo also by latency, "
        "goodput by measured cost and gain; auto is goodput where neither drafter nor draft is "
        "named, with --schedule auto and, where that changes no text, for heads not known to pay "
        "and drafts known not to pay; else fixed.",
        choices=CONTROLLERS,
        others=OTHER_CONTROLLERS.names,
    )
    dtype: str = setting(
        "auto", "Precision of weights and KV; auto is the checkpoint's own.", choices=DTYPES
    )
    kv_dtype: str = setting(
        "auto",
        "Precision of the target's keys and values, on CPUs: int8 takes half the memory of 16 "
        "bits and changes the text; auto is that of --dtype.",
        choices=KV_DTYPES,
    )
    quantise: str = setting(
        "none",
        "Hold the target's matrices in 8 or 4 bits: faster, less memory, but the text changes "
        f"(perplexity of SmolLM2-135M: {QUANTISE_COSTS['int8'][0]:+.1%} and "
        f"{QUANTISE_COSTS['int4'][0]:+.1%}).",
        choices=QUANTISE,
    )
    device: str = setting(
        "auto", "Where the models run; auto is cuda, then mps, then cpu.", choices=DEVICES
    )
    batch_size: int | None = setting(
        *(None, "Run at most this many requests at once; unset follows memory and speed."),
        kind=int,
        minimum=1,
        maximum=1024,
    )
    schedule: str = setting(
        "single",
        "Arrangement of work: single is one lane; pd and pdv give prefill, drafting and verifying "
        "lanes of their own; ssd drafts ahead of the verdict; auto chooses.",
        choices=SCHEDULES,
    )
    max_waiting: int = setting(
        1000, "Requests that may wait; one more is refused.", minimum=1, maximum=1_000_000
    )
    reserve: float = setting(
        1.0,
        "Share of a request's longest text that must be free before it starts; below 1 more run at "
        "once, and the youngest goes back to the queue when memory ends.",
        minimum=0,
        maximum=1,
    )
    tensor_parallel: int = setting(
        1,
        "Processes or devices that share the target's weights.",
        minimum=1,
        maximum=64,
        harmless=(1,),
    )
    prefill_chunk: int = setting(
        256, "Read at most this many prompt tokens in one target pass.", minimum=1, maximum=65536
    )
    context: int = setting(
        0,
        "Most tokens a sequence may hold; 0 is the target's window "
        "(4096 at most with a draft model).",
        minimum=0,
        maximum=WHOLE,
    )
    page_size: int = setting(32, "Token positions in one KV page.", minimum=1, maximum=4096)
    arena_tokens: int = setting(
        0,
        "KV positions to allocate; 0 fits batch_size sequences of the window.",
        minimum=0,
        maximum=WHOLE,
    )
    memory_share: float = setting(
        1.0,
        "Use at most this share of the device's memory, for example where other engines run too.",
        minimum=0.01,
        maximum=1,
    )
    kv_budget: int = setting(
        0,
        "Store only this many keys of a longer prompt, those that its end attends to most: less "
        "memory, but the text changes; 0 stores all.",
        minimum=0,
        maximum=WHOLE,
    )
    kv_window: int = setting(
        16,
        "With kv_budget, tokens at the prompt's end that choose the keys, and are stored too.",
        minimum=1,
        maximum=1024,
    )
    tokenizer: str = setting(
        "", "Model or folder whose tokenizer the target gets instead of its own.", harmless=("",)
    )
    chat_template: str = setting(
        "",
        "Chat template instead of the model's own: a Jinja file, or a name such as chatml.",
        harmless=("",),
    )
    threads: int = setting(
        0,
        "CPU threads; 0 takes the physical cores, or another number that was faster.",
        minimum=0,
        maximum=MOST_THREADS,
    )


# The fields of the last base come first.
@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    DebugSettings, HybridSettings, LaneSettings, DrafterSettings, ControllerSettings, CoreSettings
):
    """Settings of an engine. Raises ConfigError, naming the field, when a value cannot work."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def most_k(self) -> int:
        """`k`, or DEFAULT_K if it is unset."""
        return DEFAULT_K if self.k is None else self.k

    @property
    def most_batch(self) -> int:
        return MOST_BATCH if self.batch_size is None else self.batch_size

    @property
    def resolved_controller(self) -> str:
        """The controller after resolving auto."""
        if self.controller != "auto":
            return self.controller
        return "goodput" if self.schedule == "auto" else "fixed"

    @property
    def claims_exact(self) -> bool:
        """True if its acceptance rule claims to preserve the target's distribution."""
        if self.sampler in RULES.first:
            return self.sampler in EXACT_SAMPLERS
        return RULES.load(self.sampler).exact
