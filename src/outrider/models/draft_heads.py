"""Draft heads of a target: finds their folders, and remarks on heads that may not fit.

Heads are trained for one target, so their folders lie in the target's own folder or next to it. A
folder fits if its sizes and layers are the target's; a difference that can only lower acceptance is
a caution. Only `weight_remarks` reads the values of weights; the rest reads at most their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.core.spec import ModelSpec
from outrider.models.documents import read_document
from outrider.models.heads import HeadKind, hidden_layers_of, kind_of
from outrider.models.hf_config import read_config
from outrider.models.json_object import JsonObject
from outrider.models.loading import HEAD_ALIASES, resolve
from outrider.models.rope_config import Rope, parse_rope
from outrider.models.weights import Weights

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence on heads: `wrong` if they cannot draft for the target, else a caution."""

    wrong: bool
    text: str


def find_heads(target: Path) -> dict[HeadKind, Path]:
    """Folders of heads that fit the model in `target`, one for each kind. Folders within `target`
    come before its siblings, and each group is searched in the order of names."""
    found: dict[HeadKind, Path] = {}
    for folder in _neighbours(target):
        try:
            kind = kind_of(folder)
            if kind != "model" and not any(r.wrong for r in size_remarks(target, folder)):
                found.setdefault(kind, folder)
        except CheckpointError:
            continue
    return found


def name_of(folder: Path) -> str:
    """The name of heads for --draft: their alias if they come with the package, else their path."""
    for alias in HEAD_ALIASES:
        try:
            if resolve(alias) == folder:
                return alias
        except CheckpointError:
            continue
    return str(folder)


def size_remarks(target: Path, folder: Path) -> list[Remark]:
    """Remarks on the heads in `folder` as heads of the model in `target`, from their configs.

    Raises CheckpointError for a folder that has no heads, or a config that cannot be read.
    """
    kind = kind_of(folder)
    if kind == "model":
        raise CheckpointError(f"{folder} holds a model, not heads.")
    spec = read_config(target).spec("target", bytes_per_weight=2, bytes_per_kv=2)
    config = read_document(folder / _CONFIG)
    return [
        *_sizes(config, spec),
        *_layers(folder, kind, spec),
        *_windows(config, spec),
        *_ropes(config, read_document(target / _CONFIG)),
    ]


def weight_remarks(folder: Path) -> list[Remark]:
    """A remark on tensors that hold NaN or infinities; it names the first three. Reads all weights.
    Raises CheckpointError for a folder without safetensors."""
    with Weights(folder) as weights:
        bad = [name for name, tensor in weights.each() if not _all_numbers(tensor)]
    if not bad:
        return []
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return [
        Remark(True, f"weights that are not numbers (NaN or infinite): {', '.join(bad[:3])}{more}")
    ]


def has_own_mtp(target: Path) -> bool:
    """True if the checkpoint in `target` holds the tensors of its own MTP block, under names of
    their own or as one more layer. Raises CheckpointError for a folder without safetensors."""
    layers = _text_config(target).integer("num_hidden_layers", 0, least=0)
    own = ("mtp.", "model.mtp.", f"model.layers.{layers}.")
    with Weights(target) as weights:
        return any(name.startswith(own) for name in weights.names)


def own_mtp_depth(target: Path) -> int:
    """Number of MTP blocks in the config of `target`; a checkpoint may have one without it."""
    config = _text_config(target)
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return max(config.integer(key, 0, least=0) for key in keys)


def _text_config(folder: Path) -> JsonObject:
    config = read_document(folder / _CONFIG)
    return config.child("text_config") or config


def _neighbours(target: Path) -> list[Path]:
    def folders(parent: Path) -> list[Path]:
        try:
            return sorted(path for path in parent.iterdir() if (path / _CONFIG).is_file())
        except OSError:
            return []

    return [path for path in (*folders(target), *folders(target.parent)) if path != target]


def _sizes(config: JsonObject, spec: ModelSpec) -> Iterator[Remark]:
    """Remarks on sizes in the heads' config. Loading finds missing sizes in the tensors."""
    for key, own in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        value = config.integer(key) if config.has(key) else own
        if value != own:
            yield Remark(True, f"{key} is {value} and the target's {own}")


def _layers(folder: Path, kind: HeadKind, spec: ModelSpec) -> Iterator[Remark]:
    try:
        hidden_layers_of(folder, kind, spec.num_layers)
    except CheckpointError as error:
        yield Remark(True, str(error).rstrip("."))


def _windows(config: JsonObject, spec: ModelSpec) -> Iterator[Remark]:
    key = "max_position_embeddings"
    value = config.integer(key) if config.has(key) else spec.max_tokens
    if value < spec.max_tokens:
        yield Remark(
            False,
            f"the window is {value} tokens and the target's {spec.max_tokens}: no text of this "
            "pair is longer than the shorter one",
        )


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
            f"positions turn with {rope_in_words(ours)} and the target's with "
            f"{rope_in_words(theirs)}: drafts far into a text may be refused",
        )


def rope_in_words(rope: Rope) -> str:
    stretched = "" if rope.kind == "default" else f" ({rope.kind}, factor {rope.factor:g})"
    return f"theta {rope.theta:g}{stretched}"


def _all_numbers(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
