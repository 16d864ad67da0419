"""Keywords of `LLM`, `generate`, `stream`, `submit` and `chat`, for editors and type checkers.

Written by scripts/settings_page.py from the fields of EngineConfig and SamplingParams.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

OWN_PARAMETERS: tuple[str, ...]

class EngineOptions(TypedDict, total=False):
    """Fields of EngineConfig."""

    drafter: str
    """What proposes tokens; auto takes what --draft names, else look-ups in the text, together with
    an MTP block, heads, a draft model or a 4-bit copy of the target where there is one."""

    k: int | None
    """Draft at most this many tokens at once; unset is what the folder that drafts says is best
    here, else 4."""

    tree_nodes: int
    """Draft trees of at most this many tokens, where the drafter can branch; 0 drafts chains."""

    tree_shape: str
    """What shapes a greedy tree of Medusa heads: confident goes by the heads' own probabilities,
    calibrated by counts that came with them."""

    least_confidence: float
    """With drafter block, a draft ends where it is less likely to be right than that."""

    lite_alpha: float
    """With drafter eagle-lite, how far the target's last state is carried on; 0 repeats it."""

    lite_heads: int
    """With drafter medusa-lite, how many heads guess."""

    head_init: str
    """What medusa-lite's heads are: tie is the target's own output matrix, copy the same until it
    is trained, random shows what junk costs."""

    sampler: str
    """Acceptance rule. Exact: block accepts most, coupled and match tie text to the seed. Lossy,
    for study: the last five."""

    leniency: float
    """Threshold of a lossy sampler; 0 takes its usual one."""

    min_k: int
    """Shortest draft that band chooses; slo, from 2 on."""

    target_acceptance: float
    """Acceptance that band holds by changing the draft length."""

    target_ms: float
    """Milliseconds a token that slo, lane_order slo and adaptive_batch stay below."""

    dtype: str
    """Precision of weights and KV; auto is the checkpoint's own."""

    kv_dtype: str
    """Precision of the target's keys and values, on CPUs: int8 takes half the memory of 16 bits,
    and is another model's text; auto is that of --dtype."""

    quantise: str
    """Hold the target's matrices in 8 or 4 bits: faster, less memory, another model's text
    (perplexity of SmolLM2-135M: +3.3% and +0.2%)."""

    self_quantise: str
    """With drafter quantised-self, how the copy of the target that drafts is held."""

    skip_layers: str
    """With drafter layer-skip, the layers of the target that drafting leaves out, as in 2,5-7; none
    named are some of the middle."""

    device: str
    """Where the models run; auto is cuda, then mps, then cpu."""

    batch_size: int | None
    """Run at most this many requests at once; unset is what memory and speed allow."""

    schedule: str
    """How work is arranged: single is one lane; pd and pdv give prefill, drafting and verifying
    lanes of their own; ssd drafts ahead of the verdict; auto chooses."""

    hybrid_threshold: int
    """With pdv, up to this many requests draft and verify in one lane; 0 keeps lanes apart. With
    ssd, 0 drafts ahead even where rounds in turns are shorter."""

    lane_order: str
    """Which lane goes first: depth follows the queues, slo latencies, learned what paid off."""

    verify_margin: int
    """Verify goes first when its queue is longer than drafting's by more."""

    concurrent_lanes: bool
    """Run lanes at once; off runs their jobs one after another, in one thread."""

    lane_threads: int
    """CPU threads of one lane, or of a drafter's process; 0 shares the cores out among lanes, and
    gives a process one."""

    lane_streams: int
    """CUDA streams that lanes are spread over; with 1 they share it."""

    lane_sync: str
    """How a CUDA lane waits for another: event for what it needs, barrier for all work on the
    device. On a CPU both are the same wait, for the other lane's job."""

    decode_batch: int
    """Sequences in one drafting job at most; 0 is batch_size."""

    verify_batch: int
    """Sequences in one verifying job at most; 0 is batch_size."""

    prefill_batch: int
    """Prompts read in one prefill job at most; 0 is batch_size."""

    max_waiting: int
    """Requests that may wait; one more is refused."""

    reserve: float
    """Share of a request's longest text that must be free before it starts; below 1 more run at
    once, and the youngest waits again when memory ends."""

    fallback: str
    """With ssd, what drafts after a verdict nobody foresaw: jit drafts then, ngram copies from the
    text, none does without, auto takes jit or ngram by what was seen."""

    fan_out: int
    """With ssd, verdicts foreseen for a sequence and round at most; fewer where time is short."""

    fan_policy: str
    """With ssd, how they are shared out: optimal by what was seen, geometric by acceptance alone,
    uniform alike, top by the draft's own probabilities."""

    saguaro: float
    """With ssd, weight of a distribution's likeliest tokens when drafting; below 1 misses are
    foreseen more often, and fewer drafts kept."""

    force_hits: float
    """For study: share of verdicts that count as foreseen; -1 is off."""

    drafter_home: str
    """Where a drafter ahead or on a lane runs."""

    drafter_device: str
    """Device of the draft model; auto is the target's."""

    drafter_timeout: float
    """Seconds after which a drafter counts as hung."""

    adaptive_batch: bool
    """Let the batch grow only while throughput does and target_ms holds."""

    tensor_parallel: int
    """Processes or devices that share the target's weights."""

    prefill_chunk: int
    """Feed at most this many prompt tokens in one target pass."""

    context: int
    """Most tokens a sequence may hold; 0 is the target's window (4096 at most with a draft
    model)."""

    page_size: int
    """Token positions in one KV page."""

    arena_tokens: int
    """KV positions to allocate; 0 fits batch_size sequences of the window."""

    memory_share: float
    """Take at most this share of the device's memory, as where other engines run beside."""

    kv_budget: int
    """Keep this many keys of a longer prompt, those that its end attends to most: less memory,
    another model's text; 0 keeps all."""

    kv_window: int
    """With kv_budget, tokens of the prompt's end that choose, and are kept."""

    state_rollback: str
    """How a hybrid's recurrent states return to where a draft was refused: ring keeps a state after
    each token, replay what each token changed, which is less."""

    state_history: int
    """Draft tokens that recurrent states can return to, longer drafts are cut; 0 is all."""

    state_checkpoints: int
    """Recurrent states kept at ends of pages, for texts that begin alike; 0 shares none."""

    tokenizer: str
    """Model or folder whose tokenizer the target gets instead of its own."""

    chat_template: str
    """Chat template instead of the model's own: a Jinja file, or a name such as chatml."""

    max_ngram: int
    """Longest tail the ngram drafter looks up."""

    min_ngram: int
    """Shortest tail the ngram drafter looks up."""

    suffix_corpus: str
    """Text file or folder that the suffix drafter reads before any request."""

    suffix_tokens: int
    """Tokens of the corpus, and twice as many of requests, that the suffix drafter remembers."""

    watchdog: str
    """Where hardly a draft is kept, draft nothing and look again later: of a request, of the whole
    engine as well, or never. Controller goodput sees to that by itself."""

    threads: int
    """CPU threads; 0 takes the physical cores, or as many as were faster."""

    batched_verify: bool
    """Verify a whole draft in one target pass; off feeds it token by token."""

    fused_round: bool
    """Run a whole round as one call where that can be; off goes stage by stage."""

    force_reference: bool
    """Use the plain PyTorch kernels only."""

    deterministic: bool
    """Ask PyTorch for deterministic algorithms as well."""

    profile: bool
    """Record every round's trace in the result."""

