"""The portfolio against plain decoding and against its best single member: `run.py portfolio`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from auto_pays import (
    CHATS,
    HARD,
    NUM_FIRST,
    PLAIN,
    TEMPERATURE,
    Times,
    Told,
    compared,
    interval,
    temperature,
    text_is_hard,
    works_of,
)
from common import Report, note, real_folder, study
from options import Options
from wrong_drafters import FOR_A_WHILE, NEVER, add_right_for_a_while, write_untrained

from outrider import LLM, EngineConfig
from outrider.api.plan import named_drafts
from outrider.models.loading import resolve

PORTFOLIO = "portfolio"
# The longest drafts, and the largest trees, of all contestants that draft.
K, NODES = 12, 24
LOOKUPS: Mapping[str, EngineConfig] = {
    "ngram": EngineConfig(drafter="ngram", k=K, controller="goodput"),
    "suffix": EngineConfig(drafter="suffix", k=K, tree_nodes=NODES, controller="goodput"),
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine of the study: its settings, and what --draft names for it."""

    config: EngineConfig
    draft: str | None = None


_PLAIN = Contestant(EngineConfig(drafter="none"))


@study(
    target="",
    draft="",
    batch=1,
    pieces=16,
    domains=list(CHATS),
    threads=0,
    temperature=TEMPERATURE,
)
def portfolio(options: Options, report: Report) -> bool | None:
    """Is a portfolio faster than its best single member, and never slower than plain decoding?

    --draft names the members that cost time, with commas between them: a draft model, heads,
    quantised-self for a copy of the target in 4 bits. Without it drafter auto finds them. Every
    contestant has an engine of its own in one process, with the goodput controller; single members
    are the look-ups and each named draft. All write the same pieces of work in turns of a twentieth
    of a second, in an order that is drawn; a piece is one chat, or --batch of them at once. Tokens
    of all contestants must be equal: greedy ones, and with a --temperature those of equal seeds
    under rule match. What drafters remember is forgotten after each piece. The best single member
    of a cell is the one that was fastest over every other piece, and the portfolio is compared with
    it over the rest. The first two pieces of a process, in which all of them measure, are reported
    apart. The domain adversarial has sampled texts, which hardly repeat and nothing foresees. With
    it two more contestants write all domains: the portfolio with an untrained block drafter, which
    is never right, and look-ups with a member that knows the first half of each text and is wrong
    after it (wrong_drafters.py).
    """
    target = options.target if options.target else str(real_folder(""))
    if options.quick:
        options = replace(options, pieces=2, batch=min(options.batch, 2))
    size, batch = options.pieces, options.batch
    works = works_of(options.domains, batch, size)
    singles = _singles(target, options.draft)
    named = {PLAIN: _PLAIN, PORTFOLIO: _all(options.draft)}
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for name, one in (named | singles).items():
            llm = _loaded(target, one, options, engines.get(PLAIN))
            engines[name] = stack.enter_context(closing(llm))
        wrong = _wrong(engines[PLAIN], target, options, stack)
        engines |= wrong.engines
        own = engines[PORTFOLIO]
        report[PORTFOLIO] = {"members": list(own.drafters), "notes": list(own.notes)}
        report["batch"] = batch
        for turn, (domain, work) in enumerate(works):
            times = compared(engines, work, temperature(options, domain), tell=wrong.tell)
            if turn == 0:
                first = times.ratios(PORTFOLIO, PLAIN, slice(NUM_FIRST))
                report["first_pieces_over_plain"] = [round(ratio, 3) for ratio in first]
                times = times.after(NUM_FIRST)
            note(report, **_cell(domain, times, list(singles), list(wrong.engines)))
    for name in ("over_best", "over_plain"):
        means = [cell[name]["mean"] for cell in report["cells"]]
        report[f"{name}_geometric_mean"] = round(statistics.geometric_mean(means), 3)
        print(name, "geometric mean", report[f"{name}_geometric_mean"])
    return all(
        text_is_hard(cell)
        and all(one["high"] >= 0.98 for one in (cell["over_plain"], *cell["wrong"].values()))
        for cell in report["cells"]
    )


@dataclass(frozen=True, slots=True)
class _Wrong:
    """The contestants with drafters that do not pay, and whom to tell the texts."""

    engines: Mapping[str, LLM]
    tell: Told | None = None


def _wrong(plain: LLM, target: str, options: Options, stack: ExitStack) -> _Wrong:
    if not HARD.keys() & set(options.domains):
        return _Wrong({})
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="outrider-untrained-")))
    untrained = str(write_untrained(plain, folder / NEVER))
    draft = f"{options.draft.rstrip(',')},{untrained}" if options.draft else untrained
    member, config = add_right_for_a_while(K)
    contestants = {NEVER: _all(draft), FOR_A_WHILE: Contestant(config)}
    engines = {
        name: stack.enter_context(closing(_loaded(target, one, options, plain)))
        for name, one in contestants.items()
    }
    apart = stack.enter_context(closing(_loaded(target, _PLAIN, options, plain)))
    return _Wrong(engines, Told(apart, member.know))


def _loaded(target: str, one: Contestant, options: Options, plain: LLM | None) -> LLM:
    """An engine with the weights of `plain`: those of another could be 2 % slower, by their memory
    alone."""
    config = replace(one.config, batch_size=options.batch, threads=options.threads)
    return LLM(target, draft=one.draft, config=config, weights_of=plain)


def _all(draft: str) -> Contestant:
    """The portfolio as drafter auto makes it; of a single named draft, by name."""
    if "," in draft or not draft:
        return Contestant(EngineConfig(), draft or None)
    config = EngineConfig(drafter=PORTFOLIO, k=K, tree_nodes=NODES, controller="goodput")
    return Contestant(config, draft)


def _singles(target: str, draft: str) -> dict[str, Contestant]:
    """Each member by itself: look-ups, and what `draft` names."""
    found = {name: Contestant(config) for name, config in LOOKUPS.items()}
    folder = resolve(target)
    # A name that stands alone would be taken for a folder.
    for kind, at, name in named_drafts(f"{draft},", folder) if draft else ():
        config = EngineConfig(drafter=kind, k=K, controller="goodput")
        found[kind] = Contestant(config, None if at == Path(folder) else name)
    return found


def _cell(domain: str, times: Times, singles: list[str], wrong: list[str]) -> dict[str, object]:
    chosen, judged, every = slice(0, None, 2), slice(1, None, 2), slice(None)
    speed = {name: statistics.fmean(times.by_name[name][chosen]) for name in singles}
    best = min(speed, key=lambda name: speed[name])
    return {
        "domain": domain,
        "pieces": len(times.by_name[PLAIN]),
        "plain_tokens_per_second": round(1 / statistics.fmean(times.by_name[PLAIN]), 1),
        "portfolio_tokens_per_second": round(1 / statistics.fmean(times.by_name[PORTFOLIO]), 1),
        "best": best,
        "over_plain": interval(times.ratios(PORTFOLIO, PLAIN, every)),
        "over_best": interval(times.ratios(PORTFOLIO, best, judged)),
        "singles_over_plain": {
            name: interval(times.ratios(name, PLAIN, every))["mean"] for name in singles
        },
        "wrong": {name: interval(times.ratios(name, PLAIN, every)) for name in wrong},
        **times.of_text(),
    }
