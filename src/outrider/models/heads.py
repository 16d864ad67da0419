"""Folders of draft heads: finds them, their kind, their hidden layers, and whether they fit.

Heads are small nets that read the target's hidden states (plugins/heads/), in folders with a
`config.json` and safetensors, in the formats that their projects publish:

    eagle    EAGLE 1 and 2 are configured as a Llama of one layer and have a tensor `fc.weight`;
             EAGLE 3 has `draft_vocab_size`, is named in `architectures`, or is a folder of the
             speculators library (`speculators_model_type`), which also names its target
    medusa   `medusa_num_heads` in config.json
    mtp      `model_type` outrider_mtp; or the MTP block within a target's own checkpoint
    block    `model_type` outrider_block

At position p a net reads the token there and the hidden state of the token before it, and predicts
the token at p + 1. For text that the target has read the state is the target's; below it the state
is the net's own. Hidden layer i is the residual after i layers of the target, 0 to L.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TypeAlias, cast

from outrider.core.errors import CheckpointError
from outrider.core.plugins import KINDS, MODEL, HeadFormat
from outrider.estimate.forecast import KEY, StatedWorth
from outrider.models.checkpoint import (
    CONFIG,
    INDEX,
    PICKLES,
    WEIGHTS,
    Checkpoint,
    config_document,
    open_checkpoint,
)
from outrider.models.decoder import ModelCapacity
from outrider.models.families import FAMILIES, MIMO_BLOCKS, read_config
from outrider.models.json_object import MAX_LAYERS, JsonObject
from outrider.models.loading import resolve
from outrider.models.names import HEAD_ALIASES
from outrider.models.weights import Weights

# The name of the drafter that reads the heads; a folder of no heads holds MODEL.
HeadKind: TypeAlias = str
DraftKind: TypeAlias = str
_EMBEDDING = "model.embed_tokens.weight"
# The layers that heads read, numbered as ours or, for two keys, by some trainers from 0.
_LAYERS, _PUBLISHED_LAYERS = "hidden_layers", "eagle_aux_hidden_state_layer_ids"
_BLOCK_LAYERS, _OUTPUTS = "aux_hidden_state_layer_ids", "target_layer_ids"
_SPECULATORS = "speculators_model_type"
# The id of PARD, a parallel draft model (An et al. 2025, arXiv 2504.18583).
_MASK_TOKEN = "pard_token"
_NO_HEADS = "`outrider draft suggest TARGET` says what needs no heads"
_OTHERS = f"name EAGLE 3 heads of the same target; {_NO_HEADS}"
_OWN = (
    "if the target's own files have the block, and its family is of the Llama line, DeepSeek V3, "
    "GLM, MiMo or Qwen3.5: "
    f"--target TARGET --drafter mtp; {_NO_HEADS}"
)
_SHARING = (
    "they read the target's own keys and values; name a smaller model of the target's family; "
    f"{_NO_HEADS}"
)


# How the classes of models that write end.
_WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@cache
def _formats() -> Mapping[HeadKind, HeadFormat]:
    """The formats of folders of heads, by the drafter that reads them."""
    return {kind.name: kind.format for kind in KINDS.values() if kind.format is not None}


@dataclass(frozen=True, slots=True)
class _Unread:
    """An unsupported kind of heads, with `words` in its architecture."""

    title: str
    words: tuple[str, ...]
    hint: str = _OTHERS

    def is_in(self, names: str) -> bool:
        return any(word in names for word in self.words)


# The first kind that matches is named in the error.
_UNREAD = (
    _Unread("NextN (MTP)", ("nextn", "mtpmodel", "moemtp", "seekmtp", "mimomtp"), _OWN),
    _Unread("Muse assistant", ("museglimmerassistant",), _SHARING),
    _Unread("assistant", ("assistant",), _SHARING),
)


@dataclass(frozen=True, slots=True)
class HeadsToLoad:
    """Heads to load, and the sizes of their memory."""

    folder: Path
    kind: HeadKind
    capacity: ModelCapacity

    @property
    def format(self) -> HeadFormat:
        return _formats()[self.kind]

    @property
    def num_layers(self) -> int:
        """Number of layers that have keys and values of their own."""
        key = self.format.layers_key
        return self._layer_part().integer(key, 1, most=MAX_LAYERS) if key else 1

    def notes(self, window: int) -> tuple[str, ...]:
        """A note if the heads were trained on texts shorter than `window`; they draft on."""
        key = self.format.window_key
        if not key:
            return ()
        trained = self._layer_part().integer(key, window)
        if trained >= window:
            return ()
        return (
            f"the heads were trained on {trained} tokens; later drafts may be accepted less often",
        )

    def _layer_part(self) -> JsonObject:
        return layer_part(_config(open_checkpoint(self.folder)))


def kind_of(folder: Path) -> DraftKind:
    """The kind of heads in a folder or GGUF file that --draft names, or MODEL. Raises
    CheckpointError for a folder without `config.json` or with heads in an unsupported format."""
    checkpoint = open_checkpoint(folder)
    config = _config(checkpoint)
    named = _named_kind(config)
    if checkpoint.is_gguf:
        return named or MODEL
    if named is None:
        _refuse_unread(config)
        _refuse_unknown(config, is_complete=any(folder.glob("*token*")))
    if not any(folder.glob("*.safetensors")):
        _refuse_pickles(folder, heads=named is not None)
    if named is None and (checkpoint.has(WEIGHTS) or checkpoint.has(INDEX)):
        return _stored_kind(checkpoint)
    return named or MODEL


def mask_token_of(folder: Path) -> int | None:
    """The id that a draft model reads in place of tokens that are not drafted yet, so that one pass
    drafts them all (PARD); None for other draft models."""
    config = _config_if_any(folder)
    if config is None or not config.has(_MASK_TOKEN):
        return None
    return config.integer(_MASK_TOKEN, least=0)


def worth_of(folder: Path, drafter: str) -> StatedWorth | None:
    """The gain and cost of `drafter` that a folder's config states; None if it states none."""
    config = _config_if_any(folder)
    stated = None if config is None else config.values.get(KEY)
    if not isinstance(stated, dict):
        return None
    values = cast("dict[str, object]", stated)
    return StatedWorth.of(values) if values.get("drafter") == drafter else None


