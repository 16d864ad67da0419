"""May these drafts be verified by this target: vocabularies, windows, positions, sizes, weights.

A draft model must give every id the meaning that the target gives it. Heads must have been trained
for this very target. What is wrong stops a pair, a caution may cost acceptance or length.

Is anything of a draft accepted? Some shipped prompts, written with it and counted.

What counts is the first token of a draft, which needs no other to be right: the share of them that
was kept, with the upper end of its 95 % interval (Wilson, "Probable Inference, the Law of
Succession, and Statistical Inference", 1927). Below DEAD nothing that a draft costs can be paid
back, so the pair is called dead, whatever its vocabularies and sizes say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from outrider.api.llm import LLM
from outrider.api.tokenizer import Difference, Tokenizer, first_differences
from outrider.cli.conversation import is_instruct
from outrider.cli.models import small_files
from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError, OutriderError
from outrider.core.params import SamplingParams
from outrider.metrics import position_counts
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.configs import LlamaConfig
from outrider.models.families import read_config
from outrider.models.heads import (
    DraftKind,
    kind_of,
    misfits,
)
from outrider.models.json_object import JsonObject
from outrider.models.rope_config import parse_rope
from outrider.models.weights import Weights
from outrider_lab.bench.workload import MESSAGES_NOTE, builtin_texts, messages_in

# Enough to compare vocabularies; weights stay where they are.
SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence on heads: `wrong` if they cannot draft for the target, else a caution."""

    wrong: bool
    text: str


@dataclass(frozen=True, slots=True)
class Side:
    """One model: tokens in its tokenizer, and ids that its distributions are over."""

    name: str
    num_tokens: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class Fit:
    """`shared` is the share of the draft's tokens that the target spells alike, under any id. Heads
    (of a `kind` that is not "model") have the target's own tokens, perhaps a part of them."""

    kind: DraftKind
    target: Side
    draft: Side
    differences: tuple[Difference, ...]
    shared: float
    remarks: tuple[Remark, ...] = ()

    @property
    def same_ids(self) -> bool:
        """Whether a drafted id means the same to the target."""
        return not self.differences

    @property
    def fits(self) -> bool:
        return self.same_ids and not self.wrong

    @property
    def wrong(self) -> list[str]:
        return [remark.text for remark in self.remarks if remark.wrong]

    @property
    def advice(self) -> str:
        flags = f"--target {quote(self.target.name)} --draft {quote(self.draft.name)}"
        if self.fits:
            return f"it fits: outrider generate {flags} PROMPT"
        if self.wrong:
            return (
                f"it does not fit: {self.wrong[0]}. `outrider draft suggest "
                f"{quote(self.target.name)}` says what does; `outrider train` makes a draft for a "
                "target of your own."
            )
        return (
            "it does not fit as it is (ids mean different tokens). Either spell drafts anew, with "
            f"{flags} --drafter bridge; or choose a draft of the target's family (outrider models "
            "pairs); or draft without a model, with --drafter ngram."
        )


def compare(target: str, draft: str) -> Fit:
    """Reads configs and tokenizers, and of a draft whose weights are here, those too. Raises
    CheckpointError."""
    first = small_files(target, *SMALL_FILES)
    second = small_files(draft, *SMALL_FILES)
    kind = kind_of(second)
    return (
        _heads(target, first, draft, second)
        if kind != "model"
        else _models(target, first, draft, second)
    )


def _models(target: str, first: Path, draft: str, second: Path) -> Fit:
    ours, theirs = Tokenizer.load(first), Tokenizer.load(second)
    known, tokens = (set(map(_plain, t.vocabulary.values())) for t in (ours, theirs))
    return Fit(
        kind="model",
        target=Side(target, len(ours.vocabulary), _vocab_size(first)),
        draft=Side(draft, len(theirs.vocabulary), _vocab_size(second)),
        differences=tuple(first_differences(ours, theirs)),
        shared=len(tokens & known) / max(len(tokens), 1),
        remarks=(*_model_remarks(first, second), *weight_remarks(second)),
    )


def _heads(target: str, first: Path, draft: str, second: Path) -> Fit:
    num_tokens, num_ids = len(Tokenizer.load(first).vocabulary), _vocab_size(first)
    config = open_checkpoint(second).document(CONFIG)
    drafted = config.integer("draft_vocab_size", config.integer("vocab_size", num_ids))
    return Fit(
        kind=kind_of(second),
        target=Side(target, num_tokens, num_ids),
        draft=Side(draft, num_tokens, drafted),
        differences=(),
        shared=min(drafted / num_ids, 1.0),
        remarks=(*size_remarks(first, second), *weight_remarks(second)),
    )


def _model_remarks(first: Path, second: Path) -> Iterator[Remark]:
    """Cautions: windows and positions of two models that run beside each other."""
    try:
        ours, theirs = read_config(first), read_config(second)
    except OutriderError as error:
        yield Remark(False, f"windows cannot be compared: {error}".rstrip("."))
        return
    yield from _window("the draft's", theirs.max_tokens, ours.max_tokens)
    if not (isinstance(ours, LlamaConfig) and isinstance(theirs, LlamaConfig)):
        return
    if (ours.rope.kind, ours.rope.theta) != (theirs.rope.kind, theirs.rope.theta):
        yield Remark(
            False,
            f"the draft turns positions with {theirs.rope} and the target with {ours.rope}: each "
            "reads its own, but they were trained for texts of other lengths, and acceptance may "
            "fall far into a text",
        )


