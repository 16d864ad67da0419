"""Drafter auto against plain decoding and against the best fixed drafter: `run.py auto`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from time import perf_counter
from typing import Any

from common import Report, note, real_folder, study
from options import Flag, Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestHandle
from outrider.api.result import GenerationResult
from outrider.core.errors import ConfigError, did_you_mean
from outrider.metrics import members_together
from outrider_lab.bench.workload import ADVERSARIAL, builtin_texts

# What a server is asked in each cell, and the shipped texts that it is made of.
CHATS: dict[str, tuple[str, str]] = {
    "chat": ("conversation", "{}"),
    "summary": ("summarization", "{}"),
    "translation": ("translation", "{}"),
    "code": ("code", "Complete this Python function and show all of it.\n```python\n{}\n```"),
    "math": ("maths", "{} Think step by step."),
}
# Texts whose words come once, which no drafter foresees.
HARD = {ADVERSARIAL: (ADVERSARIAL, "{}")}
# Domains of batches: those of which there are enough texts.
BATCHED = ("chat", "code")
NUM_TOKENS = 128
# Greedy texts of any prompt come to repeat themselves. At this temperature hard ones hardly do, and
# no more than this share of their pairs of tokens came before.
HARD_TEMPERATURE, MOST_REPEATED = 1.5, 0.05
TEMPERATURE = Flag(
    kind=float | None,
    default=None,
    text=f"of all domains; by default {HARD_TEMPERATURE} for {ADVERSARIAL}, else 0, greedy",
)
# Drafters that a user could name instead; `k` is theirs, and controllers are fixed.
FIXED: Mapping[str, EngineConfig] = {
    "ngram:4": EngineConfig(drafter="ngram"),
    "suffix:4": EngineConfig(drafter="suffix"),
    "suffix:8": EngineConfig(drafter="suffix", k=8),
    "lookup:16": EngineConfig(drafter="lookup", k=16),
}
COPIES: Mapping[str, EngineConfig] = {"quantised-self:4": EngineConfig(drafter="quantised-self")}
PLAIN, AUTO = "plain", "auto"
# The first pieces of a process: auto has measured nothing yet. They are reported apart.
NUM_FIRST = 2
NUM_RESAMPLES = 2000
# Seconds for which a contestant writes before the next one does. A machine's speed drifts within a
# second, so whole texts in turns would compare different machines.
TURN = 0.05


@dataclass(slots=True)
class Times:
    """Seconds a token of each piece of work, by contestant; pieces are in the order of the run.
    `repeated` is the share of pairs of tokens that came before in their text, and `trials` has what
    each contestant's members drafted to learn: tokens and seconds."""

    by_name: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    repeated: float = 0.0
    trials: dict[str, dict[str, list[float]]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )

    def ratios(self, name: str, base: str, pieces: slice) -> list[float]:
        """How many times as fast as `base` each piece was."""
        pairs = zip(self.by_name[base][pieces], self.by_name[name][pieces], strict=True)
        return [theirs / own for theirs, own in pairs]

    def after(self, num_first: int) -> Times:
        """Times without those of the first pieces."""
        times = {name: found[num_first:] for name, found in self.by_name.items()}
        return replace(self, by_name=times)

    def of_text(self) -> dict[str, object]:
        """What a cell says of its texts and trials."""
        return {"repeated": round(self.repeated, 4), "trials": self.trials}


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """The geometric mean, and its 95 % bootstrap interval over pieces."""
    logs, dice = [math.log(ratio) for ratio in ratios], Random(0)
    means = sorted(statistics.fmean(dice.choices(logs, k=len(logs))) for _ in range(NUM_RESAMPLES))
    low, high = means[NUM_RESAMPLES // 40], means[-(NUM_RESAMPLES // 40) - 1]
    mean = statistics.fmean(logs)
    return {
        name: round(math.exp(value), 3)
        for name, value in (("mean", mean), ("low", low), ("high", high))
    }


@study(
    target="",
    draft_copies=False,
    batch=1,
    pieces=16,
    domains=list(CHATS),
    threads=0,
    temperature=TEMPERATURE,
)
def auto(options: Options, report: Report) -> bool | None:
    """Is drafter auto ever slower than plain decoding, or than the best drafter that one can name?

    Every contestant has an engine of its own in one process. They write the same pieces of work in
    turns of a twentieth of a second, in an order that is drawn; a piece is one chat, or --batch of
    them at once. Tokens of all contestants must be equal: greedy ones, and with a --temperature
    those of equal seeds under rule match. What drafters remember is forgotten after each piece,
    since prompts of different users have little in common. The best fixed drafter of a cell is the
    one that was fastest over every other piece, and auto is compared with it over the rest. The
    first two pieces of a process, in which auto measures, are reported apart.
    """
    target = str(real_folder(options.target))
    size, batch = (2, 2) if options.quick else (options.pieces, options.batch)
    fixed = FIXED | (COPIES if options.draft_copies else {})
    left_out = (CHATS | HARD).keys() - BATCHED if batch > 1 else set[str]()
    works = works_of([one for one in options.domains if one not in left_out], batch, size)
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        found = {PLAIN: EngineConfig(drafter="none"), AUTO: EngineConfig()} | fixed
        for name, config in found.items():
            engines[name] = stack.enter_context(closing(_loaded(target, config, options, engines)))
        report["auto"] = {"drafter": engines[AUTO].drafter, "notes": list(engines[AUTO].notes)}
        report |= {"batch": batch, "tokens": NUM_TOKENS}
        for turn, (domain, work) in enumerate(works):
            times = compared(engines, work, temperature(options, domain))
            if turn == 0:
                ratios = times.ratios(AUTO, PLAIN, slice(NUM_FIRST))
                report["first_pieces_over_plain"] = [round(ratio, 3) for ratio in ratios]
                times = times.after(NUM_FIRST)
            note(report, **_cell(domain, times, list(fixed)))
    over = [cell["over_best"]["mean"] for cell in report["cells"]]
    report["over_best_geometric_mean"] = round(statistics.geometric_mean(over), 3)
    print("over the best fixed drafter, geometric mean", report["over_best_geometric_mean"])
    return all(
        cell["over_plain"]["high"] >= 0.98
        and cell["over_best"]["high"] >= 0.95
        and text_is_hard(cell)
        for cell in report["cells"]
    )


def _loaded(target: str, config: EngineConfig, options: Options, others: Mapping[str, LLM]) -> LLM:
    """An engine with the weights of the first one."""
    first, size = others.get(PLAIN), options.batch
    return LLM(target, config=config, weights_of=first, batch_size=size, threads=options.threads)


def works_of(domains: Sequence[str], batch: int, size: int) -> list[tuple[str, list[list[str]]]]:
    """The pieces of each domain, NUM_FIRST more of the first. Raises ConfigError for an unknown
    domain, so it is called before engines are loaded."""
    return [
        (domain, pieces(domain, batch, size + NUM_FIRST * (turn == 0)))
        for turn, domain in enumerate(domains)
    ]


def pieces(domain: str, batch: int, count: int) -> list[list[str]]:
    """So many pieces of `batch` chats. Texts come again in other pieces where there are too few,
    never in the same. Raises ConfigError for an unknown domain."""
    known = CHATS | HARD
    if domain not in known:
        raise ConfigError(f"unknown domain {domain!r}.", hint=did_you_mean(domain, known))
    name, form = known[domain]
    texts = [form.format(text) for text in builtin_texts(name)]
    if domain in HARD:
        # Their words in another order are as hard to foresee, and a large batch needs more texts.
        texts += [" ".join(reversed(text.split())) for text in texts]
    dice = Random(domain)
    return [dice.sample(texts, batch) for _ in range(count)]


def temperature(options: Options, domain: str) -> float:
    """The temperature of a domain's texts."""
    if options.temperature is not None:
        return options.temperature
    return HARD_TEMPERATURE if domain in HARD else 0.0


def text_is_hard(cell: Mapping[str, Any]) -> bool:
    """Whether a cell's texts repeat as little as those of its domain should."""
    return cell["domain"] not in HARD or cell["repeated"] <= MOST_REPEATED


def repeated(prompt: Sequence[int], text: Sequence[int]) -> float:
    """The share of a text's tokens that end a pair of tokens which came before."""
    tokens, known, count = [*prompt, *text], set[tuple[int, int]](), 0
    for index, pair in enumerate(pairwise(tokens), start=1):
        count += index >= len(prompt) and pair in known
        known.add(pair)
    return count / max(len(text), 1)


@dataclass(frozen=True, slots=True)
class Told:
    """Called before the turns with the texts by their prompts, and the seconds of a plain pass. An
    engine of its own writes them: a contestant would know their prompts."""

    llm: LLM
    call: Callable[[Mapping[tuple[int, ...], Sequence[int]], float], None]


def compared(
    engines: Mapping[str, LLM],
    pieces: Sequence[Sequence[str]],
    temperature: float = 0.0,
    *,
    tell: Told | None = None,
) -> Times:
    """The times of all `engines` over the same pieces, in turns of `TURN` seconds. Sampled texts
    have a seed and rule match, and go on to their full length. The order is drawn for each piece,
    so that none always follows the same other one, which leaves it its caches and clock. If texts
    are to `tell`, each piece is written once more, before the others. Raises AssertionError where
    tokens differ."""
    times, names = Times({name: [] for name in engines}), list(engines)
    shares = list[float]()
    members: dict[str, list[Mapping[str, Any]]] = {name: [] for name in engines}

    for turn, chats in enumerate(pieces):
        params = SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=temperature,
            seed=turn if temperature else None,
            sampler="match" if temperature else None,
            ignore_eos=temperature > 0,
        )
        prompts = {name: [_ids(llm, chat) for chat in chats] for name, llm in engines.items()}
        if tell is not None:
            first = _Writing(tell.llm, prompts[PLAIN], params)
            while first.goes_on():
                pass
            tell.call(first.by_prompt(), first.seconds_a_token * len(chats))
        order = Random(turn).sample(names, len(names))
        every = {name: _Writing(engines[name], prompts[name], params) for name in order}
        writing = list(every.values())
        while writing:
            writing = [one for one in writing if one.goes_on()]
        for name, one in every.items():
            times.by_name[name].append(one.seconds_a_token)
            members[name] += [result.stats.members for result in one.results]
        texts = {name: one.texts for name, one in every.items()}
        assert len({str(found) for found in texts.values()}) == 1, f"texts of piece {turn} differ"
        shares += map(repeated, prompts[names[0]], texts[names[0]])
    times.repeated = statistics.fmean(shares)
    times.trials = {name: _trials(found) for name, found in members.items()}
    return times


