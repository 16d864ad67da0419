"""Part three: write with and without speculation, compare, and look into every difference.

On kernels that are not row-invariant a verify pass of several rows can differ from passes of one
row in the last bits, and a choice between two nearly equal tokens can change. Whether it did is
measured (`look_into`); a difference that rounding cannot explain is a bug.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from outrider.api.loading import options_for
from outrider.api.tokenizer import spellings
from outrider.core.logits import LogitsProcessor
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.engine.round import LiveSequence
from outrider.engine.stages import read_pass
from outrider.kernels.reference.pointwise import argmax
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model, resolve
from outrider.plugins.proof.check import Check, Part
from outrider.verify.rules import rule_for
from outrider_lab.proof.parity import (
    BATCH,
    CellTexts,
    Ids,
    ParityCell,
    ParityTask,
    TokenDifference,
    differences,
)

# Rounding moves logits by far less than this share of their range.
MAX_ROUNDING = 1 / 64

Decide = Callable[[Tensor], int]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The context of a difference: the tokens that the target had read, the tokens that plain and
    speculative decoding then chose, and the shapes (rows, sequences) of the speculative passes."""

    context: tuple[int, ...]
    prompt_length: int
    plain: int
    speculative: int
    shapes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class NearTie:
    """A finding: `margin` is the gap of plain decoding's best logits, `error` the kernels' own."""

    near_tie: bool
    margin: float
    error: float
    reason: str

    def __str__(self) -> str:
        kind = "near-tie" if self.near_tie else "BUG"
        return f"{kind}: margin {self.margin:.2e}, logit error {self.error:.2e}; {self.reason}"


def look_into(model: CausalLM, point: Divergence, decide: Decide) -> NearTie:
    """Find out whether rounding at a near-tie, or a bug, made two texts differ. `decide` is plain
    decoding's choice from a row of logits. `model` must hold no sequences.

    The text up to the difference is fed to a fresh sequence token by token, and again several
    tokens and several sequences at a time. No draft, rule or commit of a round takes part in that,
    so the largest difference of the two last rows of logits is the kernels' own error. The
    difference is a near-tie if an error of that size can change plain decoding's choice; anything
    else is a bug, and so is an error that is too large to be rounding.
    """
    plain_V = replay(model, point, width=1, copies=1)
    best = torch.topk(plain_V, 2).values
    margin = float(best[0] - best[1])
    error = max(
        float((replay(model, point, width=width, copies=copies) - plain_V).abs().max())
        for width, copies in point.shapes
    )
    if decide(plain_V) != point.plain:
        return NearTie(False, margin, error, "plain decoding cannot be repeated")
    finite_V = plain_V[plain_V.isfinite()]
    if error > MAX_ROUNDING * float(finite_V.max() - finite_V.min()):
        return NearTie(False, margin, error, "packed passes are off by more than rounding")
    changes = any(decide(nudged_V) != point.plain for nudged_V in _nudged(plain_V, point, error))
    if changes:
        return NearTie(True, margin, error, "kernels are not row-invariant here")
    return NearTie(False, margin, error, "the kernels' error is too small to turn this choice")


def _nudged(plain_V: Tensor, point: Divergence, error: float) -> Iterator[Tensor]:
    """Yield the logits changed by errors of that size, most against the choice: the other token up
    and this one down, or all mass shifted towards lower or higher ids."""
    towards_V = torch.zeros_like(plain_V)
    towards_V[point.plain] = -error
    towards_V[point.speculative] = error
    yield plain_V + towards_V
    split = min(point.plain, point.speculative) + 1
    shift_V = torch.full_like(plain_V, -error)
    shift_V[:split] = error
    yield plain_V + shift_V
    yield plain_V - shift_V


def replay(model: CausalLM, point: Divergence, *, width: int, copies: int) -> Tensor:
    """Return logits after the context: the prompt in one pass, the rest `width` tokens a pass in
    each of `copies` sequences. The logits are those of the first, as a copy of shape V."""
    ids = range(copies)
    for seq_id in ids:
        model.state.open(seq_id, ())
    try:
        for start, end in _passes(len(point.context), point.prompt_length, width):
            last = end == len(point.context)
            tokens = point.context[start:end]
            logits_from = len(tokens) - 1 if last else len(tokens)
            rows = [StepRow.chain(seq_id, tokens, logits_from=logits_from) for seq_id in ids]
            out = model.step(rows, DraftNeeds())
            if last:
                return out.logits_MV[0].clone()
            model.state.commit({seq_id: range(len(tokens)) for seq_id in ids})
        raise AssertionError("a context has at least one token")
    finally:
        for seq_id in ids:
            model.state.close(seq_id)


