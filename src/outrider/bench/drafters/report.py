"""A run's tables and findings as sections of a page, for terminal, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.drafters.cells import EVERYTHING, Cell
from outrider.bench.drafters.table import OFF
from outrider.bench.engines.findings import spoken
from outrider.bench.frame import MIN_PAIRS
from outrider.bench.machine import said_of
from outrider.bench.pages import Section, number, percent
from outrider.core.errors import ContractError

HEADER = (
    "domain",
    "drafter",
    "tok/s",
    "speed-up",
    "verdict",
    "tok/round",
    "accepted %",
    "by position %",
    "drafting % of time",
    "pieces",
    "status",
)
_NOTE = (
    "Medians over pieces of work, each against plain decoding of the same piece a moment before or "
    "after, with 95 % bootstrap intervals. By position: of the drafts that had an i-th token in a "
    "row, how many kept it; of a tree, its depth is taken to be K."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that tables and sentences draw on. `skipped` says why contestants did not take part;
    `agreement` counts runs with a drafter that must write what plain decoding does, and those that
    did."""

    cells: Sequence[Cell]
    skipped: Mapping[str, str]
    agreement: tuple[int, int]
    foreign_cpu_share: float | None = None


def sections(found: Evidence) -> Iterator[Section]:
    yield Section(
        title="Drafters by domain",
        text=[_NOTE],
        header=HEADER,
        rows=[_row(cell) for cell in found.cells],
    )
    yield Section(title="What this run shows", points=findings(found))
    if found.skipped:
        yield Section(
            title="Not measured",
            header=("drafter", "why"),
            rows=list(found.skipped.items()),
        )


def findings(found: Evidence) -> list[str]:
    """Sentences made from the numbers and from nothing else."""
    return [*_same(found), *_best(found.cells), *_losses(found.cells), *_caveats(found)]


def losses(cells: Sequence[Cell]) -> list[Cell]:
    """Where speculation took longer, and it was no chance."""
    return [cell for cell in cells if cell.verdict == "loss"]


def _row(cell: Cell) -> tuple[str, ...]:
    return (
        cell.domain,
        cell.contestant,
        number(cell.tokens_per_second, 1),
        "-" if cell.speedup is None else spoken(cell.speedup),
        cell.verdict,
        number(cell.tokens_per_round, 2),
        percent(cell.acceptance),
        " ".join("-" if share is None else f"{100 * share:.0f}" for share in cell.by_position),
        percent(cell.draft_share) if cell.contestant != OFF else "",
        str(cell.num_pieces),
        cell.status,
    )


def _same(found: Evidence) -> Iterator[str]:
    num_runs, num_same = found.agreement
    if num_runs:
        yield (
            f"Tokens were those of plain decoding in {num_same} of the {num_runs} runs that must "
            "write the same."
        )


def _best(cells: Sequence[Cell]) -> Iterator[str]:
    for domain in dict.fromkeys(cell.domain for cell in cells):
        own = [cell for cell in cells if cell.domain == domain and cell.speedup is not None]
        if not own:
            continue
        fastest = max(own, key=lambda cell: cell.speedup.value if cell.speedup else 0.0)
        longest = max(own, key=lambda cell: cell.tokens_per_round or 0.0)
        if fastest.speedup is None:
            raise ContractError("the cell has no speed-up")
        yield (
            f"{_where(domain)}: {fastest.contestant} is the fastest at "
            f"{spoken(fastest.speedup)} plain decoding; {longest.contestant} writes most tokens "
            f"a round, {number(longest.tokens_per_round, 2)}."
        )


def _losses(cells: Sequence[Cell]) -> Iterator[str]:
    """By domain; over all of them where no domain by itself was judged so."""
    found = losses(cells)
    somewhere = {cell.contestant for cell in found if cell.domain != EVERYTHING}
    for cell in found:
        if cell.domain == EVERYTHING and cell.contestant in somewhere:
            continue
        if cell.speedup is None:
            raise ContractError("the cell has no speed-up")
        yield (
            f"{_where(cell.domain)}: {cell.contestant} loses, at {spoken(cell.speedup)} plain "
            f"decoding: {percent(cell.acceptance)} % of its drafts are accepted and drafting takes "
            f"{percent(cell.draft_share)} % of the time."
        )
    if not found and any(cell.verdict == "gain" for cell in cells):
        yield "No drafter was found to lose time here."


def _where(domain: str) -> str:
    return "Over all domains" if domain == EVERYTHING else domain


def _caveats(found: Evidence) -> Iterator[str]:
    for cell in found.cells:
        if cell.contestant != OFF and cell.domain != EVERYTHING and not cell.num_drafted:
            yield f"{cell.domain}: {cell.contestant} drafted nothing."
    judged = [cell for cell in found.cells if cell.speedup is not None]
    if judged and all(cell.verdict == "not judged" for cell in judged):
        yield f"An interval and a verdict need {MIN_PAIRS} pieces (--prompts {MIN_PAIRS})."
    if said := said_of(found.foreign_cpu_share):
        yield said
