"""What `bench quality` may be told, for the table of all verbs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Verb
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions(JsonOption):
    """Of `bench quality`."""

    formats: str = setting(
        "float32,bfloat16,int8,int4",
        "Number formats of the target, between commas; the first is what others are compared with. "
        "Also float16; none leaves perplexity out.",
    )
    rules: str = setting(
        "all",
        "Acceptance rules, between commas (block,token,match,coupled,typical,p_min,threshold,top_k,"
        "nucleus); all, or none.",
    )
    text: str | None = setting(
        None, "Perplexity of this text file; of the prompts below if not given."
    )
    text_tokens: int = setting(
        4096, "Read so many tokens of it at most (4096).", minimum=2, maximum=10_000_000
    )
    domains: str = setting(
        "code,maths", "Prompts, between commas: code, maths, conversation, summarization."
    )
    prompts: int = setting(8, "Prompts of each domain (8).", minimum=1, maximum=10_000)
    max_tokens: int = setting(64, "Emit at most this many tokens (64).", minimum=1)
    output: str | None = setting(None, "Also write the JSON object to this file.")


# Settings that every rule has its own of, or that ask for more than is compared.
DECIDED_BY_QUALITY = ("sampler", "max_tokens", "n", "profile", "logprobs", "top_logprobs")

BENCH_QUALITY = Verb(
    name="quality",
    target="outrider.cli.bench_quality:quality",
    text="Check what is written: perplexity by number format, and texts under each acceptance "
    "rule beside those of plain decoding.",
    example="outrider bench quality --formats float32,int8 --rules block,typical --domains code "
    "--prompts 2 --max-tokens 16",
    options=QualityOptions,
    settings=("program", "engine", "sampling"),
    without=DECIDED_BY_QUALITY,
)
