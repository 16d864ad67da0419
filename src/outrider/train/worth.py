"""What a finished drafter brings and costs on this machine, for the config.json of its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.files import replacing, writing
from outrider.core.params import SamplingParams
from outrider.estimate.stated import KEY, StatedWorth, fitted
from outrider.models.json_object import JsonObject
from outrider.train.recipe import DrafterRecipe, M

# Texts that are timed, and how long.
_TEXTS, _TOKENS = 4, 32
_TURNS = 3


def state_worth(
    folder: Path, target: str, recipe: DrafterRecipe[M], module: M, *, device: str = "auto"
) -> StatedWorth | None:
    """Writes it into the config.json of `folder`, which has the finished `module`. None, and
    nothing is written, where the recipe has no exam. Raises MachineError."""
    kept = recipe.exam.kept(partial(recipe.accepted, module))
    prompts = [text.ids[: text.num_prompt] for text in recipe.exam.texts]
    if not prompts:
        return None
    worth = worth_of_drafter(target, folder, EngineConfig(device=device), prompts, kept)
    path = folder / "config.json"
    values = {**JsonObject.read(path).values, KEY: worth.values()}
    with writing(folder), replacing(path, alone=True) as draft:
        draft.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return worth


def worth_of_drafter(
    target: Path | str,
    draft: Path | str | None,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    kept: Sequence[float],
) -> StatedWorth:
    """Times the engine on greedy text after `prompts`: plain, at K = 1 and at the longest K, in
    turns. `config` names the drafter; without `draft` it is within the target's files. `kept` is
    what it was measured to bring."""
    lengths = (0, 1, len(kept))
    base = replace(config, profile=True, batch_size=1, controller="fixed", watchdog="off")
    drafting: list[list[float]] = [[] for _ in lengths]
    verifying: list[list[float]] = [[] for _ in lengths]
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    for _ in range(_TURNS):
        for index, k in enumerate(lengths):
            with closing(LLM(target, draft=draft, config=replace(base, k=k))) as llm:
                for result in llm.generate(list(prompts[:_TEXTS]), params):
                    timed = [one for one in result.rounds if not one.num_prompt_tokens]
                    timed = [one for one in timed if one.num_drafted == k or not k]
                    drafting[index] += [one.draft_seconds for one in timed]
                    verifying[index] += [one.verify_seconds for one in timed]
    draft_seconds, verify_seconds = map(_medians, (drafting, verifying))
    plain, *verify = verify_seconds
    return fitted(kept, (draft_seconds[1], draft_seconds[2]), (verify[0], verify[1]), plain)


def _medians(seconds: Sequence[Sequence[float]]) -> list[float]:
    return [median(one) if one else 0.0 for one in seconds]
