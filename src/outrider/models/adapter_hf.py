"""All that Outrider asks of transformers: configurations, model classes, weights.

The only module that a model runs through, and imported only when one needs it: transformers is an
optional dependency. No code of a checkpoint is run, no pickle is opened, no network is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from outrider.core.errors import CheckpointError, OutriderError
from outrider.models.config_keys import OTHER_CHECKPOINT, refuse_deep, refuse_quantised
from outrider.models.json_object import JsonObject

ATTENTION = "outrider"
_NAMES_CODE = {"auto_map", "custom_generate", "transformers_weights"}
_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"
# What Python code says when it meets a value, a module or a cache that it was not written for.
_MISFITS = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def transformers(family: str) -> Any:
    """The library. Raises CheckpointError, in the name of a model of `family`, if it is missing."""
    try:
        import transformers as library
    except ImportError as error:
        raise CheckpointError(
            f"model_type {family!r} has no decoder of Outrider's own, and transformers, which may "
            "run it, is not installed.",
            hint="pip install 'outrider[hf]'",
        ) from error
    return library


@contextmanager
def calling(what: str) -> Generator[None]:
    """Calls into transformers: silent, and whatever they raise becomes a CheckpointError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    log: Any = logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    except OutriderError:
        raise
    except (*_MISFITS, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise CheckpointError(
            f"{what}: {type(error).__name__}, {reason:.300}", hint=OTHER_CHECKPOINT
        ) from error
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def read_hf_config(raw: JsonObject) -> Any:
    """transformers' own reading of `raw`, a config.json; it knows all defaults.

    Raises CheckpointError for what no adapter could run.
    """
    family = raw.text("model_type")
    library = transformers(family)
    known = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if raw.flag("is_encoder_decoder", default=False):
        raise CheckpointError(
            f"{raw.where}: {family} is an encoder with a decoder; Outrider runs decoders alone.",
            hint=OTHER_CHECKPOINT,
        )
    if family not in known and raw.has("auto_map"):
        raise CheckpointError(
            f"{raw.where}: model_type {family!r} runs only with code from the checkpoint "
            "(auto_map), and Outrider runs no such code.",
            hint=OTHER_CHECKPOINT,
        )
    if family not in known:
        raise CheckpointError(
            f"{raw.where}: model_type {family!r} is not a text decoder that transformers "
            f"{library.__version__} knows.",
            hint="a newer one may: pip install -U 'outrider[hf]'",
        )
    refuse_quantised(raw)
    refuse_deep(raw)
    kinds = library.models.auto.configuration_auto.CONFIG_MAPPING
    with calling(f"{raw.where}: transformers cannot read it"):
        return kinds[family].from_dict(_plain_settings(raw.values))


def _plain_settings(value: Any) -> Any:
    """Without what names code or files, at any depth.

    An implementation with a slash in its name would be fetched from the hub and run.
    """
    if isinstance(value, list):
        return [_plain_settings(item) for item in cast("list[object]", value)]
    if not isinstance(value, Mapping):
        return value
    settings = cast("Mapping[str, object]", value)
    if list(settings) == ["__float__"]:  # how transformers writes what JSON has no number for
        return float(str(settings["__float__"]))
    return {
        key: _plain_settings(item)
        for key, item in settings.items()
        if key not in _NAMES_CODE and "_implementation" not in key
    }


def skeleton(config: Any) -> Any:
    """The model without memory for its weights, whose attention is what `register` was given."""
    family = config.model_type
    library = transformers(family)
    try:
        with calling(f"{family}: transformers cannot build it"), torch.device("meta"):
            # The experts of some models take no other type while they have no data. A copy, since
            # the type is written into the config.
            model = library.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation=ATTENTION, dtype=torch.bfloat16
            )
    except CheckpointError as error:
        if isinstance(error.__cause__, KeyError) and error.__cause__.args == (ATTENTION,):
            raise closed_attention(family) from error
        raise
    return _ready(model)


def closed_attention(family: str) -> CheckpointError:
    return CheckpointError(
        f"{family}: its attention does not go through transformers' attention interface, so it "
        "cannot read the arena.",
        hint=OTHER_CHECKPOINT,
    )


def load(config: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The model with its weights on the CPU and transformers' own plainest attention.

    Raises CheckpointError if the files do not hold exactly its weights.
    """
    library = transformers(config.model_type)
    with calling(f"{folder}: transformers cannot load it"):
        # From a local folder, which the survey has read before.
        model, report = library.AutoModelForCausalLM.from_pretrained(  # nosec B615
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report[kind]))
        if names:
            raise CheckpointError(
                f"{folder}: {kind.split('_')[0]} weights: {names[0]} ({len(names)} in all).",
                hint="do config.json and the weights belong to one model?",
            )
    return _ready(model)


def _ready(model: Any) -> Any:
    """Without the look for padding that some models take in every pass: there is no padding."""
    for module in model.modules():
        if hasattr(module, _PADDING_CHECK):
            setattr(module, _PADDING_CHECK, _no_check)
    return model.eval()


def _no_check(*_: object) -> None: ...


def use_arena(model: Any) -> None:
    """Switch `model` to the attention that `register` was given."""
    with calling(f"{model.config.model_type}: its attention cannot be replaced"):
        model.set_attn_implementation(ATTENTION)
    if model.config._attn_implementation != ATTENTION:
        raise closed_attention(model.config.model_type)


def register(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Offer an attention and its mask to all models under the name ATTENTION."""
    import transformers as library

    interfaces: Any = library
    interfaces.AttentionInterface.register(ATTENTION, attention)
    interfaces.AttentionMaskInterface.register(ATTENTION, mask)


def transposed_linear() -> type[torch.nn.Module]:
    """The linear of GPT-2 and its kin, whose weight is inputs x outputs."""
    from transformers.pytorch_utils import Conv1D

    found: Any = Conv1D
    return found
