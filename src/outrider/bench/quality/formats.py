"""What a number format changes: how well the target foretells a text, and how far its laws move.

Every window is read by two models a moment apart, the reference and one in another format, so no
more than two are in memory. Divergence is that of the format's law from the reference's,
sum p ln(p / q), in nats, as a mean over all places.

Shapes:  N = tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.bench.quality.judge import Judge, Nats, log_laws, nats_of

Window = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """One format on all windows. `divergence_nats` and `same_first_choice` (a share) are against
    `reference`; None for the reference itself."""

    form: str
    reference: str
    num_windows: int
    num_tokens: int
    perplexity: float | None
    divergence_nats: float | None = None
    same_first_choice: float | None = None


def compare_formats(
    load: Callable[[str], Judge], forms: Sequence[str], windows: Sequence[Window]
) -> Iterator[FormatRow]:
    """A row for each of `forms`, of which the first is the reference; `load` makes a model of one.
    Raises what `load` raises."""
    if not forms or not windows:
        return
    reference = load(forms[0])
    total = Nats()
    for window in windows:
        total += nats_of(log_laws(reference, window), window)
    yield _row(forms[0], forms[0], windows, total)
    for form in forms[1:]:
        yield _against(reference, load(form), form, forms[0], windows)


def _against(
    reference: Judge,
    model: Judge,
    form: str,
    name: str,
    windows: Sequence[Window],
) -> FormatRow:
    total, divergence, same, places = Nats(), 0.0, 0, 0
    for window in windows:
        wanted_NV, got_NV = log_laws(reference, window), log_laws(model, window)
        total += nats_of(got_NV, window)
        divergence += float(_divergence(wanted_NV, got_NV).sum())
        same += int((wanted_NV.argmax(-1) == got_NV.argmax(-1)).sum())
        places += len(window)
    row = _row(form, name, windows, total)
    return replace(row, divergence_nats=divergence / places, same_first_choice=same / places)


def _divergence(wanted_NV: Tensor, got_NV: Tensor) -> Tensor:
    """Of each place, of shape N; what the first law rules out counts for nothing."""
    p_NV = wanted_NV.exp()
    return torch.where(p_NV > 0, p_NV * (wanted_NV - got_NV), torch.zeros_like(p_NV)).sum(-1)


def _row(form: str, reference: str, windows: Sequence[Window], total: Nats) -> FormatRow:
    return FormatRow(
        form=form,
        reference=reference,
        num_windows=len(windows),
        num_tokens=total.num_tokens,
        perplexity=total.perplexity,
    )