def verifier_of(folder: Path) -> str | None:
    """The target that heads of the speculators library name; None for any other folder. Raises
    CheckpointError for heads that name none, or whose kind is not supported."""
    config = _config_if_any(folder)
    if config is None or not config.has(_SPECULATORS):
        return None
    if _named_kind(config) is None:
        _refuse_unread(config)
    part = config.child("speculators_config")
    verifier = part.child("verifier") if part else None
    name = verifier.text("name_or_path", "") if verifier else ""
    if not name:
        raise CheckpointError(
            f"{config.where}: these are draft heads, and they do not name their target.",
            hint=f"name it: --target MODEL --draft {folder}",
        )
    return name


def layer_part(config: JsonObject) -> JsonObject:
    """The part of a config that has the sizes of the heads' layers; all of it if there is none."""
    return config.child("transformer_layer_config") or config


def hidden_layers_of(folder: Path, kind: HeadKind, num_layers: int) -> tuple[int, ...]:
    """The layers of a target of `num_layers` whose states these heads read, in their order.

    Raises CheckpointError if the target has no such layers.
    """
    config = _config(open_checkpoint(folder))
    named = _named_layers(config)
    if named is None:
        named = _usual_layers(config, kind, num_layers)
    bad = [layer for layer in named if not 0 <= layer <= num_layers]
    if bad or not named or len(set(named)) < len(named):
        raise CheckpointError(
            f"{config.where}: these heads read hidden layers {list(named)}, and the target has "
            f"layers 0 to {num_layers}.",
            hint="heads fit the one target that they were trained for; name that with --target",
        )
    return named


def layers_of_all(heads: Iterable[HeadsToLoad]) -> tuple[int, ...]:
    """The layers whose states a target stores for all of these heads: each once, in their order."""
    return tuple(dict.fromkeys(chain.from_iterable(one.capacity.hidden_layers for one in heads)))


def is_eagle3(config: JsonObject) -> bool:
    """True if EAGLE heads fuse three layers of the target, False if they read only its last one."""
    own = (config.text("model_type", ""), config.text(_SPECULATORS, ""))
    named = " ".join((*config.texts("architectures"), *own))
    return config.has("draft_vocab_size") or "eagle3" in named.lower()


