"""What a request asks of each of its drafts, sent once: filters, and how its logits are shaped.

Not sent is the caller's mask of allowed tokens, which is code. Without it fewer drafts are
accepted, and the text is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from outrider.core.logits import Shaper
from outrider.core.params import SamplingParams
from outrider.drafters.process.frames import Frame, Kind, Reader, Writer

# More than any vocabulary has: keeps all, as larger numbers do.
_MOST = 2**31 - 1
_LAW = Struct("<qdidd?")
_SHAPE = Struct("<IIdddI")
_BIAS = Struct("<id")
_COUNT = Struct("<I")


@dataclass(frozen=True, slots=True)
class Terms:
    """Of `params` only what shapes a law is sent; the rest comes out as its defaults."""

    params: SamplingParams
    shaper: Shaper | None

    def same(self, other: Terms | None) -> bool:
        """The very same objects: a shaper counts tokens, so it is never compared by value."""
        return other is not None and self.params is other.params and self.shaper is other.shaper

    def frame(self, seq_id: int) -> Frame:
        params = self.params
        writer = Writer()
        filters = (params.temperature, min(params.top_k, _MOST), params.top_p, params.min_p)
        writer.put(_LAW, seq_id, *filters, self.shaper is not None)
        if self.shaper is not None:
            _put_shaper(writer, self.shaper)
        return writer.frame(Kind.TERMS)


def read_terms(body: bytes) -> tuple[int, Terms]:
    """The sequence, and its terms."""
    reader = Reader(body)
    seq_id, temperature, top_k, top_p, min_p, shaped = reader.take(_LAW)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    terms = Terms(params, _take_shaper(reader) if shaped else None)
    reader.end()
    return seq_id, terms


def _put_shaper(writer: Writer, shaper: Shaper) -> None:
    params, bias = shaper.params, shaper.params.logit_bias or {}
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    writer.put(_SHAPE, shaper.prompt_length, params.min_tokens, *penalties, len(bias))
    for token, value in bias.items():
        writer.put(_BIAS, token, value)
    writer.ints(sorted(shaper.stop_ids))
    writer.put(_COUNT, len(shaper.bad_words))
    for word in shaper.bad_words:
        writer.ints(word)


def _take_shaper(reader: Reader) -> Shaper:
    prompt_length, min_tokens, *penalties, num_biases = reader.take(_SHAPE)
    repetition, presence, frequency = penalties
    bias: dict[int, float] = dict(reader.take(_BIAS) for _ in range(num_biases))
    params = SamplingParams(
        max_tokens=max(min_tokens, 1),
        min_tokens=min_tokens,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias or None,
    )
    stop_ids = frozenset(reader.ints())
    bad_words = tuple(tuple(reader.ints()) for _ in range(reader.count()))
    return Shaper(params, prompt_length, stop_ids=stop_ids, bad_words=bad_words)
