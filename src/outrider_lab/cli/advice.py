"""What `outrider plan` and `outrider draft suggest` ask of this machine, and how they show it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from outrider.api.found import num_weight_bytes
from outrider.api.llm import LLM
from outrider.cache.pages import free_bytes
from outrider.cli.conversation import is_instruct
from outrider.cli.output import Meter, prose
from outrider.core.config import EngineConfig
from outrider.core.errors import OutriderError
from outrider.core.fields import size, words_of
from outrider.core.params import SamplingParams
from outrider.core.spec import ModelSpec
from outrider.estimate.forecast import sheet_like
from outrider.kernels.operators import pick_device
from outrider.models.loading import resolve
from outrider_lab.bench.calibrate.extent import BESIDE_WEIGHTS, Bounds, extent_of
from outrider_lab.bench.calibrate.found import Asked, Encoder, Found, Watch
from outrider_lab.bench.requests import texts_of
from outrider_lab.bench.studies.drafters_lineup import (
    PLAIN,
    Contestant,
    Drafts,
    contestants_named,
    known,
)
from outrider_lab.bench.workload import (
    DOMAINS,
    MESSAGES_NOTE,
    MIXED,
    RAW_HINT,
    builtin_texts,
    messages_in,
)
from outrider_lab.cli.verb_options import CountingOption
from outrider_lab.measure.machine import machine
from outrider_lab.planner.calibration import Calibration
from outrider_lab.planner.suppose import Candidate, supposed

AUTO = "auto"
_USUAL = ("model", "mtp", "eagle", "medusa", "block", "ngram", "suffix")
# Prompts of a domain, or of a file, that are written to count what is kept.
_MOST_PROMPTS = 8
# A model takes more in memory than in its file: pages are aligned, an output head lies apart.
_IN_MEMORY = 1.5
_NO_DRAFTS = Drafts(None, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be known: of which drafters, for so many texts at once. Rounds are timed for
    `timing` seconds at most, of one text `alone` or of others too. `drafts` are what contestants
    draft from that name no draft. Of the texts an instruct model reads `messages` in its chat
    template; `notes` then say so."""

    target: str
    spec: ModelSpec
    engine: EngineConfig
    contestants: Sequence[Contestant]
    batch: int
    texts: Sequence[str]
    params: SamplingParams
    timing: float
    drafts: Drafts | None = None
    messages: Collection[str] = ()
    compares: bool = True
    alone: bool = False
    notes: list[str] = field(default_factory=list[str])

    def asked(self, seconds: float, began: float) -> Asked:
        """Within so many seconds from `began` on, and within the weights once and 1 GB."""
        engine = self.engine
        num_bytes = {one.name: self._draft_bytes(one) for one in self.contestants}
        weights = self.spec.weight_bytes + sum(num_bytes.values())
        device = pick_device(engine.device)
        bounds = Bounds(seconds=seconds, began=began)
        left = None
        if device.type == "cpu":
            held = bounds.held()[0]
            bounds.most_bytes = min(weights + BESIDE_WEIGHTS, held + free_bytes(device))
            left = bounds.most_bytes - held - int(_IN_MEMORY * self.spec.weight_bytes)
        candidates = [
            Candidate.of(one.name, one.drafter, self.spec, num_bytes[one.name])
            for one in self.contestants
            if one != PLAIN
        ]
        here = machine(engine.device)
        gpu = None if here["gpu"] is None else str(here["gpu"])
        return Asked(
            target=self.target,
            spec=self.spec,
            engine=engine,
            contestants=self.contestants,
            drafts=self.drafts or _NO_DRAFTS,
            estimated=supposed(
                self.spec, sheet_like(device.type, gpu), candidates, machine=str(gpu or here["cpu"])
            ),
            num_bytes={one.name: one.num_bytes for one in candidates},
            extent=extent_of(
                self.spec,
                batch=self.batch,
                num_engines=len(self.contestants),
                left_bytes=left,
                alone=self.alone,
            ),
            bounds=bounds,
            texts=self.texts,
            params=self.params,
            timing=self.timing,
            encoder=self._encoder,
            compares=self.compares,
        )

    def _encoder(self, llm: LLM) -> Encoder:
        """Encoder of prompts as `outrider generate` sends them; a template stays whole."""
        encode, decode = llm.tokenizer.encode, llm.tokenizer.decode
        messages = self.messages if is_instruct(llm, self.target) else ()
        self.notes.extend([f"{MESSAGES_NOTE}; {RAW_HINT}"] if messages else [])

        def message(text: str, most: int | None) -> list[int]:
            if text not in messages:
                return encode(text)[-(most or 0) :]
            ids = llm.encode_chat(text)
            if most is None or len(ids) <= most:
                return ids
            end = encode(text)[len(ids) - most :]
            return llm.encode_chat(decode(end) if end else text[-1:])[-most:]

        return message

    def _draft_bytes(self, one: Contestant) -> int:
        """Of the files of its draft model or heads, which add to the weights."""
        try:
            draft = one.draft or (self.drafts or _NO_DRAFTS).of_drafter(one.drafter)
            folder = None if draft is None else resolve(draft)
        except OutriderError:
            # Loading says what is wrong with it.
            return 0
        return 0 if folder is None else num_weight_bytes(folder)


