"""Engine configuration: one frozen dataclass, validated when built.

`CoreSettings` are those of every engine. Settings that only one mechanism reads stand in a group of
their own, as a base class of `EngineConfig` without methods.

`ResolvedConfig` (resolve.py) has the meaning of `auto`, `LoadPlan` (api/plan.py) the values that
loading determines (window, KV cache size); nothing here changes after construction.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.env import MOST_THREADS
from outrider.core.errors import ConfigError
from outrider.core.fields import WHOLE, check_fields, documented, setting
from outrider.core.plugins import AUTO, KINDS, ControllerKind, Plugins, RuleKind
from outrider.core.spec import RopeScaling

TREE_SHAPES = ("confident", "calibrated")
HEAD_INITS = ("tie", "copy", "random")
WATCHDOGS = ("request", "engine", "off")
LANE_ORDERS = ("depth", "fixed", "slo", "learned")
FALLBACKS = ("jit", "ngram", "none", "auto")
FAN_OUTS = ("optimal", "geometric", "uniform", "top")
ROLLBACKS = ("replay", "ring")
DRAFTER_HOMES = ("thread", "process")
LANE_SYNCS = ("event", "barrier")
DEVICES = ("auto", "cpu", "cuda", "mps")
MORE_GPUS = tuple(f"cuda:{number}" for number in range(1, 8))
QUANTISE = ("none", "int8", "int4")
ROPE_SCALINGS = ("auto", "linear", "yarn")


DRAFTERS = KINDS.built_in
DEFAULT_K, MOST_K, MOST_BATCH = 4, 64, 64
# Prompt tokens of a pass: more are read faster, but the rounds of the same pass wait longer.
CHUNK, CHUNK_WITH_ROUNDS = 512, 256
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8")
# Costs on SmolLM2-135M-Instruct (studies/results/quality-r-2core-zen3.json): the growth of
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
        f"(perplexity of SmolLM2-135M: int8 {QUANTISE_COSTS['int8'][0]:+.1%}, int4 "
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
    prefill_chunk: int | None = setting(
        None,
        "Read at most this many prompt tokens in one target pass; if unset, "
        f"{CHUNK_WITH_ROUNDS} while other requests decode, and {CHUNK} otherwise.",
        minimum=1,
        maximum=65536,
        kind=int,
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


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ControllerSettings:
    """Settings that some controllers read, and the watchdog."""

    min_k: int = setting(
        1, "Shortest draft length of band, and of slo from 2 on.", minimum=0, maximum=64
    )
    target_acceptance: float = setting(
        0.7, "Acceptance rate that band holds by changing the draft length.", minimum=0, maximum=1
    )
    target_ms: float = setting(
        50.0,
        "Milliseconds a token that slo, lane_order slo and adaptive_batch stay below.",
        minimum=0.001,
        maximum=1e6,
    )
    watchdog: str = setting(
        "request",
        "Scope that stops drafting while hardly a draft is accepted, and tries again later: a "
        "request, the whole engine as well, or off. Controller goodput does so by itself.",
        choices=WATCHDOGS,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DrafterSettings:
    """Settings that one drafter reads."""

    tree_shape: str = setting(
        "confident",
        "Shape of greedy trees of Medusa heads: confident follows the heads' own probabilities, "
        "calibrated by the counts that came with them.",
        choices=TREE_SHAPES,
    )
    least_confidence: float = setting(
        0.2,
        "With drafter block, end a draft at a token below this probability of acceptance.",
        minimum=0,
        maximum=1,
    )
    lite_alpha: float = setting(
        0.7,
        "With drafter eagle-lite, how far the target's last state is extrapolated; 0 repeats it.",
        minimum=0,
        maximum=2,
    )
    lite_heads: int = setting(
        2, "With drafter medusa-lite, number of heads.", minimum=1, maximum=16
    )
    head_init: str = setting(
        "tie",
        "Weights of medusa-lite's heads: tie is the target's own output matrix, copy a copy of it "
        "to be trained, random shows the cost of junk.",
        choices=HEAD_INITS,
    )
    self_quantise: str = setting(
        "int4",
        "With drafter quantised-self, precision of the target's copy that drafts.",
        choices=QUANTISE[1:],
    )
    skip_layers: str = setting(
        "",
        "With drafter layer-skip, layers of the target that drafting leaves out, as in 2,5-7; "
        "unset is some of the middle layers.",
    )
    draft_vocab: int = setting(
        0,
        "With drafter mtp, draft only tokens with the first so many ids, which byte-level "
        "vocabularies order by frequency: a draft reads as much less of the output head. On CPUs "
        "with native kernels; 0 is all ids.",
        minimum=0,
        maximum=10_000_000,
    )
    max_ngram: int = setting(3, "Longest tail the ngram drafter looks up.", minimum=1, maximum=64)
    min_ngram: int = setting(2, "Shortest tail the ngram drafter looks up.", minimum=1, maximum=64)
    suffix_corpus: str = setting(
        "", "Text file or folder that the suffix drafter reads before any request.", harmless=("",)
    )
    suffix_tokens: int = setting(
        65536,
        "Tokens of the corpus that the suffix drafter remembers, and twice as many of requests.",
        minimum=256,
        maximum=10_000_000,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LaneSettings:
    """Settings of lanes, of drafting ahead and of a drafter's process."""

    hybrid_threshold: int = setting(
        3,
        "With pdv, up to this many requests draft and verify in one lane; 0 keeps lanes apart. "
        "With ssd, 0 drafts ahead even where rounds in turns are shorter.",
        minimum=0,
        maximum=WHOLE,
    )
    lane_order: str = setting(
        "depth",
        "Lane that goes first: depth follows the queues, slo latencies, learned past gains.",
        choices=LANE_ORDERS,
    )
    verify_margin: int = setting(
        2,
        "Verification goes first when its queue is longer than drafting's by more than this.",
        minimum=0,
        maximum=WHOLE,
    )
    concurrent_lanes: bool = setting(
        True, "Run lanes concurrently; off runs their jobs one after another, in one thread."
    )
    lane_threads: int = setting(
        0,
        "CPU threads of one lane, or of a drafter's process; 0 divides the cores among lanes, and "
        "gives a process one.",
        minimum=0,
        maximum=1024,
    )
    lane_streams: int = setting(
        3, "CUDA streams that lanes are spread over; with 1 they share it.", minimum=1, maximum=64
    )
    lane_sync: str = setting(
        "event",
        "Wait of a CUDA lane for another: event waits for the needed result, barrier for all work "
        "on the device. On a CPU both wait for the other lane's job.",
        choices=LANE_SYNCS,
    )
    decode_batch: int = setting(
        0, "Most sequences in one drafting job; 0 is batch_size.", minimum=0, maximum=1024
    )
    verify_batch: int = setting(
        0, "Most sequences in one verifying job; 0 is batch_size.", minimum=0, maximum=1024
    )
    prefill_batch: int = setting(
        0, "Most prompts read in one prefill job; 0 is batch_size.", minimum=0, maximum=1024
    )
    adaptive_batch: bool = setting(
        False, "Let the batch grow only while throughput grows and target_ms holds."
    )
    fallback: str = setting(
        "jit",
        "With ssd, drafter after an unpredicted verdict: jit drafts then, ngram copies from the "
        "text, none skips drafting, auto takes jit or ngram by past rounds.",
        choices=FALLBACKS,
    )
    fan_out: int = setting(
        16,
        "With ssd, most predicted verdicts for a sequence and round; fewer where time is short.",
        minimum=1,
        maximum=256,
    )
    fan_policy: str = setting(
        "optimal",
        "With ssd, how predicted verdicts are distributed: optimal by past rounds, geometric by "
        "acceptance alone, uniform evenly, top by the draft's own probabilities.",
        choices=FAN_OUTS,
    )
    saguaro: float = setting(
        1.0,
        "With ssd, weight of a distribution's likeliest tokens when drafting; below 1 more misses "
        "are predicted, and fewer drafts accepted.",
        minimum=0,
        maximum=1,
    )
    force_hits: float = setting(
        -1.0, "For study: share of verdicts counted as predicted; -1 is off.", minimum=-1, maximum=1
    )
    drafter_home: str = setting(
        "thread",
        "Home of a drafter ahead or on a lane: a thread or a process.",
        choices=DRAFTER_HOMES,
        harmless=("thread",),
    )
    drafter_device: str = setting(
        "auto", "Device of the draft model; auto is the target's.", choices=DEVICES + MORE_GPUS
    )
    drafter_timeout: float = setting(
        10.0, "Seconds after which a drafter counts as hung.", minimum=0.05, maximum=3600
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class HybridSettings:
    """Settings of models with recurrent states."""

    state_rollback: str = setting(
        "replay",
        "How a hybrid's recurrent states return to the point of a rejection: ring stores a state "
        "after each token, replay the change of each token, which is smaller.",
        choices=ROLLBACKS,
    )
    state_history: int = setting(
        0,
        "Draft tokens that recurrent states can return to; longer drafts are cut; 0 is all.",
        minimum=0,
        maximum=256,
    )
    state_checkpoints: int = setting(
        8,
        "Recurrent states stored at page ends, for texts with a common beginning; 0 shares none.",
        minimum=0,
        maximum=4096,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StoreSettings:
    """The setting of the prompt store."""

    prompt_store: str = setting(
        "",
        "Folder that keeps keys and values of prompts for the next start, as FOLDER or FOLDER:20GB "
        "(10 GB if unset); processes may share it, and texts stay the same.",
        harmless=("",),
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RopeSettings:
    """Settings of rotary positions, for texts longer than the target's window."""

    rope_scaling: str = setting(
        "auto",
        "Stretch the target's rotary positions by --rope-scale, for a longer window; auto is the "
        "checkpoint's own way.",
        choices=ROPE_SCALINGS,
    )
    rope_scale: float = setting(
        1.0, "With rope_scaling, how much longer the window becomes.", minimum=1, maximum=1024
    )
    yarn_orig_ctx: int = setting(
        0,
        "With rope_scaling, tokens of the window before it is stretched; 0 is the checkpoint's.",
        minimum=0,
        maximum=WHOLE,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DebugSettings:
    """Settings that compare implementations, and that record what they do."""

    batched_verify: bool = setting(
        True, "Verify a whole draft in one target pass; off feeds it token by token."
    )
    fused_round: bool = setting(
        True, "Run a whole round as one call where possible; off runs it stage by stage."
    )
    force_reference: bool = setting(False, "Use the plain PyTorch kernels only.")
    deterministic: bool = setting(False, "Request deterministic algorithms from PyTorch as well.")
    profile: bool = setting(False, "Record every round's trace in the result.")


# The fields of the last base come first.
@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    DebugSettings,
    RopeSettings,
    StoreSettings,
    HybridSettings,
    LaneSettings,
    DrafterSettings,
    ControllerSettings,
    CoreSettings,
):
    """Settings of an engine. Raises ConfigError, naming the field, when a value cannot work."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.rope_scaling == "auto") != (self.rope_scale == 1):
            raise ConfigError(
                f"rope_scaling={self.rope_scaling} and rope_scale={self.rope_scale:g}: each needs "
                "the other.",
                hint="for four times the window: --rope-scaling yarn --rope-scale 4",
            )
        if self.yarn_orig_ctx and self.rope_scaling == "auto":
            raise ConfigError(
                f"yarn_orig_ctx={self.yarn_orig_ctx} has no effect without rope_scaling.",
                hint="leave it out, or add --rope-scaling yarn --rope-scale 4",
            )

    @property
    def rope(self) -> RopeScaling:
        return RopeScaling(self.rope_scaling, self.rope_scale, self.yarn_orig_ctx)

    @property
    def most_k(self) -> int:
        """`k`, or DEFAULT_K if it is unset."""
        return DEFAULT_K if self.k is None else self.k

    @property
    def most_batch(self) -> int:
        return MOST_BATCH if self.batch_size is None else self.batch_size

    @property
    def most_chunk(self) -> int:
        """The most prompt tokens of a pass."""
        return self.prefill_chunk or CHUNK

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