class SamplingOptions(TypedDict, total=False):
    """Fields of SamplingParams."""

    max_tokens: int
    """Write at most this many tokens; chat, run and the server go on until the model ends its turn
    where this is not named."""

    temperature: float
    """0 is greedy; higher is more random."""

    top_k: int
    """Keep the k likeliest tokens; 0 keeps all."""

    top_p: float
    """Keep the likeliest tokens that together reach this probability."""

    min_p: float
    """Drop tokens below this share of the likeliest one's mass."""

    seed: int | None
    """Seed of the request's random numbers; without it each request draws one, which its result
    names."""

    stop: Sequence[str]
    """End before any of these strings."""

    skip_special_tokens: bool
    """Leave special tokens out of the text; one that ends it is never in it."""

    ignore_eos: bool
    """Go on after the model's end-of-text token."""

    min_tokens: int
    """Do not end before this many tokens."""

    thinking_budget: int | None
    """End the model's thoughts after this many tokens; 0 ends them at once, unset is no limit."""

    repetition_penalty: float
    """Above 1 avoids tokens of prompt and text; 1 is off."""

    presence_penalty: float
    """Subtracted from logits of tokens that the text has."""

    frequency_penalty: float
    """Subtracted once for every time that the text has a token."""

    logit_bias: Mapping[int, float] | None
    """Added to logits of tokens, as ID=BIAS,ID=BIAS."""

    bad_words: Sequence[str]
    """Never write these words, as the tokenizer spells them."""

    n: int
    """Completions of each prompt."""

    max_time: float
    """End after this many seconds, those in the queue included, with what there is; 0 is no
    limit."""

    logprobs: bool
    """Report the log-probability of every token."""

    top_logprobs: int
    """Report this many likeliest tokens at every place."""

    prompt_logprobs: int | None
    """Report the log-probability of every prompt token, and this many likeliest tokens at each
    place."""

    round_events: bool
    """Report every round: each drafted token, its probabilities under target and draft, the
    verdict, and times."""

    cache_salt: str
    """Share the memory of prompts with requests of the same salt alone."""

    prediction: str
    """Your guess of the text: drafts follow it as far as it is right, whatever the drafter is."""

    speculative: bool | None
    """Whether tokens are drafted for this request: false drafts none at all, true refuses the
    request where none would be; unset does as the engine does."""

    drafter: str | None
    """What proposes tokens for this request: none, a look-up in texts, or a part of the engine's
    own drafter, which it is where this is unset."""

    sampler: str | None
    """Acceptance rule of this request, an exact one: coupled and match tie its text to its seed,
    whatever drafts; unset is the engine's."""

    k: int | None
    """Draft at most this many tokens at once for this request; never more than the engine's k."""
