"""Statistics of a reply for people: one line after the text, and the details of `--stats`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from outrider.cli.output import say
from outrider.core.fields import size
from outrider.models.loading import ALIASES
from outrider.pairs.catalog import FIRST_MODEL

if TYPE_CHECKING:
    from outrider.api.result import GenerationResult


def headline(result: GenerationResult, *, speedup: str = "", same: str = "", more: str = "") -> str:
    """Return the line after a text. `speedup` is a measured ratio in words, "" without one; `same`
    compares the texts. `more` is a hint for raising the limit at which a reply was cut."""
    written = "1 token" if result.num_tokens == 1 else f"{result.num_tokens} tokens"
    cost = f"{written}, {result.stats.tokens_per_second:.0f} a second"
    accepted = [acceptance([result])] if result.stats.num_drafted else []
    parts = [speedup, *accepted, cost, same] if speedup else [cost, *accepted]
    if not result.exact:
        parts.append("LOSSY: the text may differ from the target's own")
    if is_cut(result) and more:
        parts.append(f"cut at {written}; {more} for more")
    return "; ".join(parts)


def is_cut(result: GenerationResult) -> bool:
    """Return whether the limit of tokens ended the text, not the model."""
    return result.finish_reason == "length"


def acceptance(results: Sequence[GenerationResult]) -> str:
    drafted = sum(result.stats.num_drafted for result in results)
    accepted = sum(result.stats.num_accepted for result in results)
    return f"{accepted} of {drafted} draft tokens accepted"


def details(result: GenerationResult) -> str:
    """Return all statistics, one line per subject."""
    return "\n".join(_details(result))


def _details(result: GenerationResult) -> Iterator[str]:
    stats = result.stats
    yield result.summary()
    times = [f"{name} {1e3 * seconds:.0f} ms" for name, seconds in stats.seconds.items()]
    yield f"time: {', '.join(times)}"
    if result.time_to_first_token is not None:
        yield (
            f"tokens: first after {1e3 * result.time_to_first_token:.0f} ms, then one each "
            f"{1e3 * result.latency_p50:.1f} ms (median; p95 {1e3 * result.latency_p95:.1f} ms)"
        )
    if stats.acceptance_histogram:
        accepted = ", ".join(map(str, range(len(stats.acceptance_histogram))))
        rounds = ", ".join(map(str, stats.acceptance_histogram))
        by = ", ".join(f"{name} {count}" for name, count in sorted(stats.rounds_by.items()))
        yield (
            f"rounds: {stats.num_rounds} with drafter {stats.drafter}{by and f' ({by})'}; with "
            f"{accepted} draft tokens accepted: {rounds}"
        )
    if result.peak_memory_bytes is not None:
        yield f"memory: {size(result.peak_memory_bytes)} at most"


def say_toy(target: str) -> None:
    """Print a note if the model is a toy."""
    note = toy_note(target)
    if note is not None:
        say(f"note: {note}")


def toy_note(target: str) -> str | None:
    """Return a note that `target` is a toy, if it is one of the models in this package."""
    if target not in ALIASES:
        return None
    return (
        f"{target} is a toy that shows speed, not sense; "
        f"`outrider pull {FIRST_MODEL}` fetches a real model"
    )
