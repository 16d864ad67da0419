"""How much one request may ask for: a table that the library and the command line read.

What is above a limit is refused with ConfigError before any of it is run. Each bounds work or
memory that a request costs others besides its own tokens; tokens are bounded by the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """At most so many; `what` says of what, for messages and documents."""

    most: int
    what: str


STOPS = Limit(16, "stop strings")
STOP_BYTES = Limit(256, "bytes of a stop string in UTF-8")
BAD_WORDS = Limit(256, "bad words")
BAD_WORD_BYTES = Limit(256, "bytes of a bad word in UTF-8")
LOGIT_BIAS = Limit(1024, "token ids with a bias")
COMPLETIONS = Limit(16, "completions of one prompt")
TOP_LOGPROBS = Limit(20, "likeliest tokens reported at a place")
MESSAGES = Limit(1024, "messages of a conversation")
# Text of any language has 1 to 8 bytes a token; only long runs of blanks come near this.
BYTES_PER_TOKEN = Limit(
    32, "bytes of a prompt, of all messages or of a prediction, for each token of the window"
)
# Whole numbers that no machine reaches, and that every integer type of a kernel holds.
WHOLE = 2**31 - 1

LIMITS: Mapping[str, Limit] = {
    "stop": STOPS,
    "stop, each": STOP_BYTES,
    "bad_words": BAD_WORDS,
    "bad_words, each": BAD_WORD_BYTES,
    "logit_bias": LOGIT_BIAS,
    "n": COMPLETIONS,
    "top_logprobs": TOP_LOGPROBS,
    "messages": MESSAGES,
    "prompt": BYTES_PER_TOKEN,
}
