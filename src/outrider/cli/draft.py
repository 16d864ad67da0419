"""`outrider draft`: what can draft for a target, and whether a certain draft fits it.

Suggestions come in the order in which they are worth trying: what was trained for this target, then
draft models that share its vocabulary, then the target itself in fewer bits, then its text. What is
not here yet says how to get it. What each gains is measured by `outrider bench drafters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from outrider.api.tokenizer import Tokenizer, first_differences
from outrider.bench.studies.draft_heads import has_own_mtp, heads_beside, name_of, own_mtp_depth
from outrider.bench.studies.drafters_lineup import available
from outrider.cli.call import Call, needed
from outrider.cli.draft_fit import SMALL_FILES, Fit, Measured, compare, measure
from outrider.cli.model_options import DraftCheckOptions, DraftSuggestOptions
from outrider.cli.models import local_models, small_files
from outrider.cli.output import answer, table
from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError
from outrider.models.families import LLAMA_FAMILIES
from outrider.models.heads import kind_of
from outrider.models.json_object import JsonObject
from outrider.pairs.catalog import draft_of, list_pairs
from outrider.train.llama_module import read_llama_config

# A draft model that is not this much smaller costs more than it brings.
_MOST_OF_TARGET = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """`draft` is what --draft names, None where the drafter needs nothing. `ready` says that it is
    on this machine."""

    drafter: str
    draft: str | None
    ready: bool
    reason: str
    command: str

    @property
    def contestant(self) -> str:
        """The word of `outrider bench drafters` for it."""
        return f"{self.drafter}={self.draft}" if self.draft else self.drafter


def suggestions(target: str) -> list[Suggestion]:
    """In the order in which they are worth trying. Raises CheckpointError if there is no such
    target."""
    folder = small_files(target, *SMALL_FILES)
    asked: list[Callable[[str, Path], Iterator[Suggestion]]] = [
        _own_mtp,
        _heads,
        _pairs,
        _local,
        _without_files,
        _training,
    ]
    found: dict[tuple[str, str | None], Suggestion] = {}
    for ask in asked:
        for one in ask(target, folder):
            found.setdefault((one.drafter, one.draft), one)
    return list(found.values())


def _generate(target: str, *flags: str) -> str:
    return " ".join(["outrider generate", f"--target {quote(target)}", *flags, "PROMPT"])


def _own_mtp(target: str, folder: Path) -> Iterator[Suggestion]:
    """Of a model that is not cached only the small files are here, and its config is believed."""
    announced = own_mtp_depth(folder) > 0
    here = any(folder.glob("*.safetensors"))
    there = has_own_mtp(folder) if here else announced
    if there or announced:
        yield Suggestion(
            drafter="mtp",
            draft=None,
            ready=here and there,
            reason="the checkpoint has an MTP block of its own, trained with it"
            if there
            else "config.json announces an MTP block, and its tensors are not in the files: fetch "
            "the whole checkpoint",
            command=_generate(target, "--drafter mtp"),
        )


def _heads(target: str, folder: Path) -> Iterator[Suggestion]:
    for kind, heads in heads_beside(folder).items():
        name = name_of(heads)
        yield Suggestion(
            drafter=kind,
            draft=name,
            ready=True,
            reason=f"{kind} heads of the target's sizes lie beside it",
            command=_generate(target, f"--draft {quote(name)}"),
        )


def _pairs(target: str, folder: Path) -> Iterator[Suggestion]:
    """By the target's hub id, or by a folder that has its name."""
    names = {target.lower(), Path(target).name.lower()} if folder.exists() else {target.lower()}
    here = {model.name for model in local_models() if model.refusal is None}
    for pair in list_pairs():
        known = pair.target_model_id.lower()
        if not pair.supported or not names & {known, known.rpartition("/")[2]}:
            continue
        draft = pair.draft_to_load
        if draft is None:
            # The target drafts for itself, which is suggested of every target.
            continue
        flags = [f"--draft {quote(draft)}"]
        flags += [f"--drafter {pair.drafter}"] if pair.drafter != "auto" else []
        built_in = draft_of(target) == draft
        yield Suggestion(
            drafter="model" if pair.drafter == "auto" else pair.drafter,
            draft=draft,
            ready=draft in here,
            reason=f"known pair {pair.pair_name}: {pair.notes}",
            command=_generate(target, *([] if built_in else flags)),
        )


