"""Statistics of a reply for people: one line after the text, and the details of `--stats`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.output import check_writable, say, write_whole
from outrider.core.errors import ConfigError
from outrider.core.fields import size
from outrider.core.files import open_regular
from outrider.models.names import ALIASES
from outrider.pairs.catalog import FIRST_MODEL

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.result import GenerationResult
    from outrider.core.params import SamplingParams
    from outrider.core.settings import Resolved
    from outrider.metrics import MemberStats


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
    if len(stats.members) > 1:
        passing = stats.seconds["verify"] / max(stats.num_rounds, 1)
        gains = {name: _gained(one, passing) for name, one in stats.members.items()}
        ranked = sorted(gains, key=lambda name: -gains[name])
        yield "members, by what they gained: " + "; ".join(
            _member(name, stats.members[name], gains[name]) for name in ranked
        )
    if result.peak_memory_bytes is not None:
        yield f"memory: {size(result.peak_memory_bytes)} at most"


def _gained(one: MemberStats, passing: float) -> float:
    """Return the passes of the target, of `passing` seconds each, that a member has saved: a token
    that was accepted is worth one, and its own time counts against it."""
    return one["num_accepted"] - (one["seconds"] / passing if passing else 0.0)


def _member(name: str, one: MemberStats, gained: float) -> str:
    """Return the part of a member in words: its tokens, its time and the part of trials."""
    words = f"{name} {one['num_accepted']} of {one['num_drafted']} tokens accepted"
    if one["seconds"]:
        words += f" in {1e3 * one['seconds']:.0f} ms, {gained:+.1f} passes"
    if one["num_trials"]:
        words += f", {one['num_trials']} trials in {1e3 * one['trial_seconds']:.0f} ms"
    return words


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


TITLE = "Outrider: how this text was written"
# A page has its title within this number of bytes.
_HEAD = 4096


@dataclass(slots=True)
class RoundsPage:
    """The page. It is rewritten with each run that is added. Without a file it is off: no round
    events are requested and nothing is written."""

    llm: LLM
    resolved: Resolved
    path: Path | None = None
    _runs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def turn(self, name: str | None, *, flag: str) -> None:
        """Switch the page on, with the file `name` that `flag` gave, or off. Raises MachineError if
        the file cannot be written, ConfigError if it exists and is not such a page."""
        path = Path(name) if name else None
        if path is not None:
            check_writable(path, flag=flag)
            _check_ours(path, flag)
        self.path, self._runs = path, []

    def asking(self, params: SamplingParams) -> SamplingParams:
        """Return `params`, with round events if the page is on."""
        return params if self.path is None else replace(params, round_events=True)

    def add(
        self, prompt: str, results: Sequence[GenerationResult], *, speed_ratio: str = ""
    ) -> str:
        """Add runs and write the page; return a line about it, "" if the page is off."""
        if self.path is None:
            return ""
        from outrider.api.result import run_of, run_page

        facts = self._facts()
        for result in results:
            self._runs.append(
                run_of(
                    f"Text {len(self._runs) + 1}",
                    prompt,
                    result,
                    self.llm.tokenizer,
                    facts=facts if result.seed is None else facts | {"seed": str(result.seed)},
                    speed_ratio=speed_ratio,
                )
            )
        page = run_page(TITLE, self._runs)
        write_whole(self.path, page)
        return f"page: {self.path} ({len(page.encode()) / 1e3:.0f} kB)"

    def _facts(self) -> dict[str, str]:
        """Return facts about the texts: the model, and the settings that the user decided."""
        decided = {name: str(value) for name, value in self.resolved.decided().items()}
        first = {
            "model": self.llm.spec.name,
            "drafter": self.llm.drafter,
            "sampler": self.llm.config.sampler,
            "device": str(self.llm.device),
        }
        return first | {name: value for name, value in decided.items() if name not in first}


def _check_ours(path: Path, flag: str) -> None:
    """Check that an existing file is such a page, which is replaced. Raises ConfigError."""
    if not path.exists():
        return
    with open_regular(path) as stream:
        head = stream.read(_HEAD)
    if head and f"<title>{TITLE}</title>".encode() not in head:
        raise ConfigError(
            f"{path} exists already, and it is not a page of {flag}.", hint="name a new file"
        )
