"""`outrider draft`: what can draft for a target, and whether a certain draft fits it.

What can draft is found first: what was trained for this target, draft models that share its
vocabulary, the target itself in fewer bits, its text; what is not here yet says how to get it. The
planner then ranks all of them by costs and acceptance that are measured within some seconds, or
estimated, and says which. What each gains in fact is measured by `outrider bench drafters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from shlex import quote
from typing import Any

from outrider.api.found import num_weight_bytes
from outrider.cli.call import Call, needed
from outrider.cli.models import read_spec, small_files
from outrider.cli.output import answer as answer_with
from outrider.cli.output import prose, screen_table, table
from outrider.core.config import EngineConfig
from outrider.core.env import cache_folder
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.params import SamplingParams
from outrider.core.plugins import drafter_named
from outrider.kernels.operators import pick_device
from outrider_lab.bench.calibrate.answer import COUNTED_TOKENS, answer
from outrider_lab.bench.calibrate.found import Answer, Found
from outrider_lab.bench.studies.drafters_lineup import PLAIN, Drafts, available, contestants_named
from outrider_lab.cli.advice import (
    ProgressMeter,
    Wish,
    bounds_sentence,
    disturbed_sentences,
    message_texts,
    prompt_texts,
    with_trees,
)
from outrider_lab.cli.draft_fit import Fit, Measured, compare, measure
from outrider_lab.cli.plan_page import bounds_record
from outrider_lab.cli.suggestions import Suggestion, suggestions
from outrider_lab.cli.verb_options import DraftCheckOptions, DraftSuggestOptions
from outrider_lab.planner.advise import Question, advise
from outrider_lab.planner.candidates import Option, PlannedJob
from outrider_lab.planner.suppose import ESTIMATED
from outrider_lab.planner.suppose import Origin as OriginOfFigure

# A text that is planned for where no prompt was read.
_CONTEXT, _NEW_TOKENS = 128, 128
# Sources of drafts by what it takes to load them.
_LOADED_LATE = ("text", "draft", "heads", "model", "copy")
# Seconds for which rounds of a drafter are timed at most.
_TIMING_SECONDS = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A suggestion with what the planner expects of it at its best K, `low` to `high` in 95 % of
    cases, and where the two figures that it rests on come from; None where nothing is known."""

    suggestion: Suggestion
    option: Option | None
    draft_seconds: OriginOfFigure = ESTIMATED
    acceptance: OriginOfFigure = ESTIMATED

    @property
    def order(self) -> tuple[bool, float]:
        """The fastest first; what is not here yet comes last."""
        gain = 0.0 if self.option is None else self.option.speed_up
        return not self.suggestion.ready, -gain

    @property
    def may_pay(self) -> bool:
        """Whether it is worth a try: not where even the best that is likely is slower."""
        return self.option is None or self.option.high > 1

    @property
    def row(self) -> tuple[str, ...]:
        one, option = self.suggestion, self.option
        found = ("", "", "") if option is None else _figures(option)
        known = f"{self.draft_seconds}, {self.acceptance}" if option is not None else ""
        return (one.drafter, one.draft or "", *found, known, "" if one.ready else "not here")

    def as_record(self) -> dict[str, Any]:
        option = self.option
        keys = ("k", "speed_up", "low", "high", "tokens", "draft_seconds", "verify_seconds")
        expected = None if option is None else {key: getattr(option, key) for key in keys}
        origins = {"draft_seconds": self.draft_seconds, "acceptance": self.acceptance}
        return asdict(self.suggestion) | {"expected": expected, "figures": origins}


def _figures(option: Option) -> tuple[str, str, str]:
    return str(option.k), f"{option.speed_up:.2f}", f"{option.low:.2f} to {option.high:.2f}"


def ranked(found: Sequence[Suggestion], known: Found | None) -> list[Ranked]:
    """By the planner's figures for one text, the fastest first, whether they were measured or
    estimated; as they were suggested, which is by how much they usually bring, where there are
    none."""
    if known is None:
        return [Ranked(suggestion=one, option=None) for one in found]
    job = PlannedJob(batch=1, context=known.context or _CONTEXT, new_tokens=_NEW_TOKENS)
    question = Question(job=job, trees=with_trees(known.calibration))
    best: dict[str, Option] = {}
    for option in advise(known.calibration, question).options:
        best.setdefault(option.drafter, option)
    every = [
        Ranked(
            suggestion=one,
            option=best.get(one.contestant),
            draft_seconds=known.origins.of(one.contestant)[0],
            acceptance=known.origins.of(one.contestant)[1],
        )
        for one in found
    ]
    return sorted(every, key=lambda one: one.order)


