"""What a drafter that looks up costs by the length of the text, in processor time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from time import process_time

from common import TARGET, Report, first_prompts, note, study
from options import Options

from outrider.api.tokenizer import Tokenizer
from outrider.core import env
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import KeyedRng
from outrider.core.tree import ROOT
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.portfolio import PortfolioDrafter, lookup_members
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.rounds import NativeLookups
from outrider.models.loading import resolve
from outrider_lab.drafters.recycling import WIDTH, RecyclingDrafter

CONTEXTS = (256, 2000, 8000, 32_000)
K, TREE, NUM_ROUNDS = 4, 16, 200
# Tokens that the text may go on with: more than all rounds emit.
AHEAD = NUM_ROUNDS * (K + 1)


@study(repeats=5)
def lookup_cost(options: Options, report: Report) -> None:
    """What does a round of each drafter that looks up cost, at each length of the text?

    `round_us` is the processor time of a round once the prompt has been read: the drafter reads
    what the round before emitted, and drafts chains of 4 tokens, or trees of up to 16. `prompt_ms`
    is the first round, which reads the prompt. Prompts are those of the workloads, one after the
    other. The text goes on with those behind them ("new"), or is a copy of its own middle
    ("copied"), so that nearly every round emits 5 tokens. No model runs: what a target would accept
    follows from the text. Rounds are recorded, and then repeated by a new drafter; the fastest of
    the repeats counts.
    """
    contexts = CONTEXTS[:1] if options.quick else CONTEXTS
    tokenizer = Tokenizer.load(resolve(TARGET))
    ids = [token for prompt in first_prompts(None) for token in tokenizer.encode(prompt)]
    makers: dict[str, Callable[[], Drafter]] = {
        "prediction": PredictionDrafter,
        "recycling": lambda: RecyclingDrafter(vocab_size=max(ids) + 1),
    }
    library = built_kernels(env.compiler(), env.cache_folder()).library
    if library is not None:
        makers |= _by_name(NativeLookups(library), "")
    makers |= _by_name(None, ", in Python")
    report |= {"k": K, "rounds": NUM_ROUNDS, "repeats": options.repeats}
    for (name, make), num_nodes, copied, context in product(
        makers.items(), (0, TREE), (False, True), contexts
    ):
        if num_nodes and name.startswith(("ngram", "prediction")):
            continue  # They draft chains alone.
        prompt = _cycled(ids, 0, context)
        text = _cycled(prompt, context // 2, AHEAD) if copied else _cycled(ids, context, AHEAD)
        rounds = Rounds.recorded(make(), prompt, text, Budget(K, num_nodes=num_nodes))
        found = [rounds.repeated(make()) for _ in range(1 if options.quick else options.repeats)]
        note(
            report,
            drafter=name,
            nodes=num_nodes or K,
            text="copied" if copied else "new",
            context=context,
            prompt_ms=round(1e3 * min(prompt for prompt, _ in found), 2),
            round_us=round(1e6 * min(mean for _, mean in found), 1),
            drafted=round(rounds.num_drafted / NUM_ROUNDS, 2),
            emitted=round(len(rounds.tokens) / NUM_ROUNDS, 2),
        )


def _by_name(native: NativeLookups | None, ending: str) -> dict[str, Callable[[], Drafter]]:
    return {
        f"ngram{ending}": lambda: NgramDrafter(native=native),
        f"suffix{ending}": lambda: SuffixDrafter(native=native),
        f"lookup{ending}": lambda: PortfolioDrafter(
            lookup_members(SuffixDrafter(native=native), NgramDrafter(native=native))
        ),
    }


def _cycled(ids: Sequence[int], start: int, count: int) -> list[int]:
    return [ids[place % len(ids)] for place in range(start, start + count)]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of one request with this prompt: what was asked in each, and where each ended in `tokens`,
    all that they emitted. Rows share one list of tokens, which grows from round to round."""

    prompt: list[int]
    rows: list[DraftRow]
    ends: list[int]
    tokens: list[int]
    num_drafted: int

    @classmethod
    def recorded(
        cls, drafter: Drafter, prompt: list[int], text: list[int], budget: Budget
    ) -> Rounds:
        """The text goes on as `text` says, which is also the caller's own guess."""
        written, rows, ends = list(prompt), list[DraftRow](), list[int]()
        guess = tuple(text) if drafter.name == "prediction" else ()
        last: Outcome | None = None
        num_drafted = end = 0
        drafter.open(0, prompt)
        for _ in range(NUM_ROUNDS):
            rng = KeyedRng(0, 0, len(written))
            row = DraftRow(0, written, last, budget, SamplingParams(), rng, prediction=guess)
            (draft,) = drafter.propose([row])
            path = _accepted(draft, text[end:])
            start, end = end, end + len(path) + 1
            rows.append(row)
            ends.append(end)
            num_drafted += len(draft)
            # The right token is the likeliest after the root and the path, and any after others.
            likely = [tuple(text[node + 1 : node + 1 + WIDTH]) for node in range(len(draft) + 1)]
            for place, node in enumerate((ROOT, *path), start):
                likely[node + 1] = tuple(text[place : place + WIDTH])
            last = Outcome(0, draft, Verdict(path, text[end - 1]), likely=tuple(likely))
            written += text[start:end]
        return cls(prompt, rows, ends, text[:end], num_drafted)

    def repeated(self, drafter: Drafter) -> tuple[float, float]:
        """Processor seconds of the first round, and the mean of the others."""
        tokens = self.rows[0].tokens
        assert isinstance(tokens, list)
        tokens[:] = self.prompt
        drafter.open(0, self.prompt)
        began = process_time()
        drafter.propose(self.rows[:1])
        prompt_seconds = process_time() - began
        began = process_time()
        start = 0
        for row, end in zip(self.rows[1:], self.ends, strict=False):
            tokens += self.tokens[start:end]
            start = end
            drafter.propose([row])
        return prompt_seconds, (process_time() - began) / (NUM_ROUNDS - 1)


def _accepted(draft: Draft, text: Sequence[int]) -> tuple[int, ...]:
    """The nodes of `draft` that begin `text`."""
    path: list[int] = []
    for token in text:
        children = draft.children(path[-1] if path else ROOT)
        right = [node for node in children if draft.tokens[node] == token]
        if not right:
            break
        path.append(right[0])
    return tuple(path)