class _Writing:
    """One engine's texts of a piece, written a turn at a time."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self._llm, self._prompts, self._params = llm, prompts, params
        self._handles: list[RequestHandle] = []
        self._seconds = 0.0
        self.results: list[GenerationResult] = []

    def goes_on(self) -> bool:
        """Write for `TURN` seconds. Returns whether there is more to write."""
        started = perf_counter()
        if not self._handles:
            self._handles = [self._llm.submit(ids, self._params) for ids in self._prompts]
        while (is_on := self._llm.has_work) and perf_counter() - started < TURN:
            self._llm.advance()
        self._seconds += perf_counter() - started
        if not is_on:
            self.results = [handle.result() for handle in self._handles]
            self._llm.forget()
        return is_on

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [tuple(result.token_ids) for result in self.results]

    @property
    def seconds_a_token(self) -> float:
        return self._seconds / sum(map(len, self.texts))

    def by_prompt(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return dict(zip(map(tuple, self._prompts), self.texts, strict=True))


def _trials(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Tokens and seconds that members drafted to learn, by name. Seconds of a pass count for each
    of its requests."""
    return {
        name: [one["trial_tokens"], round(one["trial_seconds"], 4)]
        for name, one in members_together(parts).items()
        if one["num_trials"]
    }


def _ids(llm: LLM, text: str) -> list[int]:
    """The prompt of a chat, or of a base model."""
    if not llm.tokenizer.has_chat_template:
        return list(llm.requests.ids(text))
    return llm.requests.ids_of_chat([{"role": "user", "content": text}]).ids


def _cell(domain: str, times: Times, fixed: Sequence[str]) -> dict[str, object]:
    chosen, judged = slice(0, None, 2), slice(1, None, 2)
    speed = {name: statistics.fmean(times.by_name[name][chosen]) for name in fixed}
    best = min(speed, key=lambda name: speed[name])
    every = slice(None)
    return {
        "domain": domain,
        "pieces": len(times.by_name[PLAIN]),
        "plain_tokens_per_second": round(1 / statistics.fmean(times.by_name[PLAIN]), 1),
        "auto_tokens_per_second": round(1 / statistics.fmean(times.by_name[AUTO]), 1),
        "best": best,
        "over_plain": interval(times.ratios(AUTO, PLAIN, every)),
        "over_best": interval(times.ratios(AUTO, best, judged)),
        "fixed_over_plain": {
            name: interval(times.ratios(name, PLAIN, every))["mean"] for name in fixed
        },
        "milliseconds_per_token": {
            name: [round(1000 * seconds, 4) for seconds in found]
            for name, found in times.by_name.items()
        },
        **times.of_text(),
    }
