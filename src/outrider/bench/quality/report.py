"""A quality check's tables and findings as sections of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from outrider.bench.frame import spoken
from outrider.bench.pages import Section, number, percent
from outrider.bench.quality.measure import PLAIN, FormatRow, RuleRow

FORMATS = ("format", "perplexity", "divergence (nats)", "same first choice %", "tokens")
RULES = (
    "rule",
    "drafter",
    "promise",
    "texts as plain",
    "differing %",
    "first difference",
    "perplexity",
    "over plain",
    "accepted %",
    "tok/round",
)
_FORMAT_NOTE = (
    "Perplexity of the target on the text, each window read by itself. Divergence and first choice "
    "are against the first format, at every place of the text."
)
_RULE_NOTE = (
    "Perplexity is of what was written, under the target: lower is likelier to it, not better. "
    "Over plain: medians over texts, with 95 % bootstrap intervals. Rules that tie sampled text to "
    "the seed draw in a way of their own, and are compared with plain decoding that draws so too."
)


@dataclass(frozen=True, slots=True)
class Quality:
    """All rows of a run."""

    formats: Sequence[FormatRow]
    rules: Sequence[RuleRow]

    @property
    def holds(self) -> bool | None:
        """Whether every rule that must keep the text kept it; None where none was judged."""
        judged = [row.broken for row in self.rules if row.must_match and row.rule != PLAIN]
        return not any(judged) if judged else None


def sections(found: Quality) -> Iterator[Section]:
    if found.formats:
        rows = list(map(_format, found.formats))
        yield Section(title="Number formats", text=[_FORMAT_NOTE], header=FORMATS, rows=rows)
    if found.rules:
        rows = [_rule(row) for row in found.rules if row.reason is None]
        yield Section(title="Acceptance rules", text=[_RULE_NOTE], header=RULES, rows=rows)
    yield Section(title="What this run shows", points=findings(found))


def findings(found: Quality) -> list[str]:
    """Sentences made from the numbers and from nothing else."""
    return [*_kept(found.rules), *_lossy(found.rules), *_widest(found.formats), *_not(found.rules)]


def to_record(found: Quality) -> dict[str, object]:
    return {
        "holds": found.holds,
        "formats": [asdict(row) for row in found.formats],
        "rules": [
            {**asdict(row), "differing": row.differing, "broken": row.broken} for row in found.rules
        ],
        "findings": findings(found),
    }


def _format(row: FormatRow) -> tuple[str, ...]:
    return (
        row.form,
        number(row.perplexity, 4),
        number(row.divergence_nats, 6),
        percent(row.same_first_choice),
        str(row.num_tokens),
    )


def _rule(row: RuleRow) -> tuple[str, ...]:
    promise = "the text" if row.must_match else "the law" if row.exact else "none"
    return (
        row.rule,
        row.drafter,
        promise,
        f"{row.num_same}/{row.num_texts}",
        percent(row.differing),
        "-" if row.first_difference is None else str(row.first_difference),
        number(row.perplexity, 3),
        "-" if row.against_plain is None else spoken(row.against_plain),
        percent(row.acceptance),
        number(row.tokens_per_round, 2),
    )


def _kept(rows: Sequence[RuleRow]) -> Iterator[str]:
    judged = [row for row in rows if row.must_match and row.rule != PLAIN]
    if judged:
        same, texts = sum(row.num_same for row in judged), sum(row.num_texts for row in judged)
        names = ", ".join(row.rule for row in judged)
        yield f"Under {names}, {same} of {texts} texts are those of plain decoding."
    for row in judged:
        if row.broken:
            yield f"{row.rule} broke its promise: a text parts at {row.first_difference}."


def _lossy(rows: Sequence[RuleRow]) -> Iterator[str]:
    for row in rows:
        if not row.exact and row.reason is None:
            yield (
                f"{row.rule} is lossy: {percent(row.differing)} % of its texts differ, at "
                f"{number(row.tokens_per_round, 2)} tokens a round{_perplexing(row)}."
            )


def _perplexing(row: RuleRow) -> str:
    if row.against_plain is None:
        return ""
    return f" and {spoken(row.against_plain)} the perplexity of plain decoding's"


def _widest(rows: Sequence[FormatRow]) -> Iterator[str]:
    told = [row for row in rows if row.divergence_nats is not None]
    if told:
        worst = max(told, key=lambda row: row.divergence_nats or 0.0)
        yield (
            f"{worst.form} is the farthest from {worst.reference}: its law diverges by "
            f"{number(worst.divergence_nats, 5)} nats a token."
        )


def _not(rows: Sequence[RuleRow]) -> Iterator[str]:
    for row in rows:
        if row.reason is not None:
            yield f"{row.rule} was not measured: {row.reason}"
