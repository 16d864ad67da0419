"""Keywords of `LLM`, `generate`, `stream`, `submit` and `chat`, for editors and type checkers.

Written by scripts/settings_page.py from the fields of EngineConfig and SamplingParams.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypedDict

DraftFunction: TypeAlias = Callable[[list[int], int], Iterable[int] | None]

OWN_PARAMETERS: tuple[str, ...]

class EngineOptions(TypedDict, total=False):
    """Fields of EngineConfig."""

    drafter: str | DraftFunction
    """Method that proposes tokens; auto takes the drafter that --draft implies, else look-ups in
    the text, together with an MTP block, heads, a draft model or a 4-bit copy of the target where
    there is one."""

    k: int | None
    """Draft at most this many tokens at once; unset is the best k that the draft folder states for
    this machine, else 4."""

    tree_nodes: int
    """Draft trees of at most this many tokens, where the drafter can branch; 0 drafts chains."""

    sampler: str
    """Acceptance rule. Exact: block accepts most, coupled and match tie text to the seed. Lossy,
    for study: the last five."""

    leniency: float
    """Threshold of a lossy sampler; 0 is that sampler's default."""

    dtype: str
    """Precision of weights and KV; auto is the checkpoint's own."""

    kv_dtype: str
    """Precision of the target's keys and values, on CPUs: int8 takes half the memory of 16 bits and
    changes the text; auto is that of --dtype."""

    quantise: str
    """Hold the target's matrices in 8 or 4 bits: faster, less memory, but the text changes
    (perplexity of SmolLM2-135M: int8 +3.3%, int4 +0.2%)."""

    device: str
    """Where the models run; auto is cuda, then mps, then cpu."""

    batch_size: int | None
    """Run at most this many requests at once; unset follows memory and speed."""

    schedule: str
    """Arrangement of work: single is one lane; pd and pdv give prefill, drafting and verifying
    lanes of their own; ssd drafts ahead of the verdict; auto chooses."""

    max_waiting: int
    """Requests that may wait; one more is refused."""

    reserve: float
    """Share of a request's longest text that must be free before it starts; below 1 more run at
    once, and the youngest goes back to the queue when memory ends."""

    tensor_parallel: int
    """Processes or devices that share the target's weights."""

    prefill_chunk: int | None
    """Read at most this many prompt tokens in one target pass; if unset, 256 while other requests
    decode, and 512 otherwise."""

    context: int
    """Most tokens a sequence may hold; 0 is the target's window (4096 at most with a draft
    model)."""

    page_size: int
    """Token positions in one KV page."""

    arena_tokens: int
    """KV positions to allocate; 0 fits batch_size sequences of the window."""

    memory_share: float
    """Use at most this share of the device's memory, for example where other engines run too."""

    kv_budget: int
    """Store only this many keys of a longer prompt, those that its end attends to most: less
    memory, but the text changes; 0 stores all."""

    kv_window: int
    """With kv_budget, tokens at the prompt's end that choose the keys, and are stored too."""

    tokenizer: str
    """Model or folder whose tokenizer the target gets instead of its own."""

    chat_template: str
    """Chat template instead of the model's own: a Jinja file, or a name such as chatml."""

    threads: int
    """CPU threads; 0 takes the physical cores, or another number that was faster."""

    min_k: int
    """Shortest draft length of band, and of slo from 2 on."""

    target_acceptance: float
    """Acceptance rate that band holds by changing the draft length."""

    target_ms: float
    """Milliseconds a token that slo, lane_order slo and adaptive_batch stay below."""

    watchdog: str
    """Scope that stops drafting while hardly a draft is accepted, and tries again later: a request,
    the whole engine as well, or off. Controller goodput does so by itself."""

    tree_shape: str
    """Shape of greedy trees of Medusa heads: confident follows the heads' own probabilities,
    calibrated by the counts that came with them."""

    least_confidence: float
    """With drafter block, end a draft at a token below this probability of acceptance."""

    lite_alpha: float
    """With drafter eagle-lite, how far the target's last state is extrapolated; 0 repeats it."""

    lite_heads: int
    """With drafter medusa-lite, number of heads."""

    head_init: str
    """Weights of medusa-lite's heads: tie is the target's own output matrix, copy a copy of it to
    be trained, random shows the cost of junk."""

    self_quantise: str
    """With drafter quantised-self, precision of the target's copy that drafts."""

    skip_layers: str
    """With drafter layer-skip, layers of the target that drafting leaves out, as in 2,5-7; unset is
    some of the middle layers."""

    draft_vocab: int
    """With drafter mtp, draft only tokens with the first so many ids, which byte-level vocabularies
    order by frequency: a draft reads as much less of the output head. On CPUs with native kernels;
    0 is all ids."""

    max_ngram: int
    """Longest tail the ngram drafter looks up."""

    min_ngram: int
    """Shortest tail the ngram drafter looks up."""

    suffix_corpus: str
    """Text file or folder that the suffix drafter reads before any request."""

    suffix_tokens: int
    """Tokens of the corpus that the suffix drafter remembers, and twice as many of requests."""

    hybrid_threshold: int
    """With pdv, up to this many requests draft and verify in one lane; 0 keeps lanes apart. With
    ssd, 0 drafts ahead even where rounds in turns are shorter."""

    lane_order: str
    """Lane that goes first: depth follows the queues, slo latencies, learned past gains."""

    verify_margin: int
    """Verification goes first when its queue is longer than drafting's by more than this."""

    concurrent_lanes: bool
    """Run lanes concurrently; off runs their jobs one after another, in one thread."""

    lane_threads: int
    """CPU threads of one lane, or of a drafter's process; 0 divides the cores among lanes, and
    gives a process one."""

    lane_streams: int
    """CUDA streams that lanes are spread over; with 1 they share it."""

    lane_sync: str
    """Wait of a CUDA lane for another: event waits for the needed result, barrier for all work on
    the device. On a CPU both wait for the other lane's job."""

    decode_batch: int
    """Most sequences in one drafting job; 0 is batch_size."""

    verify_batch: int
    """Most sequences in one verifying job; 0 is batch_size."""

    prefill_batch: int
    """Most prompts read in one prefill job; 0 is batch_size."""

    adaptive_batch: bool
    """Let the batch grow only while throughput grows and target_ms holds."""

    fallback: str
    """With ssd, drafter after an unpredicted verdict: jit drafts then, ngram copies from the text,
    none skips drafting, auto takes jit or ngram by past rounds."""

    fan_out: int
    """With ssd, most predicted verdicts for a sequence and round; fewer where time is short."""

    fan_policy: str
    """With ssd, how predicted verdicts are distributed: optimal by past rounds, geometric by
    acceptance alone, uniform evenly, top by the draft's own probabilities."""

    saguaro: float
    """With ssd, weight of a distribution's likeliest tokens when drafting; below 1 more misses are
    predicted, and fewer drafts accepted."""

    force_hits: float
    """For study: share of verdicts counted as predicted; -1 is off."""

    drafter_home: str
    """Home of a drafter ahead or on a lane: a thread or a process."""

    drafter_device: str
    """Device of the draft model; auto is the target's."""

    drafter_timeout: float
    """Seconds after which a drafter counts as hung."""

    state_rollback: str
    """How a hybrid's recurrent states return to the point of a rejection: ring stores a state after
    each token, replay the change of each token, which is smaller."""

    state_history: int
    """Draft tokens that recurrent states can return to; longer drafts are cut; 0 is all."""

    state_checkpoints: int
    """Recurrent states stored at page ends, for texts with a common beginning; 0 shares none."""

    prompt_store: str
    """Folder that keeps keys and values of prompts for the next start, as FOLDER or FOLDER:20GB (10
    GB if unset); processes may share it, and texts stay the same."""

    rope_scaling: str
    """Stretch the target's rotary positions by --rope-scale, for a longer window; auto is the
    checkpoint's own way."""

    rope_scale: float
    """With rope_scaling, how much longer the window becomes."""

    yarn_orig_ctx: int
    """With rope_scaling, tokens of the window before it is stretched; 0 is the checkpoint's."""

    batched_verify: bool
    """Verify a whole draft in one target pass; off feeds it token by token."""

    fused_round: bool
    """Run a whole round as one call where possible; off runs it stage by stage."""

    force_reference: bool
    """Use the plain PyTorch kernels only."""

    deterministic: bool
    """Request deterministic algorithms from PyTorch as well."""

    profile: bool
    """Record every round's trace in the result."""

