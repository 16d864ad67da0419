"""Speculation at given rates of acceptance on shapes of 1.7B and 4B: `run.py synthetic`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from random import Random
from time import perf_counter

from common import Report, cells_before, note, study
from options import Options
from random_gguf import MIX, QWENS, write_random_gguf

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.config import RULES
from outrider.core.draft import Verdict, common_prefix
from outrider.core.env import cache_folder
from outrider.core.plugins import RuleKind
from outrider.core.protocols import VerifyRow
from outrider.core.sampling import Sampling, draw
from outrider.plugins.measure.turns import rotated
from outrider_lab.bench.peers.servers import LlamaSide
from outrider_lab.bench.peers.sides import Ask, Setup
from outrider_lab.measure.store import write_json

PROMPT = 8


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of `k` tokens, each kept with probability `rate` if those before it are."""

    k: int
    rate: float
    source: str

    @property
    def rates(self) -> list[float]:
        """The probability that so many tokens are kept."""
        return list(accumulate([self.rate] * self.k, mul))

    @property
    def name(self) -> str:
        return f"K={self.k} at {self.rate}"


@dataclass(frozen=True, slots=True)
class Case:
    """A target, and drafts of the shape `draft`, or of the target's MTP block without one."""

    target: str
    draft: str
    drafts: Sequence[Drafts]


# Rates of seven tokens whose mean round is the published one.
PUBLISHED = (
    Drafts(7, 0.842, "DFlash, Qwen3-8B, GSM8K: 4.73 tokens a round"),
    Drafts(7, 0.930, "DSpark, Qwen3-8B, GSM8K: 6.30 tokens a round"),
)
MTP = "MTP, Qwen3.5: 0.85 to 0.9 of drafted tokens"
CASES: Mapping[str, Sequence[Case]] = {
    "1.7b": [Case("1.7b", "0.6b", PUBLISHED)],
    "4b": [Case("4b", "0.6b", PUBLISHED)],
    "mtp": [
        Case("qwen3.5-4b", "", (Drafts(1, 0.9, MTP), Drafts(2, 0.9, MTP), Drafts(2, 0.85, MTP)))
    ],
    "tiny": [
        Case("tiny", "tiny-draft", (Drafts(2, 0.8, MTP),)),
        Case("tiny-mtp", "", (Drafts(1, 0.9, MTP), Drafts(2, 0.9, MTP))),
    ],
}


@study(
    parts=["1.7b", "4b", "mtp"],
    folder=(cache_folder() or Path()) / "synthetic",
    programs="",
    tokens=64,
    turns=3,
    threads=2,
)
def synthetic(options: Options, report: Report) -> None:
    """What does a draft bring at given rates of acceptance, here and in llama-server?

    Models have random weights in blocks of Q4_K_M, made once in --folder, and both programs read
    the same files. Each accepts drafted tokens at random, whatever the target says: llama-server by
    --spec-synth-rates, and we by a rule of this study. Work is the real one: passes of the draft,
    of the target over all drafted rows, and states that go back. A cell has plain decoding and
    drafts of both, in turns; a gain is over the same program's plain decoding, and `round_cost` is
    the time of a round in plain tokens. --programs is the folder of llama-server. With --output
    FILE, cells that are there are not measured again.
    """
    parts = ["tiny"] if options.quick else options.parts
    done = cells_before(options.output)
    report["cells"] = done
    known = {cell["target"] for cell in done}
    RULES.add(RuleKind(name="synthetic", build=Chance, exact=False))
    for case in (case for part in parts for case in CASES[part]):
        if case.target in known:
            continue
        for cell in measured(case, options):
            note(report, **cell)
        if options.output:
            write_json(options.output, report)


class Chance:
    """A rule that keeps drafted tokens at random. What follows is the target's own token."""

    exact = False
    rate = 0.0
    dice = Random(0)

    def __init__(self, sampling: Sampling) -> None:
        del sampling

    def __call__(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        return [self._judge(row) for row in rows]

    def _judge(self, row: VerifyRow) -> Verdict:
        kept = 0
        while kept < len(row.draft) and self.dice.random() < self.rate:
            kept += 1
        return Verdict(tuple(range(kept)), draw(row.distributions.at(kept), row.rng, kept))


@dataclass(frozen=True, slots=True)
class Text:
    """A text, and the seconds and rounds from its first token to its last."""

    ids: Sequence[int]
    seconds: float
    num_rounds: int

    @property
    def speed(self) -> float:
        return (len(self.ids) - 1) / self.seconds

    @property
    def round(self) -> float:
        """Tokens of a round."""
        return (len(self.ids) - 1) / self.num_rounds


# Writes a text, with draws of a seed.
Run = Callable[[int], Text]


OURS, THEIRS, PLAIN = "ours", "llama.cpp", "plain"
# By program and name of the drafts, or PLAIN.
Key = tuple[str, str]


def measured(case: Case, options: Options) -> list[dict[str, object]]:
    """The cells of a case: every contestant in turns, after a turn that does not count."""
    options.folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in (case.target, case.draft) if name]
    files = [options.folder / f"{name}-{MIX}.gguf" for name in names]
    for file in files:
        write_random_gguf(file, QWENS)
    with ExitStack() as stack:
        runs = dict(ours(stack, files, case, options))
        if options.programs:
            side = stack.enter_context(closing(LlamaSide(Path(options.programs))))
            runs |= theirs(side, files, case, options)
        texts: dict[Key, list[Text]] = {key: [] for key in runs}
        for turn in range(options.turns + 1):
            for key in rotated(list(runs), turn):
                text = runs[key](turn)
                if turn:
                    texts[key].append(text)
    return [told(case, drafts, texts) for drafts in case.drafts]