def size_remarks(target: Path, folder: Path) -> list[Remark]:
    """Remarks on heads of the model in `target`, from their configs. Raises CheckpointError for a
    folder that has no heads, or a config that cannot be read."""
    wrong = [Remark(True, reason) for reason in misfits(target, folder)]
    config, theirs = (open_checkpoint(one).document(CONFIG) for one in (folder, target))
    most = read_config(target).max_tokens
    own = config.integer("max_position_embeddings", most)
    return [*wrong, *_window("the", own, most), *_ropes(config, theirs)]


def _window(whose: str, own: int, theirs: int) -> Iterator[Remark]:
    if own < theirs:
        both = f"{whose} window is {own} tokens and the target's {theirs}"
        yield Remark(False, f"{both}: no text of this pair is longer than the shorter one")


def _ropes(config: JsonObject, target: JsonObject) -> Iterator[Remark]:
    """A remark if the heads have rotary positions other than the target's."""
    if not (config.has("rope_theta") or config.has("rope_parameters")):
        return
    try:
        ours, theirs = parse_rope(config), parse_rope(target)
    except CheckpointError as error:
        yield Remark(False, f"positions cannot be compared: {error}".rstrip("."))
        return
    if ours != theirs:
        yield Remark(
            False,
            f"positions turn with {ours} and the target's with {theirs}: drafts far into a text "
            "may be refused",
        )


def weight_remarks(folder: Path) -> list[Remark]:
    """A remark on tensors that hold NaN or infinities; it names the first three. Reads all weights,
    or says that there are none."""
    if not open_checkpoint(folder).num_bytes:
        return [Remark(False, "its weights are not here: only what describes them was compared")]
    with Weights.at(folder) as weights:
        floats = ((name, found) for name, found in weights.each() if found.is_floating_point())
        bad = [name for name, found in floats if not bool(found.isfinite().all())]
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    named = f"weights that are not numbers (NaN or infinite): {', '.join(bad[:3])}{more}"
    return [Remark(True, named)] if bad else []


def _vocab_size(folder: Path) -> int:
    return open_checkpoint(folder).document(CONFIG).integer("vocab_size")


def _plain(token: str) -> str:
    """Tokenizers mark a space in two ways."""
    return token.replace("\u2581", " ").replace("\u0120", " ")


DEAD = 0.05
_Z = 1.96
_DOMAINS = ("code", "maths", "conversation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Greedily, over all prompts. `first_high` bounds the share of first tokens kept from above."""

    drafter: str
    num_prompts: int
    num_tokens: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_first: int
    num_first_kept: int
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def first_high(self) -> float:
        return upper_bound(self.num_first_kept, self.num_first)

    @property
    def dead(self) -> bool:
        return self.first_high < DEAD

    @property
    def text(self) -> str:
        """One sentence."""
        if not self.num_first:
            return f"measured on {self.num_prompts} prompts: drafter {self.drafter} drafted nothing"
        return (
            f"measured on {self.num_prompts} prompts: {self.num_accepted} of {self.num_drafted} "
            f"drafted tokens kept, {self.tokens_per_round:.2f} tokens a round; first tokens "
            f"{100 * self.num_first_kept / self.num_first:.0f} % "
            f"(at most {100 * self.first_high:.0f} %)"
        )


def measure(
    target: str, draft: str, config: EngineConfig, *, num_prompts: int, max_tokens: int
) -> Measured:
    """Load both and write. No watchdog ends what is to be counted. Raises OutriderError if they
    cannot be loaded together."""
    config = replace(config, watchdog="off")
    prompts = some_prompts(num_prompts)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with closing(LLM(target, draft=draft, config=config)) as llm:
        chats = messages_in(_DOMAINS) if is_instruct(llm, target) else ()
        own_notes = [MESSAGES_NOTE] if chats else []
        results = llm.generate([llm.encode_chat(p) if p in chats else p for p in prompts], params)
        drafter = llm.drafter
    traces = [trace for result in results for trace in result.rounds]
    ((first, kept),) = position_counts(traces, 1)
    return Measured(
        drafter=drafter,
        num_prompts=len(prompts),
        num_tokens=sum(result.stats.num_emitted for result in results),
        num_rounds=sum(result.stats.num_rounds for result in results),
        num_drafted=sum(result.stats.num_drafted for result in results),
        num_accepted=sum(result.stats.num_accepted for result in results),
        num_first=first,
        num_first_kept=kept,
        notes=tuple(dict.fromkeys([*own_notes, *(n for one in results for n in one.notes)])),
    )


def some_prompts(num: int) -> Sequence[str]:
    """Shipped ones, of several domains in turns."""
    rows = zip(*(builtin_texts(domain) for domain in _DOMAINS), strict=False)
    return [text for row in rows for text in row][:num]


def upper_bound(kept: int, tried: int) -> float:
    """Of a share, by Wilson's interval; 1 if nothing was tried."""
    if not tried:
        return 1.0
    share, z2 = kept / tried, _Z * _Z
    middle = share + z2 / (2 * tried)
    spread = _Z * math.sqrt(share * (1 - share) / tried + z2 / (4 * tried * tried))
    return min((middle + spread) / (1 + z2 / tried), 1.0)