def known_of(
    call: Call[DraftSuggestOptions], target: str, found: Sequence[Suggestion]
) -> Found | None:
    """The figures of those of `found` that are here, measured within the seconds and memory; None
    of a target whose sizes cannot be read."""
    options, notes = call.options, list[str]()
    here = [one for one in found if one.ready and one.drafter in available()]
    # What takes no time to load comes first, a copy of the target last.
    here.sort(key=lambda one: _LOADED_LATE.index(drafter_named(one.drafter).source))
    ready = [one.contestant for one in here]
    contestants = contestants_named(",".join(ready)) if ready else [PLAIN]
    drafts = None
    try:
        spec = read_spec(target, on_cpu=pick_device("auto").type == "cpu")
    except CheckpointError:
        return None
    try:
        drafts = Drafts.of(target, None) if num_weight_bytes(small_files(target)) else None
    except CheckpointError as error:
        notes.append(f"nothing was measured: {error}")
    wish = Wish(
        target=target,
        spec=spec,
        engine=EngineConfig(),
        contestants=contestants,
        drafts=drafts,
        batch=1,
        texts=prompt_texts(options.prompts, options.domains),
        messages=message_texts(options),
        params=SamplingParams(max_tokens=COUNTED_TOKENS, temperature=options.temperature, seed=0),
        timing=_TIMING_SECONDS * len(contestants),
        compares=False,
        alone=True,
    )
    asked = wish.asked(options.seconds, call.began)
    if drafts is None:
        return replace(Answer(asked).found(), notes=(*notes, f"{target} is not here as a whole"))
    with ProgressMeter() as meter:
        watch = meter.watch(lambda known: _so_far(ranked(found, known)))
        try:
            known = answer(asked, cache=cache_folder(), fresh=options.fresh, watch=watch)
            return replace(known, notes=(*wish.notes, *known.notes))
        except (CheckpointError, ConfigError) as error:
            # What cannot be loaded here may still be suggested.
            return replace(Answer(asked).found(), notes=(f"nothing was measured: {error}",))


def _first(known: Found) -> str:
    """Of the page: where its figures come from."""
    origins = [] if known.origins.is_whole else [known.origins.sentence]
    return prose(" ".join([f"{known.origins.basis.capitalize()}, the fastest first.", *origins]))


def _told(known: Found) -> list[str]:
    """What the figures took, and what was in their way."""
    disturbed = disturbed_sentences(known)
    return [
        bounds_sentence(known),
        *map(prose, disturbed),
        *(prose(f"note: {one}") for one in known.notes),
    ]


def _so_far(found: Sequence[Ranked]) -> str:
    names = [one.suggestion.contestant for one in found if one.option is not None]
    return f"the best two would be {' and '.join(names[:2])}."


def suggest(call: Call[DraftSuggestOptions]) -> int:
    """What fits TARGET, the fastest first, each with its figures, its reason and its command."""
    target = needed(call, "TARGET")
    found = suggestions(target)
    known = known_of(call, target, found)
    every = ranked(found, known)
    names = [one.suggestion.contestant for one in every if one.suggestion.ready]
    names = [name for name in names if name.partition("=")[0] in available()]
    command = (
        f"outrider bench drafters --target {quote(target)} --drafters {quote(','.join(names))}"
    )
    header = ("drafter", "draft", "K", "times as fast", "95 %", "times, acceptance", "")
    lines = [
        *([] if known is None else [_first(known), ""]),
        screen_table([one.row for one in every], header=header),
        "",
        *(prose(f"{one.suggestion.contestant}: {one.suggestion.reason}") for one in every),
        "",
        *([] if known is None else _told(known)),
        "\nTry them:",
        *(f"  {one.suggestion.command}" for one in every if one.may_pay),
        f"\nMeasure those that are here:\n  {command}",
    ]
    record = {
        "suggestions": [one.as_record() for one in every],
        "measure": command,
        **({} if known is None else {"notes": list(known.notes), **bounds_record(known)}),
    }
    answer_with(call.options, record, "\n".join(lines))
    return 0


def check(call: Call[DraftCheckOptions]) -> int:
    """Compare TARGET and DRAFT. Exit code 1 if they do not fit, or if nothing is accepted."""
    target, draft = needed(call, "TARGET"), needed(call, "DRAFT", position=1)
    fit = compare(target, draft)
    measured = _measured(call.options, fit) if call.options.measure and not fit.wrong else None
    dead = measured is not None and measured.dead
    record = asdict(fit) | {"fits": fit.fits, "advice": fit.advice}
    lines = [*_shown_fit(fit)]
    if measured is not None:
        derived = ("tokens_per_round", "first_high", "dead", "text")
        record["measured"] = asdict(measured) | {n: getattr(measured, n) for n in derived}
        lines += [measured.text, *(f"note: {note}" for note in measured.notes)]
    if dead:
        lines.append(
            "dead acceptance: next to nothing that this draft proposes is kept, although ids and "
            "sizes agree. Was it trained for this target?"
        )
    answer_with(call.options, record, "\n".join(lines))
    return 0 if fit.fits and not dead else 1


def _measured(options: DraftCheckOptions, fit: Fit) -> Measured:
    drafter = fit.kind if fit.same_ids else "bridge"
    config = EngineConfig(drafter=drafter, k=options.k, profile=True)
    return measure(
        fit.target.name,
        fit.draft.name,
        config,
        num_prompts=options.prompts,
        max_tokens=options.max_tokens,
    )


def _shown_fit(fit: Fit) -> Iterator[str]:
    sides = [("target", fit.target), ("draft" if fit.kind == "model" else fit.kind, fit.draft)]
    rows = [(role, side.name, side.num_tokens, side.num_ids) for role, side in sides]
    yield table(rows, header=("", "model", "tokens", "ids in its output"))
    if fit.differences:
        yield f"\n{100 * fit.shared:.0f} % of the draft's tokens are tokens of the target."
        yield "The first ids that differ:"
        differing = [(d.token_id, _shown(d.first), _shown(d.second)) for d in fit.differences]
        yield table(differing, header=("id", "target", "draft"))
    for remark in fit.remarks:
        yield f"{'wrong' if remark.wrong else 'caution'}: {remark.text}"
    yield f"\n{fit.advice}"


def _shown(token: str | None) -> str:
    return "(none)" if token is None else repr(token)