def _local(target: str, folder: Path) -> Iterator[Suggestion]:
    """Smaller models on this machine with the same vocabulary."""
    own_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    num_ids = JsonObject.read(folder / "config.json").integer("vocab_size", 0, least=0)
    for model in local_models():
        if model.refusal or model.folder == folder or not own_bytes:
            continue
        share = model.num_bytes / own_bytes
        if share > _MOST_OF_TARGET or not _same_ids(folder, model.folder, num_ids):
            continue
        yield Suggestion(
            drafter="model",
            draft=model.name,
            ready=True,
            reason=f"on this machine, the same vocabulary, {100 * share:.0f} % of the target's "
            "bytes",
            command=_generate(target, f"--draft {quote(model.name)}"),
        )


def _same_ids(target: Path, other: Path, num_ids: int) -> bool:
    try:
        if kind_of(other) != "model":
            return False
        if JsonObject.read(other / "config.json").integer("vocab_size", 0, least=0) != num_ids:
            return False
        return not first_differences(Tokenizer.load(target), Tokenizer.load(other), limit=1)
    except CheckpointError:
        return False


# Drafters that need no file, in the order in which they are worth trying.
_WITHOUT_FILES = {
    "quantised-self": "the target's own matrices in fewer bits draft over its memory: no file, "
    "high acceptance; pays where the target is read from memory and not from a cache",
    "layer-skip": "the target drafts with some of its layers left out: no file and no memory; "
    "acceptance depends on how much the layers that are left out do",
    "suffix": "copies what followed the longest part of the text that came before: for edits, "
    "logs, code; costs next to nothing where nothing repeats",
    "recycling": "goes by which tokens followed which in this run: needs no model",
    "ngram": "copies from the text so far: for texts that repeat themselves",
}
_OF_LLAMAS = ("quantised-self", "layer-skip")


def _without_files(target: str, folder: Path) -> Iterator[Suggestion]:
    family = JsonObject.read(folder / "config.json").text("model_type", "")
    for drafter, reason in _WITHOUT_FILES.items():
        if drafter in available() and (drafter not in _OF_LLAMAS or family in LLAMA_FAMILIES):
            yield Suggestion(
                drafter=drafter,
                draft=None,
                ready=True,
                reason=reason,
                command=_generate(target, f"--drafter {drafter}"),
            )


def _training(target: str, folder: Path) -> Iterator[Suggestion]:
    try:
        read_llama_config(folder)
    except CheckpointError:
        # It cannot teach.
        return
    yield Suggestion(
        drafter="model",
        draft="my-draft",
        ready=False,
        reason="a draft model trained on your own text, on this machine",
        command=f"outrider train draft my-draft TEXTS --target {quote(target)}",
    )
    if "eagle" not in heads_beside(folder):
        yield Suggestion(
            drafter="eagle",
            draft="my-eagle",
            ready=False,
            reason="EAGLE heads trained on your own text; mtp, medusa and block are made alike",
            command=f"outrider train eagle my-eagle TEXTS --target {quote(target)}",
        )


def suggest(call: Call[DraftSuggestOptions]) -> int:
    """What fits TARGET, the most promising first, each with its reason and its command."""
    target = needed(call, "TARGET")
    found = suggestions(target)
    ready = [one.contestant for one in found if one.ready and one.drafter in available()]
    command = (
        f"outrider bench drafters --target {quote(target)} --drafters {quote(','.join(ready))}"
    )
    rows = [
        (one.drafter, one.draft or "", "here" if one.ready else "to be made or fetched", one.reason)
        for one in found
    ]
    lines = [
        table(rows, header=("drafter", "draft", "", "why")),
        "\nTry them:",
        *(f"  {one.command}" for one in found),
        f"\nMeasure those that are here:\n  {command}",
    ]
    record = {"suggestions": [asdict(one) for one in found], "measure": command}
    answer(call.options, record, "\n".join(lines))
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
    answer(call.options, record, "\n".join(lines))
    return 0 if fit.fits and not dead else 1


def _measured(options: DraftCheckOptions, fit: Fit) -> Measured:
    drafter = "auto" if fit.same_ids else "bridge"
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