def _usual_layers(config: JsonObject, kind: HeadKind, num_layers: int) -> tuple[int, ...]:
    form = _formats()[kind]
    if form.three_layers and is_eagle3(config):
        return 2, num_layers // 2, num_layers - 3
    if not form.spread:
        return (num_layers,)
    own = layer_part(config).integer("num_hidden_layers", most=MAX_LAYERS)
    if own == 1:
        return (num_layers // 2 + 1,)
    span = num_layers - 4
    return tuple(round(1 + index * span / (own - 1)) + 1 for index in range(own))


def _named_layers(config: JsonObject) -> tuple[int, ...] | None:
    """The layers that the file names at its top or, as some trainers write, in a part of it. The
    speculators library numbers states from the embedding on, as we do; z-lab and DeepSpec by the
    layer that outputs them, where -1 is the embedding."""
    for part in (config, config.child("eagle_config"), config.child("dflash_config")):
        if part is None:
            continue
        for key in (_LAYERS, _BLOCK_LAYERS):
            if part.has(key):
                return part.integers(key)
        if part.has(_OUTPUTS):
            return tuple(layer + 1 for layer in part.integers(_OUTPUTS))
        if part.has(_PUBLISHED_LAYERS):
            published = part.integers(_PUBLISHED_LAYERS)
            return published if config.has(_SPECULATORS) else _counted_from_0(published)
    return None


def _counted_from_0(published: tuple[int, ...]) -> tuple[int, ...]:
    """Layers numbered as ours are. Some trainers number a state by the layer that outputs it,
    others by the layer that reads it. The lowest state that both use lies between layers 1 and 2,
    counted from 0: the former trainers call it 1, the latter 2."""
    return tuple(layer + 1 for layer in published) if published[:1] == (1,) else published


def _config(checkpoint: Checkpoint) -> JsonObject:
    return config_document(checkpoint, "is it a folder of a model or of draft heads?")


def _config_if_any(path: Path) -> JsonObject | None:
    """The config of a folder that may hold heads; None for a GGUF file or without a config."""
    checkpoint = open_checkpoint(path)
    return None if checkpoint.is_gguf or not checkpoint.has(CONFIG) else _config(checkpoint)


def _refuse_unread(config: JsonObject) -> None:
    own = config.text(_SPECULATORS, "")
    names = " ".join((_architectures(config), own)).replace("_", "")
    found = next((one for one in _UNREAD if one.is_in(names)), None)
    if found is None and own:
        found = _Unread(own, ())
    if found is not None:
        raise CheckpointError(
            f"{config.where}: {found.title} heads are not supported.", hint=found.hint
        )


def _refuse_unknown(config: JsonObject, *, is_complete: bool) -> None:
    """Raise CheckpointError for a net with two of three marks that models do not have: a class that
    does not write, an unknown family, and no tokenizer. The loader refuses the others."""
    family, classes = config.text("model_type", ""), config.texts("architectures")
    marks = (
        bool(classes) and not any(name.endswith(_WRITERS) for name in classes),
        bool(family) and family not in FAMILIES,
        not is_complete,
    )
    if sum(marks) > 1:
        name = classes[0] if classes else family
        raise CheckpointError(
            f"{config.where}: nothing here drafts with the architecture {name} "
            f"(model_type {family!r}).",
            hint=f"--draft names a smaller model with its tokenizer, or a net for "
            f"{', '.join(sorted(_formats()))}; {_NO_HEADS}",
        )


def _architectures(config: JsonObject) -> str:
    return " ".join((*config.texts("architectures"), config.text("model_type", ""))).lower()


def _named_kind(config: JsonObject) -> HeadKind | None:
    """The kind of heads that `config.json` states; None if it states none."""
    own = {config.text("model_type", ""), config.text(_SPECULATORS, "")}
    for kind, form in _formats().items():
        if not own.isdisjoint(form.model_types):
            return kind
    named, part = _architectures(config), config.child("dflash_config")
    keys = {key for one in (config, part) if one for key in one.values if one.has(key)}

    def has_marks(form: HeadFormat) -> bool:
        extends = form.extends and not keys.isdisjoint(form.also)
        named_so = bool(form.name) and form.name in named
        also = bool(extends) and has_marks(_formats()[form.extends])
        return named_so or also or not keys.isdisjoint(form.keys)

    # A format that extends another one comes first, for it has both marks.
    ordered = sorted(_formats().items(), key=lambda pair: not pair[1].extends)
    return next((kind for kind, form in ordered if has_marks(form)), None)


def _stored_kind(checkpoint: Checkpoint) -> DraftKind:
    with Weights(checkpoint) as weights:
        if _EMBEDDING in weights:
            return MODEL
        for kind, form in _formats().items():
            if form.tensors and all(name in weights for name in form.tensors):
                return kind
    return MODEL


def _refuse_pickles(folder: Path, *, heads: bool) -> None:
    """Raise CheckpointError for heads that are only stored as pickles. A model without safetensors
    is refused when it is loaded, but heads have no tokenizer, which would be reported first."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles and (heads or not any(folder.glob("*token*"))):
        raise CheckpointError(
            f"{folder} has its weights only as {pickles[0]}, a format that can run code when it "
            "is read; Outrider reads only safetensors.",
            hint=f"convert it where you trust it, in that folder: {_conversion(pickles[0])}",
        )


def _conversion(pickle: str) -> str:
    """A command that writes the tensors as safetensors; copies, as these may not share memory."""
    return (
        'python -c "import torch; from safetensors.torch import save_file; '
        f"t = torch.load('{pickle}', map_location='cpu', weights_only=True); "
        f"save_file({{k: v.clone() for k, v in t.items()}}, '{WEIGHTS}')\""
    )


def find_heads(target: Path) -> dict[HeadKind, Path]:
    """Folders of heads that fit the model in `target`, one for each kind. Heads are trained for one
    target, so their folders lie in its own folder or next to it: folders within `target` come
    before its siblings, and each group is searched in the order of names. Heads fit if their sizes
    and layers are the target's."""
    found: dict[HeadKind, Path] = {}
    for folder in _neighbours(target):
        try:
            kind = kind_of(folder)
            if kind != MODEL and not misfits(target, folder):
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


def misfits(target: Path, folder: Path) -> list[str]:
    """Reasons why the heads in `folder` cannot draft for the model in `target`, by their configs.

    Raises CheckpointError for a folder that has no heads, or a config that cannot be read.
    """
    kind = kind_of(folder)
    if kind == MODEL:
        raise CheckpointError(f"{folder} holds a model, not heads.")
    spec = read_config(target).spec("target", bytes_per_weight=2, bytes_per_kv=2)
    config = open_checkpoint(folder).document(CONFIG)
    # Loading finds sizes that the config lacks in the tensors.
    found = [
        f"{key} is {config.integer(key)} and the target's {own}"
        for key, own in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size))
        if config.has(key) and config.integer(key) != own
    ]
    try:
        hidden_layers_of(folder, kind, spec.num_layers)
    except CheckpointError as error:
        found.append(str(error).rstrip("."))
    return found


