"""Keys of a `config.json` that mean the same in every family, and refusals of what none can do."""

from __future__ import annotations

from outrider.core.errors import CheckpointError
from outrider.models.json_object import JsonObject

OTHER_CHECKPOINT = "choose another checkpoint; `outrider pairs` lists some that load"
CONTRADICTION = "config.json contradicts itself: download it again, or choose another checkpoint"

# What is read of a file is bounded before anything is made of it. No model has so many layers.
MAX_LAYERS = 4096
# The last position that float32 tells from its neighbours, in which angles are computed.
MAX_POSITIONS = 1 << 24


def bounded_window(max_tokens: int) -> tuple[int, tuple[str, ...]]:
    """The window that positions allow, and a note where that is less than the file's."""
    if max_tokens <= MAX_POSITIONS:
        return max_tokens, ()
    note = f"float32 tells positions apart up to {MAX_POSITIONS}: that is the window"
    return MAX_POSITIONS, (f"{note}, not {max_tokens}",)


def refuse_deep(raw: JsonObject) -> None:
    """Raise CheckpointError for more layers than any model has, under any family's name of them:
    for each of them something is made while a config is read."""
    for part in (raw, raw.child("text_config")):
        for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if part is not None and part.has(key):
                part.integer(key, least=0, most=MAX_LAYERS)


def refuse_quantised(raw: JsonObject) -> None:
    if raw.has("quantization_config"):
        raise CheckpointError(
            f"{raw.where}: quantization_config says that the weights are quantised, "
            "which is not supported.",
            hint="use the unquantised checkpoint",
        )


def refuse_activation(raw: JsonObject, key: str, known: tuple[str, ...]) -> None:
    """Raise unless `key` names one of `known`, of which the first is the default."""
    activation = raw.text(key, known[0])
    if activation not in known:
        raise CheckpointError(
            f"{raw.where}: {key} {activation!r} is not supported; this decoder has {known[0]}.",
            hint=OTHER_CHECKPOINT,
        )


def stop_ids(vocab_size: int, *files: JsonObject | None) -> tuple[int, ...]:
    """End-of-text ids of all files. Ids outside the vocabulary are dropped: none can be drawn."""
    ids = [item for file in files if file for item in file.integers("eos_token_id")]
    return tuple(dict.fromkeys(item for item in ids if 0 <= item < vocab_size))


def stored_dtype(raw: JsonObject) -> str:
    """The checkpoint's own dtype, under its new name or its old one; "" if unsaid."""
    return raw.text("dtype", raw.text("torch_dtype", "")).removeprefix("torch.")