def told(case: Case, drafts: Drafts, texts: Mapping[Key, list[Text]]) -> dict[str, object]:
    expected = 1 + sum(drafts.rates)
    cell: dict[str, object] = {"target": case.target, "draft": case.draft or "mtp", "k": drafts.k}
    cell |= {"rate": drafts.rate, "expected": round(expected, 2), "source": drafts.source}
    programs = [program for program, name in texts if name == PLAIN]
    for program in programs:
        gain = ratio(texts[program, drafts.name], texts[program, PLAIN])
        tokens = statistics.fmean(text.round for text in texts[program, drafts.name])
        cell[f"{program}_gain"] = round(gain, 3)
        cell[f"{program}_round"] = round(tokens, 2)
        cell[f"{program}_round_cost"] = round(tokens / gain, 3)
        cell[f"{program}_gain_at_rate"] = round(expected * gain / tokens, 3)
        for name in (PLAIN, drafts.name):
            speeds = [round(text.speed, 2) for text in texts[program, name]]
            cell[f"{program}_{'plain' if name == PLAIN else 'drafts'}_speeds"] = speeds
    if len(programs) > 1:
        # Rounds a second of ours over theirs: what drafts bring if both keep as many tokens.
        kept = cell[f"{THEIRS}_round"] / cell[f"{OURS}_round"]
        drafted = ratio(texts[OURS, drafts.name], texts[THEIRS, drafts.name])
        cell["drafts_at_rate_over_llama_cpp"] = round(drafted * kept, 3)
        for kind, name in (("plain", PLAIN), ("drafts", drafts.name)):
            cell[f"{kind}_over_llama_cpp"] = round(ratio(texts[OURS, name], texts[THEIRS, name]), 3)
        # Leading tokens of both plain texts that are equal: the file means the same to both.
        cell["alike"] = common_prefix(*(texts[program, PLAIN][0].ids for program in programs))
    return cell


def ratio(texts: Sequence[Text], others: Sequence[Text]) -> float:
    return statistics.median(a.speed / b.speed for a, b in zip(texts, others, strict=True))


def prompt_of(case: Case) -> list[int]:
    dice = Random(0)
    return [dice.randrange(300, QWENS[case.target].vocab) for _ in range(PROMPT)]


def ours(
    stack: ExitStack, files: Sequence[Path], case: Case, options: Options
) -> Iterator[tuple[Key, Run]]:
    params, prompt = SamplingParams(max_tokens=options.tokens, temperature=0.0), prompt_of(case)
    plain = EngineConfig(drafter="none", context=1024)
    drafting = replace(
        plain,
        drafter="model" if case.draft else "mtp",
        controller="fixed",
        watchdog="off",
        sampler="synthetic",
    )
    shared: LLM | None = None
    for drafts in (None, *case.drafts):
        llm = LLM(
            files[0],
            draft=files[1] if drafts and case.draft else None,
            config=replace(drafting, k=drafts.k) if drafts else plain,
            weights_of=shared,
            batch_size=1,
            threads=options.threads,
        )
        stack.enter_context(closing(llm))
        shared = shared or llm

        def run(seed: int, llm: LLM = llm, drafts: Drafts | None = drafts) -> Text:
            Chance.dice, Chance.rate = Random(seed), drafts.rate if drafts else 0.0
            started = perf_counter()
            result = llm.generate([prompt], params)[0]
            seconds = perf_counter() - started - (result.time_to_first_token or 0.0)
            return Text(result.token_ids, seconds, result.stats.num_rounds - 1)

        yield (OURS, drafts.name if drafts else PLAIN), run


def theirs(
    side: LlamaSide, files: Sequence[Path], case: Case, options: Options
) -> Iterator[tuple[Key, Run]]:
    kind = ["draft-simple", "-md", str(files[1])] if case.draft else ["draft-mtp"]
    for drafts in (None, *case.drafts):
        name, words = PLAIN, list[str]()
        if drafts:
            name = drafts.name
            rates = ",".join(f"{rate:.6f}" for rate in drafts.rates)
            words = ["--spec-draft-n-max", str(drafts.k), "--spec-draft-p-min", "0"]
            words += ["--spec-synth-rates", rates, "--spec-type", *kind]
        given = {"context": 1024, "words": words}
        side.load(Setup(name, str(files[0]), "", "q4_k_m", "none", 0, options.threads, given))

        def run(seed: int, name: str = name) -> Text:
            found = side.run(Ask(name, prompt_of(case), "", options.tokens, 0.0, seed))
            seconds = found["seconds"] - found["read_seconds"]
            return Text(found["ids"], seconds, len(found["ids"]) - 1 - found["accepted"])

        yield (THEIRS, name), run
