"""Speculation at given rates of acceptance on shapes of 1.7B and 4B: `run.py synthetic`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from random import Random
from time import perf_counter

from common import Report, cells_before, note, study
from options import Options
from synthetic_files import SHAPES, written

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.config import RULES
from outrider.core.draft import Verdict, common_prefix
from outrider.core.env import cache_folder
from outrider.core.plugins import RuleKind
from outrider.core.protocols import VerifyRow
from outrider.core.sampling import Sampling, draw
from outrider.measure import rotated
from outrider_lab.bench.peers.servers import LlamaSide
from outrider_lab.bench.peers.sides import Ask, Setup

PROMPT = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A draft of `k` tokens, each kept with probability `rate` if those before it are. Without a
    shape `draft` it comes from the target's MTP block."""

    target: str
    draft: str
    k: int
    rate: float
    source: str

    @property
    def rates(self) -> list[float]:
        """The probability that so many tokens are kept."""
        return list(accumulate([self.rate] * self.k, mul))


DFLASH = "DFlash, Qwen3-8B, GSM8K: 4.73 tokens a round"
DSPARK = "DSpark, Qwen3-8B, GSM8K: 6.30 tokens a round"
MTP = "MTP, Qwen3.5: 0.85 to 0.9 of drafted tokens"
# Rates of seven tokens whose mean round is the published one.
CASES: Mapping[str, Sequence[Case]] = {
    "1.7b": (Case("1.7b", "0.6b", 7, 0.842, DFLASH), Case("1.7b", "0.6b", 7, 0.930, DSPARK)),
    "4b": (Case("4b", "0.6b", 7, 0.842, DFLASH), Case("4b", "0.6b", 7, 0.930, DSPARK)),
    "mtp": (
        Case("qwen3.5-4b", "", 1, 0.9, MTP),
        Case("qwen3.5-4b", "", 2, 0.9, MTP),
        Case("qwen3.5-4b", "", 2, 0.85, MTP),
    ),
    "tiny": (Case("tiny", "tiny-draft", 2, 0.8, MTP), Case("tiny-mtp", "", 2, 0.9, MTP)),
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
    known = {(cell["target"], cell["k"], cell["rate"]) for cell in done}
    RULES.add(RuleKind(name="synthetic", build=Chance, exact=False))
    for case in (case for part in parts for case in CASES[part]):
        if (case.target, case.k, case.rate) not in known:
            note(report, **measured(case, options))


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
    """A text, the seconds from its first token to its last, and the tokens of a round of these."""

    ids: Sequence[int]
    seconds: float
    round: float


# Writes a text, with draws of a seed.
Run = Callable[[int], Text]


def measured(case: Case, options: Options) -> dict[str, object]:
    """The cell of a case: every contestant in turns, after a turn that does not count."""
    options.folder.mkdir(parents=True, exist_ok=True)
    files = [written(options.folder, name) for name in (case.target, case.draft) if name]
    Chance.rate = case.rate
    with ExitStack() as stack:
        runs = dict(ours(stack, files, case, options))
        if options.programs:
            side = stack.enter_context(closing(LlamaSide(Path(options.programs))))
            runs |= theirs(side, files, case, options)
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        rounds: dict[str, list[float]] = {name: [] for name in runs}
        texts: dict[str, Text] = {}
        for turn in range(options.turns + 1):
            for name in rotated(list(runs), turn):
                texts[name] = runs[name](turn)
                if turn:
                    speeds[name].append((options.tokens - 1) / texts[name].seconds)
                    rounds[name].append(texts[name].round)
    return told(case, speeds, rounds) | {"alike": alike(texts)}


def alike(texts: Mapping[str, Text]) -> int | None:
    """Leading tokens of both programs' plain texts that are equal: the files mean the same."""
    pairs = [texts[name].ids for name in ("ours plain", "llama.cpp plain") if name in texts]
    return common_prefix(*pairs) if len(pairs) > 1 else None


def told(
    case: Case, speeds: Mapping[str, list[float]], rounds: Mapping[str, list[float]]
) -> dict[str, object]:
    cell: dict[str, object] = {"target": case.target, "draft": case.draft or "mtp", "k": case.k}
    cell |= {"rate": case.rate, "expected": round(1 + sum(case.rates), 2), "source": case.source}
    gains: dict[str, float] = {}
    for name in [name for name in speeds if not name.endswith("plain")]:
        program = name.split()[0]
        plain = speeds[f"{program} plain"]
        gains[program] = statistics.median(a / b for a, b in zip(speeds[name], plain, strict=True))
        tokens = statistics.fmean(rounds[name])
        cell[f"{program}_gain"] = round(gains[program], 3)
        cell[f"{program}_round"] = round(tokens, 2)
        cost = tokens / gains[program]
        cell[f"{program}_round_cost"] = round(cost, 3)
        cell[f"{program}_gain_at_rate"] = round((1 + sum(case.rates)) / cost, 3)
    for kind in ("plain", "drafts") if len(gains) > 1 else ():
        pairs = zip(speeds[f"ours {kind}"], speeds[f"llama.cpp {kind}"], strict=True)
        cell[f"{kind}_over_llama_cpp"] = round(statistics.median(a / b for a, b in pairs), 3)
    per_second = {name: [round(one, 2) for one in found] for name, found in speeds.items()}
    return cell | {"tokens_per_second": per_second}


def prompt_of(case: Case) -> list[int]:
    dice = Random(0)
    return [dice.randrange(300, SHAPES[case.target].vocab) for _ in range(PROMPT)]


def ours(
    stack: ExitStack, files: Sequence[Path], case: Case, options: Options
) -> Iterator[tuple[str, Run]]:
    params, prompt = SamplingParams(max_tokens=options.tokens, temperature=0.0), prompt_of(case)
    drafts = EngineConfig(
        drafter="model" if case.draft else "mtp",
        k=case.k,
        controller="fixed",
        watchdog="off",
        sampler="synthetic",
        context=1024,
    )
    plain = EngineConfig(drafter="none", context=1024)
    named = (("ours plain", plain, None), ("ours drafts", drafts, (*files[1:], None)[0]))
    shared: LLM | None = None
    for name, config, draft in named:
        llm = LLM(
            files[0],
            draft=draft,
            config=config,
            weights_of=shared,
            batch_size=1,
            threads=options.threads,
        )
        stack.enter_context(closing(llm))
        shared = shared or llm

        def run(seed: int, llm: LLM = llm) -> Text:
            Chance.dice = Random(seed)
            started = perf_counter()
            result = llm.generate([prompt], params)[0]
            seconds = perf_counter() - started - (result.time_to_first_token or 0.0)
            assert len(result.token_ids) == options.tokens, "a text ended early"
            return Text(
                result.token_ids, seconds, (options.tokens - 1) / (result.stats.num_rounds - 1)
            )

        yield name, run


def theirs(
    side: LlamaSide, files: Sequence[Path], case: Case, options: Options
) -> Iterator[tuple[str, Run]]:
    rates = ",".join(f"{rate:.6f}" for rate in case.rates)
    words = ["--spec-draft-n-max", str(case.k), "--spec-draft-p-min", "0"]
    words += ["--spec-synth-rates", rates]
    if case.draft:
        words += ["--spec-type", "draft-simple", "-md", str(files[1]), "-td", str(options.threads)]
    else:
        words += ["--spec-type", "draft-mtp"]
    for name, more in (("llama.cpp plain", []), ("llama.cpp drafts", words)):
        given = {"context": 1024, "words": more}
        side.load(Setup(name, str(files[0]), "", "q4_k_m", "none", 0, options.threads, given))

        def run(seed: int, name: str = name) -> Text:
            found = side.run(Ask(name, prompt_of(case), "", options.tokens, 0.0, seed))
            assert len(found["ids"]) == options.tokens, "a text ended early"
            later = options.tokens - 1
            seconds = found["seconds"] - found["read_seconds"]
            return Text(found["ids"], seconds, later / (later - found["accepted"]))

        yield name, run