def _passes(num_tokens: int, prompt_length: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of the passes; the last one is `width` tokens wide if there are so many."""
    start = min(prompt_length - 1, max(num_tokens - width, 0))
    if start:
        yield 0, start
    first = (num_tokens - start) % width
    if first:
        yield start, start + first
        start += first
    for step in count():
        begin = start + step * width
        if begin >= num_tokens:
            return
        yield begin, begin + width


# Each costs a few replays of its text; with kernels that are not row-invariant there may be many.
_MAX_LOOKED_INTO = 24
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _SeenDifference:
    """A difference, and the finding if it was looked into."""

    difference: TokenDifference
    finding: NearTie | None

    def __str__(self) -> str:
        d = self.difference
        where = f"{d.cell.name}: prompt {d.prompt + 1}, token {d.position + 1}"
        return f"{where}: {self.finding}" if self.finding else where


def parity(job: ParityTask, seconds: float = math.inf) -> Part:
    """Run part three; return two checks: of texts, and of acceptance. No run begins after so many
    `seconds` of this part."""
    deadline = perf_counter() + seconds
    yield "plain decoding, the reference"
    # Keyed by whether it is greedy: parameters may hold a mapping, so they cannot be keys.
    plain = {
        True: job.plain(job.greedy, job.subject.config.sampler),
        False: job.plain(job.seeded, job.seeded_sampler),
    }
    written: list[CellTexts] = []
    left_out: list[ParityCell] = []
    for group in job.groups():
        if perf_counter() >= deadline:
            left_out += group
            continue
        yield group[0].name
        written += job.write(group)
    found = [d for one in written for d in differences(one, plain[one.cell.params.greedy])]
    seen: list[_SeenDifference] = []
    if found:
        yield f"looking into {len(found)} differences"
        seen = list(_looked_into(job, found, plain))
    texts = _with_left_out(_texts(job, written, seen, plain), job, written, left_out)
    return texts, _acceptance(written, job.subject.drafters)


def _with_left_out(
    check: Check, job: ParityTask, written: Sequence[CellTexts], left_out: Sequence[ParityCell]
) -> Check:
    """Return the check of texts with the runs that were not made, for lack of time, or that read
    prompts again which should have been known. A drafter without any run leaves it undecided."""
    warnings = [
        f"{one.cell.name}: no prompt was known"
        for one in written
        if one.cell.known and not one.num_known
    ]
    if left_out:
        warnings.append(f"time was up before {len(left_out)} runs, from {left_out[0].name} on")
    missing = {*job.subject.drafters} - {one.cell.drafter for one in written}
    facts = {
        "runs_left_out": [cell.name for cell in left_out],
        "num_known_tokens": sum(one.num_known for one in written if one.cell.known),
    }
    return replace(
        check,
        holds=None if missing and check.holds else check.holds,
        facts={**check.facts, **facts},
        warnings=(*check.warnings, *warnings),
    )


def _texts(
    job: ParityTask,
    written: Sequence[CellTexts],
    seen: Sequence[_SeenDifference],
    plain: Mapping[bool, CellTexts],
) -> Check:
    exact_kernels = all(one.exact_kernels for one in written)
    num_tokens = sum(len(t) for one in written for t in plain[one.cell.params.greedy].texts)
    num_equal = num_tokens - sum(
        len(plain[s.difference.cell.params.greedy].texts[s.difference.prompt])
        - s.difference.position
        for s in seen
    )
    excused = [s for s in seen if s.finding and s.finding.near_tie and not exact_kernels]
    unseen = [s for s in seen if s.finding is None and not exact_kernels and excused]
    failed = [s for s in seen if s not in excused and s not in unseen]
    warnings = [f"{len(unseen)} differences were not looked into"] if unseen else []
    warnings += [str(s) for s in excused]
    summary = (
        f"{num_equal:,} of {num_tokens:,} tokens equal in {len(written)} runs, "
        f"greedy and {job.seeded_sampler} at {job.seeded.temperature:g}"
    )
    return Check(
        name="parity",
        title="same text",
        holds=not failed,
        summary=summary,
        facts={
            "num_tokens": num_tokens,
            "num_equal": num_equal,
            "num_prompts": len(job.prompts),
            "max_tokens": job.greedy.max_tokens,
            "runs": [one.cell.name for one in written],
            "exact_kernels": exact_kernels,
            "num_differences": len(seen),
            "num_near_ties": len(excused),
        },
        problems=_shown([str(s) for s in failed]),
        warnings=_shown(warnings),
    )


def _shown(notes: Sequence[str]) -> tuple[str, ...]:
    rest = len(notes) - _MAX_SHOWN
    return (*notes[:_MAX_SHOWN], *([f"and {rest} more like these"] if rest > 0 else []))


def _acceptance(written: Sequence[CellTexts], drafters: Sequence[str]) -> Check:
    """Check that cells that must draft alike did, by prompt, and each drafter drafted."""
    groups: dict[object, list[CellTexts]] = {}
    for one in written:
        groups.setdefault(one.cell.same_drafts, []).append(one)
    unlike = [
        (one, group[0])
        for group in groups.values()
        for one in group[1:]
        if one.acceptance != group[0].acceptance
    ]
    problems = [
        f"{one.cell.name}: {_rate(one)} accepted, but {_rate(first)} in {first.cell.name}"
        for one, first in unlike
    ]
    num_alike = len(groups) - len({first.cell.name for _, first in unlike})
    exact_kernels = all(one.exact_kernels for one in written)
    holds = not (problems and exact_kernels)
    summary = f"alike in {num_alike} of {len(groups)} settings, at every batch and chunk size"
    idle = [drafter for drafter in drafters if not _drafted_by(drafter, written)]
    if holds and idle:
        # Equal texts say nothing about drafts that were never made.
        holds, summary = None, f"{' and '.join(idle)} drafted nothing, so nothing was compared"
    return Check(
        name="acceptance",
        title="same acceptance",
        holds=holds,
        summary=summary,
        facts={
            "num_settings": len(groups),
            "accepted_of_drafted": {
                group[0].cell.name: [sum(a for _, a in group[0].acceptance), _drafted(group[0])]
                for group in groups.values()
            },
        },
        problems=_shown(problems) if exact_kernels else (),
        warnings=() if exact_kernels else _shown(problems),
    )


def _drafted_by(drafter: str, written: Sequence[CellTexts]) -> int:
    return sum(_drafted(one) for one in written if one.cell.drafter == drafter)


def _drafted(one: CellTexts) -> int:
    return sum(drafted for drafted, _ in one.acceptance)


def _rate(one: CellTexts) -> str:
    return f"{sum(a for _, a in one.acceptance)} of {_drafted(one)}"


def _looked_into(
    job: ParityTask, found: Sequence[TokenDifference], plain: Mapping[bool, CellTexts]
) -> Iterator[_SeenDifference]:
    """Load the target once more, alone, and replay differences; equal ones are replayed once."""
    model = load_model(resolve(job.subject.target), _options(job))
    findings: dict[object, NearTie] = {}
    for difference in found:
        greedy, turn = difference.cell.params.greedy, (difference.plain, difference.speculative)
        key = (greedy, difference.prompt, difference.position, turn)
        if key not in findings and len(findings) < _MAX_LOOKED_INTO:
            text = plain[greedy].texts[difference.prompt]
            findings[key] = _found(model, job, difference, text)
        yield _SeenDifference(difference, findings.get(key))


def _options(job: ParityTask) -> LoadOptions:
    config = job.subject.config
    longest = max(map(len, job.prompts)) + job.greedy.max_tokens
    capacity = ModelCapacity(
        num_slots=BATCH * -(-longest // config.page_size) * config.page_size,
        page_size=config.page_size,
        max_rows=BATCH * longest,
        max_logits=BATCH * (job.largest_k + 1),
    )
    return replace(options_for(config, capacity), quantise=config.quantise, rope=config.rope)


def _found(model: CausalLM, job: ParityTask, difference: TokenDifference, text: Ids) -> NearTie:
    if difference.plain is None or difference.speculative is None:
        return NearTie(False, 0.0, 0.0, "one text ended here and the other did not")
    prompt = job.prompts[difference.prompt]
    point = Divergence(
        context=(*prompt, *text[: difference.position]),
        prompt_length=len(prompt),
        plain=difference.plain,
        speculative=difference.speculative,
        shapes=tuple((width, copies) for width in (2, job.largest_k + 1) for copies in (1, BATCH)),
    )
    return look_into(model, point, _decision(job, point, difference))


def _decision(job: ParityTask, point: Divergence, difference: TokenDifference) -> Decide:
    """Return a draftless round's decision from a row of logits, with that position's keys."""
    params, rule = difference.cell.params, rule_for(difference.cell.sampler)
    shaper = LogitsProcessor(
        params,
        point.prompt_length,
        bad_words=spellings(job.subject.tokenizer(), params.bad_words),
    )

    def decide(logits_V: Tensor) -> int:
        seq = LiveSequence(
            seq_id=0,
            tokens=list(point.context),
            prompt_length=point.prompt_length,
            params=params,
            limit=params.max_tokens,
            shaper=shaper if shaper.active else None,
        )
        row = read_pass([seq], logits_V[None].clone(), argmax, exact=rule.exact)[0].row
        return rule([row])[0].next_token

    return decide
