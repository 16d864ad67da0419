"""Speed of structured output on a real model: `run.py structured [--output FILE]`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any

from common import TARGET, Report, note, real_folder, study
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.plugins.measure.turns import Neighbours, rotated
from outrider_lab.measure.frame import medians, paired_ratio

GOAL = 0.9
DRAFTERS = ("none", "ngram", "suffix")
# Long enough for a reply to be worth its time, whatever the model puts in.
_WORDS = {"type": "string", "minLength": 20, "maxLength": 60}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": _WORDS,
        "uses": {"type": "array", "items": _WORDS, "minItems": 3, "maxItems": 5},
        "found_in": {"type": "array", "items": _WORDS, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "uses", "found_in"],
    "additionalProperties": False,
}
# A mask that allows every text costs what masks cost, and changes no token.
STRUCTURES: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "any text": {"regex": r"(.|\n)*"},
    "schema": {"schema": SCHEMA},
}
THINGS = ("an apple", "a bicycle", "a library", "a hammer", "a river", "a violin", "a camera")
# Texts that end sooner tell nothing.
LEAST_TOKENS = 16


@dataclass(slots=True)
class Side:
    """A drafter and a structure: by prompt the seconds a token after the first, and its text."""

    llm: LLM
    structure: Mapping[str, Any]
    seconds: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def write(self, thing: str, params: SamplingParams) -> None:
        self.llm.forget()
        ids = self.llm.encode_chat(f"Describe {thing} as a JSON object: name, uses, found_in.")
        (result,) = self.llm.generate([ids], params, **self.structure)
        self.texts[thing] = result.token_ids
        if result.num_tokens >= LEAST_TOKENS:
            spent = result.token_seconds[-1] - result.token_seconds[0]
            self.seconds.append((thing, spent / (result.num_tokens - 1)))


@study(real="", repeats=3)
def structured(options: Options, report: Report) -> bool | None:
    """Is text under a mask written at 0.9 of the speed without one, or more?

    A real model (--real, the folder that scripts/real_model writes) replies to requests for JSON:
    free, under a mask that allows any text, and under a schema's; each without speculation and with
    two drafters, all in turns. Speeds are tokens a second after the first token, as ratios prompt
    by prompt with 95 % intervals.
    """
    place = real_folder(options.real)
    target = TARGET if options.quick else str(place)
    params = SamplingParams(max_tokens=24 if options.quick else 96, temperature=0.0)
    things = THINGS[:1] if options.quick else THINGS
    with ExitStack() as stack, Neighbours() as neighbours:
        sides = _sides(stack, target)
        for repeat in range(1 if options.quick else options.repeats):
            for number, thing in enumerate(things):
                for key in rotated(list(sides), repeat + number):
                    sides[key].write(thing, params)
    report |= {"target": place.name, "json_schema": SCHEMA, "num_prompts": len(things)}
    for (drafter, structure), side in sides.items():
        free, plain = sides[drafter, "free"], sides["none", structure]
        note(
            report,
            drafter=drafter,
            structure=structure,
            tokens_per_second=_rate(side),
            num_texts=len(side.seconds),
            over_free=_over(side, free),
            over_plain=_over(side, plain),
            # Speculation must change no token, nor must a mask that allows every text.
            same_as_plain=side.texts == plain.texts,
            same_as_free=side.texts == free.texts,
            foreign_cpu_share=neighbours.share,
        )
    masked = [cell for cell in report["cells"] if cell["structure"] != "free"]
    values = [cell["over_free"]["value"] for cell in masked if cell["over_free"]]
    report["least_over_free"] = round(min(values), 4) if values else None
    report["meets_goal"] = bool(values) and min(values) >= GOAL
    same = all(cell["same_as_plain"] for cell in report["cells"])
    return same and all(cell["same_as_free"] for cell in masked if cell["structure"] == "any text")


def _sides(stack: ExitStack, target: str) -> dict[tuple[str, str], Side]:
    found: dict[tuple[str, str], Side] = {}
    first: LLM | None = None
    for drafter in DRAFTERS:
        config = EngineConfig(drafter=drafter, context=1024, batch_size=1)
        llm = stack.enter_context(closing(LLM(target, config=config, weights_of=first)))
        first = first or llm
        for name, structure in STRUCTURES.items():
            found[drafter, name] = Side(llm, structure)
    return found


def _rate(side: Side) -> float | None:
    by_prompt = medians(side.seconds).values()
    return round(1 / statistics.fmean(by_prompt), 2) if by_prompt else None


def _over(side: Side, other: Side) -> dict[str, Any] | None:
    """The speed of `side` over that of `other`."""
    ratio = paired_ratio(medians(other.seconds), medians(side.seconds))
    return None if ratio is None else asdict(ratio)