def has_own_mtp(target: Path) -> bool:
    """True if the checkpoint in `target` holds the tensors of its own MTP block, under names of
    their own or as one more layer. Raises CheckpointError for a folder without safetensors."""
    layers = _text_config(target).integer("num_hidden_layers", 0, least=0)
    own = ("mtp.", "model.mtp.", MIMO_BLOCKS, f"model.layers.{layers}.")
    with Weights.at(target) as weights:
        return any(name.startswith(own) for name in weights.names)


def own_mtp_depth(target: Path) -> int:
    """Number of MTP blocks in the config of `target`; a checkpoint may have one without it."""
    config = _text_config(target)
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return max(config.integer(key, 0, least=0) for key in keys)


def _text_config(folder: Path) -> JsonObject:
    config = open_checkpoint(folder).document(CONFIG)
    return config.child("text_config") or config


def _neighbours(target: Path) -> list[Path]:
    def folders(parent: Path) -> list[Path]:
        try:
            return sorted(path for path in parent.iterdir() if (path / CONFIG).is_file())
        except OSError:
            return []

    return [path for path in (*folders(target), *folders(target.parent)) if path != target]


def check_numbers(weights: Weights) -> None:
    """Check that all weights are numbers: no draft of a diverged head would be accepted."""
    for name, tensor in weights.each():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{weights.checkpoint.path}: the tensor {name} holds numbers that are none (NaN or "
                "infinity).",
                hint="take an earlier checkpoint, or train it anew with a lower learning rate",
            )