def contestants_of(words: str, drafts: Drafts) -> list[Contestant]:
    """Plain decoding first; `auto` are the usual drafters that there are."""
    if words != AUTO:
        return contestants_named(words)
    found = [PLAIN]
    for name in _USUAL:
        try:
            drafts.of_drafter(name)
        except OutriderError:
            continue
        found.append(Contestant(name=name, drafter=name))
    return found


def prompt_texts(prompts: str | None, domains: str) -> list[str]:
    """Of a file, or of shipped domains in turns: who is cut off knows something of each."""
    if prompts is not None:
        return list(texts_of(prompts)[: 2 * _MOST_PROMPTS])
    names = words_of("--domains", domains, hint="--domains code,maths")
    rows = zip_longest(*(builtin_texts(name)[:_MOST_PROMPTS] for name in names))
    return [text for text in chain.from_iterable(rows) if text is not None]


def message_texts(options: CountingOption) -> frozenset[str]:
    """The prompts that are messages: those of a file, and of shipped domains in MESSAGES."""
    if options.raw:
        return frozenset()
    if options.prompts is not None and options.prompts not in (MIXED, *DOMAINS):
        return frozenset(texts_of(options.prompts))
    domains = options.prompts or options.domains
    return messages_in(words_of("--domains", domains, hint="--domains code,maths"))


def with_trees(calibration: Calibration) -> tuple[str, ...]:
    """The drafters that can draft trees."""
    names = (one.name for one in calibration.drafters)
    return tuple(name for name in names if known(name.partition("=")[0]).branches)


# What is said of a stage where nobody watches a bar; any other stage is a shape of rounds.
_STAGES = {
    "loading": "loading the target and its drafters",
    "counting": "counting what is accepted of drafts on the prompts",
    "comparing": "comparing texts with those of plain decoding",
}
_TIMING = "timing rounds (--seconds bounds all of it)"


class ProgressMeter(Meter):
    """What is being done; where nobody sees a bar, a line for each kind of work as it begins."""

    def __init__(self) -> None:
        super().__init__("", 1.0)
        self._said: set[str] = set()

    def watch(self, verdict: Callable[[Found], str]) -> Watch:
        """Partial answers come on stderr, too: `verdict` is what they say."""

        def partly(found: Found) -> None:
            known = f"{verdict(found)} {found.origins.sentence}"
            news = f"so far, after {found.seconds:.0f} s: {known}"
            print(prose(news, width=80), file=sys.stderr, flush=True)

        def warns(words: str) -> None:
            print(prose(words, width=80), file=sys.stderr, flush=True)

        return Watch(tell=self.tell, partly=partly, warns=warns)

    def tell(self, what: str, share: float) -> None:
        self.reach(share, title=f"{what:32}")
        sentence = _STAGES.get(what, _TIMING)
        if not self.drawn and sentence not in self._said:
            self._said.add(sentence)
            print(sentence, file=sys.stderr, flush=True)


def bounds_sentence(found: Found) -> str:
    """What the answer took, of what it may take."""
    allowed = "" if found.most_bytes is None else f" of {size(found.most_bytes)} allowed"
    return f"It took {found.seconds:.1f} s and {size(found.peak_bytes)} of memory{allowed}."


def disturbed_sentences(found: Found) -> Iterator[str]:
    """How sure times are, if others used the machine meanwhile."""
    if found.is_disturbed:
        yield (
            f"note: others used {100 * (found.others or 0.0):.0f} % of the CPU. Times are of the "
            "moments in which this process ran, intervals are wider, and these times are not kept "
            "for later: measure anew when the machine is quiet"
        )
