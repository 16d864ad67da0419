"""What rounds took, with what it depends on: rows, contexts, depth and number of sequences.

Records of rounds say what every sequence did in a pass; here they are put together by pass again.
Passes that read some of a prompt are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.budget import RoundTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """`rows` is the sum of R_i, `context` that of S_i, the tokens in memory before, and `reads`
    that of R_i S_i. `depth` is that of the longest draft of `drafting` sequences, and `before` how
    many tokens these have got since their last draft. `gap` is what the host did before the next
    pass: text and records of what this one emitted."""

    index: int
    batch: int
    rows: int
    context: int
    reads: int
    depth: int
    drafting: int
    before: int
    emitted: int
    draft: float
    verify: float
    accept: float
    gap: float

    @property
    def host(self) -> float:
        """Seconds beside drafting and the target's pass."""
        return self.accept + self.gap

    @property
    def seconds(self) -> float:
        """From its beginning to that of the next one."""
        return self.draft + self.verify + self.accept + self.gap


@dataclass(frozen=True, slots=True)
class Request:
    """The records of one request, in order, and how long its prompt was."""

    num_prompt: int
    traces: Sequence[RoundTrace]


@dataclass(frozen=True, slots=True)
class _Part:
    """What a pass was for a sequence of `length` tokens, `before` of them since its last draft."""

    trace: RoundTrace
    length: int
    before: int


def passes_of(requests: Iterable[Request]) -> list[Pass]:
    """Those of which all sequences are among `requests`, in order; the last pass is left out, since
    nobody knows what came after it."""
    parts: dict[int, list[_Part]] = {}
    for request in requests:
        # The last token is pending: it is not in memory yet.
        length, before = request.num_prompt - 1, 0
        for trace in request.traces:
            parts.setdefault(trace.pass_index, []).append(_Part(trace, length, before))
            length += trace.num_emitted
            before = trace.num_emitted + (0 if trace.num_drafted else before)
    return [
        _joined(parts[index], parts[index + 1][0].trace.gap_seconds)
        for index in sorted(parts)
        if index + 1 in parts and _is_whole(parts[index])
    ]


def _is_whole(parts: Sequence[_Part]) -> bool:
    first = parts[0].trace
    return len(parts) == first.batch_size and all(
        one.trace.num_emitted and not one.trace.num_prompt_tokens for one in parts
    )


def _joined(parts: Sequence[_Part], gap: float) -> Pass:
    shared = parts[0].trace
    drafted = [one.trace.num_drafted for one in parts]
    return Pass(
        index=shared.pass_index,
        batch=len(parts),
        rows=len(parts) + sum(drafted),
        context=sum(one.length for one in parts),
        reads=sum((1 + one.trace.num_drafted) * one.length for one in parts),
        depth=max(drafted),
        drafting=sum(count > 0 for count in drafted),
        before=sum(one.before for one in parts if one.trace.num_drafted),
        emitted=sum(one.trace.num_emitted for one in parts),
        draft=shared.draft_seconds,
        verify=shared.verify_seconds,
        accept=shared.accept_seconds,
        gap=gap,
    )
