"""Settings that only one mechanism reads, as base classes of `EngineConfig`, without methods."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.fields import WHOLE, setting

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
