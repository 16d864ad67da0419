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
    that of R_i S_i. `depth` is that of the longest draft of `drafting` sequences. `gap` is what
    the host did before the next pass: text and records of what this one emitted."""

    index: int
    batch: int
    rows: int
    context: int
    reads: int
    depth: int
    drafting: int
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


def passes_of(requests: Iterable[Request]) -> list[Pass]:
    """Those of which all sequences are among `requests`, in order; the last pass is left out, since
    nobody knows what came after it."""
    parts: dict[int, list[tuple[RoundTrace, int]]] = {}
    for request in requests:
        # The last token is pending: it is not in memory yet.
        length = request.num_prompt - 1
        for trace in request.traces:
            parts.setdefault(trace.pass_index, []).append((trace, length))
            length += trace.num_emitted
    return [
        _joined(parts[index], parts[index + 1][0][0].gap_seconds)
        for index in sorted(parts)
        if index + 1 in parts and _is_whole(parts[index])
    ]


def _is_whole(parts: Sequence[tuple[RoundTrace, int]]) -> bool:
    first = parts[0][0]
    return len(parts) == first.batch_size and all(
        trace.num_emitted and not trace.num_prompt_tokens for trace, _ in parts
    )


def _joined(parts: Sequence[tuple[RoundTrace, int]], gap: float) -> Pass:
    shared = parts[0][0]
    drafted = [trace.num_drafted for trace, _ in parts]
    return Pass(
        index=shared.pass_index,
        batch=len(parts),
        rows=len(parts) + sum(drafted),
        context=sum(length for _, length in parts),
        reads=sum((1 + trace.num_drafted) * length for trace, length in parts),
        depth=max(drafted),
        drafting=sum(count > 0 for count in drafted),
        emitted=sum(trace.num_emitted for trace, _ in parts),
        draft=shared.draft_seconds,
        verify=shared.verify_seconds,
        accept=shared.accept_seconds,
        gap=gap,
    )
