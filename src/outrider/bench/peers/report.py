"""A comparison's tables and findings as sections of a page, for terminal, Markdown and HTML alike.

`record` is what `results.json` has: everything said here stands in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.bench.frame import MIN_PAIRS
from outrider.bench.machine import is_busy
from outrider.bench.pages import Section, number, percent
from outrider.bench.peers.contestants import OURS

RATES = (
    "contestant",
    "T",
    "tok/s",
    "first token ms",
    "later tokens ms (p95)",
    "accepted %",
    "prompts",
    "texts as ours",
    "tokens as ours",
    "first difference",
)
RATIOS = ("format", "T", "what", "faster", "ours", "theirs", "prompts")
_NOTE = (
    "Tokens over seconds, each engine's own clock around the call that writes: reading the prompt "
    "is in it, loading is not. Times to tokens are of engines that tell when a token came. Texts "
    "are compared greedily, with ours in plain decoding and the same number format."
)
_RATIO_NOTE = (
    "Their median seconds a token over ours, on the same prompts: above 1 ours is faster. In "
    "brackets 95 % bootstrap intervals."
)

Row = Mapping[str, Any]


def sections(record: Mapping[str, Any]) -> Iterator[Section]:
    rates, ratios = list(map(_rate, record["scores"])), list(map(_ratio, record["ratios"]))
    yield Section(title="Rates", text=[_NOTE], header=RATES, rows=rates)
    yield Section(title="Ratios", text=[_RATIO_NOTE], header=RATIOS, rows=ratios)
    yield Section(title="What this run shows", points=findings(record))
    absent = [*_missing(record), *((name, why[:200]) for name, why in record["refused"].items())]
    if absent:
        yield Section(title="Not measured", header=("who", "why"), rows=absent)


def findings(record: Mapping[str, Any]) -> list[str]:
    """Sentences made from the numbers and from nothing else."""
    return [*_against(record), *_same(record), *_caveats(record)]


def _rate(score: Row) -> tuple[str, ...]:
    same: Row | None = score["same_text"]
    later, slow = score["later_token_ms"], score["later_token_p95_ms"]
    return (
        score["contestant"],
        f"{score['temperature']:g}",
        number(score["tokens_per_second"], 1),
        number(score["first_token_ms"], 1),
        "-" if later is None else f"{later:.2f} ({slow:.2f})",
        percent(score["acceptance_rate"]),
        str(score["prompts"]),
        "-" if same is None else f"{same['equal']}/{same['of']}",
        "-" if same is None else f"{same['equal_tokens']}/{same['of_tokens']}",
        "-" if same is None or same["first_difference"] is None else str(same["first_difference"]),
    )


def _ratio(ratio: Row) -> tuple[str, ...]:
    return (
        ratio["format"],
        f"{ratio['temperature']:g}",
        ratio["what"],
        _spoken(ratio),
        ratio["ours"],
        ratio["theirs"],
        str(ratio["pairs"]),
    )


def _spoken(ratio: Row) -> str:
    low, high = ratio["low"], ratio["high"]
    return f"{ratio['faster']:.2f}×" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _against(record: Mapping[str, Any]) -> Iterator[str]:
    """Each one's best with ours, in words; a loss is said as plainly as a gain."""
    owners = {score["contestant"]: score["peer"] for score in record["scores"]}
    for ratio in record["ratios"]:
        if ratio["what"] != "best":
            continue
        low, high = ratio["low"], ratio["high"]
        if low is None:
            judged = f"not judged below {MIN_PAIRS} prompts"
        elif low > 1:
            judged = "ours is faster"
        else:
            judged = "ours is slower" if high < 1 else "no measurable difference"
        yield (
            f"{ratio['format']} at temperature {ratio['temperature']:g}, best against best: "
            f"{_spoken(ratio)} {owners[ratio['theirs']]}, {judged}."
        )


def _same(record: Mapping[str, Any]) -> Iterator[str]:
    """Whether our own speculation wrote what our plain decoding does."""
    own = [s for s in record["scores"] if s["peer"] == OURS and s["drafter"] != "none"]
    found = [score["same_text"] for score in own if score["same_text"]]
    if found:
        equal, of = sum(s["equal"] for s in found), sum(s["of"] for s in found)
        yield f"Our own speculation wrote the text of plain decoding in {equal} of {of} runs."


def _caveats(record: Mapping[str, Any]) -> Iterator[str]:
    shares: Row | None = record["cpu_share"]
    if shares is not None:
        strange = shares["strangers"]
        warning = ": do not rely on these times" if is_busy(strange) else ""
        yield (
            f"While one was timed, the others used {100 * shares['waiting']:.1f} % of the CPUs and "
            f"other programs {100 * strange:.1f} %{warning}."
        )
    if len(record["sessions"]) > 1:
        yield (
            f"Measured in {len(record['sessions'])} sessions: ratios pair runs of one session, "
            "rates are over all of them."
        )
    if any(score["usage_tokens"] is not None for score in record["scores"]):
        yield (
            "Servers are timed from here, the way over HTTP included; their tokens are those that "
            "our tokenizer finds in the text. One that remembers prompts may have read some before."
        )


def _missing(record: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return [(name, f"missing; get it with: {how}") for name, how in record["missing"].items()]
