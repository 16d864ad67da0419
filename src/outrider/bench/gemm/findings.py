"""What the numbers of a cost study say, each sentence with what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.bench.gemm.record import Cell, DraftShare, WindowRow
from outrider.bench.machine import is_busy

# By how much a smaller pass may take longer before that is worth a word.
_SCATTER = 1.05


def findings(
    shares: Sequence[DraftShare],
    windows: Sequence[WindowRow],
    cells: Sequence[Cell],
) -> list[str]:
    return [*_of_shares(shares), *_of_windows(windows), *_of_engines(cells)]


def warnings(*, quick: bool, num_failures: int, foreign_cpu_share: float | None) -> list[str]:
    """Why figures should be read with care, or not at all."""
    found: list[str] = []
    if quick:
        found.append("This is a taste: small models, few repeats. Its figures mean nothing.")
    if foreign_cpu_share is not None and is_busy(foreign_cpu_share):
        found.append(
            f"Others used {100 * foreign_cpu_share:.0f} % of the CPUs meanwhile: measure again on "
            "a quiet machine."
        )
    if num_failures:
        found.append(f"{num_failures} samples failed; they are in no number.")
    return found


def scatter_of(windows: Sequence[WindowRow]) -> list[str]:
    """A sentence for each pair of which a pass over fewer branches took longer than one over more.
    It reads the same weights and computes less, so that is how much times scatter."""
    found: list[str] = []
    for pair in _pairs(windows):
        times = {row.branches: row.pass_seconds for row in windows if row.pair == pair}
        worst = max(
            ((few, many) for few in times for many in times if few < many),
            key=lambda two: times[two[0]] / times[two[1]],
            default=None,
        )
        if worst is None or (ratio := times[worst[0]] / times[worst[1]]) <= _SCATTER:
            continue
        found.append(
            f"{pair}: a draft pass over {worst[0]} of the branches was timed {ratio:.2f} times as "
            f"long as one over {worst[1]}, which computes more from the same weights: smaller "
            "differences in the verification window are noise."
        )
    return found


def _of_shares(shares: Sequence[DraftShare]) -> Iterator[str]:
    for pair in _pairs(shares):
        own = [one for one in shares if one.pair == pair]
        last = own[-1]
        growth = last.verify_seconds / last.plain_seconds
        yield (
            f"{pair}: a draft pass takes {last.over_plain / last.k:.3f} of a plain pass of the "
            f"target, and verifying {last.k + 1} rows takes {growth:.2f} plain passes."
        )


def _of_windows(windows: Sequence[WindowRow]) -> Iterator[str]:
    for pair in _pairs(windows):
        own = [one for one in windows if one.pair == pair]
        passes = next((one.num_passes for one in own if one.branches == 1), None)
        hidden = [one.k for one in own if one.largest_fan_out]
        if passes is None:
            continue
        fits = f"up to K = {max(hidden)}" if hidden else "for no K"
        yield (
            f"{pair}: {passes:.1f} draft passes fit beside a verification; drafting ahead is "
            f"hidden {fits}, if neither slows the other down."
        )


def _of_engines(cells: Sequence[Cell]) -> Iterator[str]:
    for pair in _pairs(cells):
        own = [one for one in cells if one.pair == pair and one.batch == 1 and one.k]
        for method in ("sd", "ssd"):
            some = [one for one in own if one.method == method]
            if some:
                best = max(some, key=lambda one: one.speed_up)
                yield (
                    f"{pair}: {method.upper()} is {best.speed_up:.2f} times as fast as plain "
                    f"decoding at best{_interval(best)}, at K = {best.k}, alpha {best.alpha:g}"
                    f"{_hits(best)}{_theory(best)}."
                )
        yield from _of_hits(pair, own)


def _of_hits(pair: str, cells: Sequence[Cell]) -> Iterator[str]:
    """What drafting ahead gains over drafting in turns if every verdict is foreseen."""
    ahead = next((one for one in cells if one.study == "hits" and one.p_hit == 1), None)
    turns = next((one for one in cells if one.study == "hits" and one.method == "sd"), None)
    if ahead is None or turns is None:
        return
    ratio = ahead.speed_up / turns.speed_up
    verdict = "gains" if ratio > 1 else "loses"
    yield (
        f"{pair}: with every verdict foreseen, drafting ahead {verdict}: {ratio:.2f} times the "
        f"speed of drafting in turns. Two lanes on one memory share its bandwidth."
    )


def _interval(cell: Cell) -> str:
    return "" if cell.low is None else f" ({cell.low:.2f} to {cell.high:.2f})"


def _theory(cell: Cell) -> str:
    if cell.theory is None:
        return ""
    return f"; theory from this run's times says {cell.theory.over_verify:.2f}"


def _hits(cell: Cell) -> str:
    return "" if cell.p_hit is None else f", p_hit {cell.p_hit:g}"


def _pairs(rows: Sequence[DraftShare] | Sequence[WindowRow] | Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(row.pair for row in rows))