class SamplingOptions(TypedDict, total=False):
    """Fields of SamplingParams."""

    max_tokens: int
    """Write at most this many tokens; if unset, chat, run and the server go on until the model ends
    its turn."""

    temperature: float
    """0 is greedy; higher is more random."""

    top_k: int
    """Keep the k likeliest tokens; 0 keeps all."""

    top_p: float
    """Keep the likeliest tokens that together reach this probability."""

    min_p: float
    """Drop tokens below this share of the likeliest one's mass."""

    seed: int | None
    """Seed of the request's random numbers; if unset, each request draws one, which its result
    reports."""

    stop: Sequence[str]
    """End before any of these strings."""

    stop_token_ids: Sequence[int]
    """End at any of these tokens, as at an end-of-text token, also with ignore_eos."""

    skip_special_tokens: bool
    """Leave special tokens out of the text; one that ends the text is never in it."""

    ignore_eos: bool
    """Continue after the model's end-of-text token."""

    min_tokens: int
    """Do not end before this many tokens."""

    thinking_budget: int | None
    """End the model's thoughts after this many tokens; 0 ends them at once, unset is no limit."""

    repetition_penalty: float
    """Above 1, avoid tokens of prompt and text; 1 is off."""

    presence_penalty: float
    """Subtracted from the logits of tokens in the text."""

    frequency_penalty: float
    """Subtracted once for each occurrence of a token in the text."""

    logit_bias: Mapping[int, float] | None
    """Added to the logits of tokens, as ID=BIAS,ID=BIAS."""

    bad_words: Sequence[str]
    """Never write these words, as the tokenizer spells them."""

    n: int
    """Completions of each prompt."""

    max_time: float
    """End after this many seconds, queueing included, with the text so far; 0 is no limit."""

    logprobs: bool
    """Report the log-probability of every token."""

    top_logprobs: int
    """Report this many top tokens at every position."""

    prompt_logprobs: int | None
    """Report the log-probability of every prompt token, and this many likeliest tokens at each
    position."""

    round_events: bool
    """Report every round: each drafted token, its probabilities under target and draft, the
    verdict, and times."""

    cache_salt: str
    """Share cached prompts only with requests of the same salt."""

    prediction: str
    """Your guess of the text: any drafter first drafts along it, as far as it is right."""

    speculative: bool | Mapping[str, object] | None
    """False drafts nothing for this request; true refuses the request if nothing would be drafted;
    {"drafters": [...]} is true with these `drafters`; unset follows the engine."""

    drafters: Sequence[str]
    """Only these members of the engine's drafter, or look-ups, draft for this request."""

    drafter: str | None
    """Drafter of this request: none, a look-up in texts, or a part of the engine's own drafter;
    unset is the engine's own."""

    sampler: str | None
    """Acceptance rule of this request, an exact one: coupled and match tie its text to its seed,
    with any drafter; unset is the engine's."""

    k: int | None
    """Draft at most this many tokens at once for this request; never more than the engine's k."""
