"""Reasons of a plan in words: each sentence contains the numbers on which it rests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.errors import ContractError
from outrider.planner.candidates import Option, PlannedJob
from outrider.planner.overlap import BestTree


@dataclass(frozen=True, slots=True)
class Ends:
    """The smallest batch and context at which the best option, run in turns, no longer pays; None
    if it pays throughout the searched range. Passes of more than `most_rows` were not measured.
    `in_turns` is its speed-up for the requested job."""

    batch: int | None
    context: int | None
    most_batch: int
    most_context: int
    most_rows: int
    in_turns: float = 0.0


def explain(
    found: Sequence[Option],
    engines: Sequence[Option],
    ends: Ends,
    *,
    verdict: bool | str,
    job: PlannedJob,
    tree: BestTree | None,
) -> tuple[str, tuple[str, ...]]:
    """Return the verdict in words, and the reasons. `found` has measured options and `engines` the
    best of each engine, both with the best first. A `verdict` in words says why it is unknown."""
    about = [_tokens(found[0]), _time(found[0])] if found else []
    if isinstance(verdict, str):
        return f"Whether to speculate is not known: {verdict}.", tuple(about)
    if not found:
        return "Do not speculate, because no drafter is known for this target.", ()
    best = found[0]
    if not verdict:
        return f"Do not speculate, because {_why_not(best)}.", tuple(about)
    about += [*_range(ends, job, best), *_others(best, found), *_engines(engines)]
    about += [_ahead(one) for one in engines if one.engine == "ssd"]
    if tree is not None:
        about.append(_tree(tree, best))
    return f"Speculate: {best.words}, engine {best.engine}, {_gain(best)}.", tuple(about)


def doubt_of(found: Sequence[Option], sure: Sequence[Option], others: float | None) -> str | None:
    """Return why it is not known that drafting does not pay: a figure is an estimate, or others had
    the share `others` of the CPU and the gain may lie on either side of 1. None if known."""
    measured = {one.drafter for one in sure}
    estimated = [one for one in found if one.drafter not in measured]
    if estimated:
        best, names = estimated[0], list(dict.fromkeys(one.drafter for one in estimated))
        text = f"figures of {', '.join(names)} are estimates, by which {best.words} would be "
        return f"{text}{best.speed_up:.2f} times as fast ({best.low:.2f} to {best.high:.2f}, 95 %)"
    if others is None or not sure or sure[0].high <= 1:
        return None
    best = sure[0]
    return (
        f"the best, {best.words}, is expected to be {best.speed_up:.2f} times as fast "
        f"({best.low:.2f} to {best.high:.2f}, 95 %), while others used {100 * others:.0f} % of the "
        "CPU"
    )


def _gain(option: Option) -> str:
    return (
        f"{option.speed_up:.2f} times as fast as plain decoding "
        f"({option.low:.2f} to {option.high:.2f}, 95 %)"
    )


def _why_not(best: Option) -> str:
    if best.speed_up <= 1:
        return (
            f"nothing tried pays: the best, {best.words}, would be {best.speed_up:.2f} times as "
            f"fast as plain decoding ({best.low:.2f} to {best.high:.2f}, 95 %)"
        )
    return (
        f"it may cost time: the best, {best.words}, is expected to be {best.speed_up:.2f} times as "
        f"fast, but its interval reaches down to {best.low:.2f}"
    )


def _tokens(best: Option) -> str:
    own = f"{best.tokens - 1:.2f} of its draft"
    return f"A round emits {best.tokens:.2f} tokens: {own} and one of the target."


def _time(best: Option) -> str:
    plain = best.plain_seconds
    total = best.draft_seconds + best.verify_seconds + best.host_seconds
    return (
        f"It takes {total * 1e3:.3g} ms, {total / plain:.2f} plain rounds of {plain * 1e3:.3g} ms: "
        f"{best.draft_seconds / plain:.2f} for drafting, {best.verify_seconds / plain:.2f} for the "
        f"pass that verifies and {best.host_seconds / plain:.2f} for the rest."
    )


def _range(ends: Ends, job: PlannedJob, best: Option) -> list[str]:
    """Return where rounds in turns stop paying; nothing if only lanes pay."""
    lanes = best.engine in ("pdv", "ssd")
    if lanes and ends.in_turns <= 1:
        return []
    batch = (
        f"it pays at any batch up to {ends.most_batch}"
        if ends.batch is None
        else f"it stops paying at a batch of {ends.batch}"
    )
    context = (
        f"it pays with any context up to {ends.most_context} tokens"
        if ends.context is None
        else f"it stops paying at {ends.context} tokens of context"
    )
    text = f"{'In turns, with' if lanes else 'With'} {job.context} tokens of context {batch}; "
    text += f"at a batch of {job.batch} {context}."
    rows = (ends.batch or ends.most_batch) * (1 + max(best.k, best.num_nodes))
    if rows <= ends.most_rows:
        return [text]
    return [f"{text} No pass of more than {ends.most_rows} rows was measured: beyond, a line."]


def _others(best: Option, found: Sequence[Option]) -> list[str]:
    """Return the best of each other drafter."""
    seen, parts = {best.drafter}, list[str]()
    for option in found:
        if option.drafter not in seen:
            seen.add(option.drafter)
            parts.append(f"{option.words} {option.speed_up:.2f}")
    return [f"Other drafters at their best: {'; '.join(parts)}."] if parts else []


def _engines(engines: Sequence[Option]) -> list[str]:
    """Return the best of each engine."""
    if len(engines) < 2:
        return []
    parts = (f"{one.engine} {one.speed_up:.2f} ({one.words})" for one in engines)
    return [f"By engine: {'; '.join(parts)}."]


def _ahead(option: Option) -> str:
    """Return what decides whether drafting ahead pays."""
    if option.p_hit is None:
        raise ContractError("there is no p hit")
    after = "with a new draft" if option.fallback == "jit" else "without a draft"
    text = f"Drafting ahead predicts {100 * option.p_hit:.0f} % of verdicts and goes on {after}"
    text += " after the others; "
    most = 0 if option.jit_below is None else math.ceil(option.jit_below) - 1
    if most > 0:
        text += f"a new draft is better up to a batch of {most}; "
    if option.most_hidden is None:
        return f"{text}drafts of any length fit into a verification."
    if not option.most_hidden:
        return f"{text}not even a draft of one token fits into a verification."
    return f"{text}drafts of up to K = {option.most_hidden} fit into a verification."


def _tree(tree: BestTree, best: Option) -> str:
    guess = " The gain of its siblings is guessed, not counted." if tree.is_guess else ""
    return (
        f"In long texts trees of {tree.num_nodes} nodes, {tree.depth} deep, would be "
        f"{tree.speed_up:.2f} times as fast ({tree.tokens:.2f} tokens a round), {best.words} "
        f"{best.steady:.2f}: add --tree-nodes {tree.num_nodes}.{guess}"
    )
