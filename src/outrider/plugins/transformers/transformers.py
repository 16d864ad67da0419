"""The only module that calls transformers: configurations, model classes, weights, surveys.

transformers is optional, so this module is imported only when a model needs it. No code of a
checkpoint is run, no pickle is opened, no network is used.

Shapes:  N = tokens, H = query heads, G = KV heads, D = head size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError, OutriderError
from outrider.core.plugins import install_command
from outrider.models.checkpoint import scheme_of
from outrider.models.json_object import MAX_LAYERS, OTHER_CHECKPOINT, JsonObject, unsupported
from outrider.models.weights import without_mtp
from outrider.plugins.transformers.attention import (
    MaskFunction,
    Options,
    answer_attention,
    answer_mask,
    attending,
)
from outrider.plugins.transformers.row_modules import has_common_form

ATTENTION = "outrider"
_NAMES_CODE = {"auto_map", "custom_generate", "transformers_weights"}
_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"
# Errors that Python code raises for a value, a module or a cache that it was not written for.
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
    """Import the library. Raises CheckpointError if it is missing; the message names `family`."""
    try:
        import transformers as library
    except ImportError as error:
        raise CheckpointError(
            f"model_type {family!r} has no decoder of Outrider's own, and transformers, which may "
            "run it, is not installed.",
            hint=install_command("hf"),
        ) from error
    return library


@contextmanager
def calling(what: str) -> Generator[None]:
    """Silence transformers within the block, and turn its exceptions into a CheckpointError."""
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
    """Read `raw`, a config.json, with transformers, which knows all defaults.

    Raises CheckpointError for a model that the adapter cannot run.
    """
    family = raw.text("model_type")
    library = transformers(family)
    known = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if raw.flag("is_encoder_decoder", default=False):
        raise unsupported(
            raw.where, f"{family} is an encoder with a decoder; Outrider runs only decoders"
        )
    if family not in known and raw.has("auto_map"):
        raise unsupported(
            raw.where,
            f"model_type {family!r} runs only with code from the checkpoint "
            "(auto_map), and Outrider runs no such code",
        )
    if family not in known:
        raise CheckpointError(
            f"{raw.where}: model_type {family!r} is not a text decoder that transformers "
            f"{library.__version__} knows.",
            hint="a newer one may: pip install -U transformers",
        )
    if scheme_of(raw) is not None:
        raise CheckpointError(
            f"{raw.where}: the weights are quantised, which is not supported for model_type "
            f"{family!r}: it runs through transformers.",
            hint="name the unquantised checkpoint",
        )
    _refuse_deep(raw)
    kinds = library.models.auto.configuration_auto.CONFIG_MAPPING
    with calling(f"{raw.where}: transformers cannot read it"):
        return kinds[family].from_dict(_plain_settings(raw.values))


def _refuse_deep(raw: JsonObject) -> None:
    """Raise CheckpointError for too many layers, under any family's key: each takes memory."""
    for part in (raw, raw.child("text_config")):
        for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if part is not None and part.has(key):
                part.integer(key, least=0, most=MAX_LAYERS)


def _plain_settings(value: Any) -> Any:
    """A copy of the settings without keys that name code or files, at any depth.

    transformers would fetch an implementation with a slash in its name from the hub and run it.
    """
    if isinstance(value, list):
        return [_plain_settings(item) for item in cast("list[object]", value)]
    if not isinstance(value, Mapping):
        return value
    settings = cast("Mapping[str, object]", value)
    if list(settings) == ["__float__"]:  # how transformers writes infinities and NaN
        return float(str(settings["__float__"]))
    return {
        key: _plain_settings(item)
        for key, item in settings.items()
        if key not in _NAMES_CODE and "_implementation" not in key
    }


def skeleton(config: Any) -> Any:
    """Build the model without memory for its weights, with the attention given to `register`."""
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
    return unsupported(
        family,
        "its attention does not go through transformers' attention interface, so it "
        "cannot read the arena",
    )


def load(config: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Load the model on the CPU, with transformers' eager attention and without an MTP block.
    Raises CheckpointError if the files do not hold exactly the model's weights."""
    library = transformers(config.model_type)
    with calling(f"{folder}: transformers cannot load it"):
        # From a local folder, which the survey has read before.
        model, report = library.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    report["unexpected_keys"] = without_mtp(report["unexpected_keys"], config)
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(map(str, report[kind]))
        if names:
            raise CheckpointError(
                f"{folder}: {kind.split('_')[0]} weights: {names[0]} ({len(names)} in all).",
                hint="do config.json and the weights belong to one model?",
            )
    return _ready(model)


def _ready(model: Any) -> Any:
    """Switch off the check for padding that some models run in every pass: there is no padding."""
    for module in model.modules():
        if hasattr(module, _PADDING_CHECK):
            setattr(module, _PADDING_CHECK, _no_check)
    return model.eval()


def _no_check(*_: object) -> None: ...


def use_arena(model: Any) -> None:
    """Switch `model` to the attention given to `register`."""
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


# Options of attention that the adapter follows, and options that change nothing: bookkeeping, and
# dropout, which is off.
_KNOWN = {
    "attention_mask", "is_causal", "scaling", "sliding_window",
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
_MASK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Sizes of a model's layers. `local` is the width of the narrowest local mask, None if all
    masks are global. `expert_parameters` of the `num_parameters` belong to experts."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    local: int | None
    num_parameters: int
    expert_parameters: int


def survey(config: Any) -> Anatomy:
    """Find the sizes of a model. Raises CheckpointError, with the reason, if it cannot run.

    The model runs once, on two tokens, on PyTorch's meta device, which computes shapes but no
    values. So a model that cannot run over the paged KV cache is refused before its weights are
    read.
    Every layer must write keys and values, all of one shape; attention must go through
    transformers' interface and request nothing beyond a causal softmax; masks must be causal. A
    local mask (sliding window, chunks) shows everything within its width, so it only limits the
    window.
    """
    family, seen = config.model_type, _Survey(config.model_type)
    register(answer_attention, answer_mask)
    model = skeleton(config)
    for module in model.modules():
        if has_common_form(module):
            module.forward = _seen_experts
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise unsupported(family, "it takes no positions, so its sequences cannot share a pass")
    tokens_1N = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    positions_1N = torch.zeros_like(tokens_1N)
    with calling(f"{family}: a pass without its weights fails"), attending(seen), torch.no_grad():
        try:
            model(
                input_ids=tokens_1N, position_ids=positions_1N, past_key_values=seen, use_cache=True
            )
        except AttributeError as error:
            if error.obj is not seen:
                raise
            raise _refusal(
                family, f"it keeps more than keys and values (its cache needs {error.name})"
            ) from error
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise _refusal(family, "what it keeps cannot be seen without weights") from error
    shape = seen.shape(config.get_text_config(decoder=True).num_hidden_layers)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return Anatomy(*shape, seen.local, sum(sizes.values()), of_experts)


def _seen_experts(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """Experts whose sizes are never refused: ours (row_modules.py) take any."""
    return torch.empty_like(hidden_states)


class _Survey:
    """Cache and attention of the survey's pass: record shapes and refuse unsupported options."""

    is_compileable = False

    def __init__(self, family: str) -> None:
        self._family = family
        self._written: dict[int, tuple[torch.Size, torch.Size]] = {}
        self._num_heads: list[int] = []
        self._masks: list[tuple[Tensor, MaskFunction, int | None]] = []
        self.local: int | None = None

    def update(
        self, key_1GND: Tensor, value_1GND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self._written[layer_idx] = (key_1GND.shape, value_1GND.shape)
        return key_1GND, value_1GND

    def attend(
        self, query_1HND: Tensor, key_1GSD: Tensor, value_1GSD: Tensor, options: Options
    ) -> Tensor:
        foreign = sorted(
            name
            for name, value in options.items()
            if name not in _KNOWN and value is not None and value is not False
        )
        if foreign:
            raise self._refusal(f"its attention asks for {', '.join(foreign)}")
        if options.get("is_causal") is False:
            raise self._refusal("its attention is not causal")
        sizes = {tensor.shape[-1] for tensor in (query_1HND, key_1GSD, value_1GSD)}
        if len(sizes) > 1:
            raise self._refusal("its queries, keys and values differ in size")
        self._check_mask(options.get("attention_mask"))
        self._bound(options.get("sliding_window"))
        self._num_heads.append(query_1HND.shape[1])
        return query_1HND.transpose(1, 2)

    def mask(self, mask: MaskFunction, local: int | None) -> Tensor:
        """An empty stand-in, by which `attend` recognises the layers that use this mask."""
        stand_in = torch.empty(1, 1, 2, 2, device="meta")
        self._masks.append((stand_in, mask, local))
        return stand_in

    def _check_mask(self, used: Tensor | None) -> None:
        """Compare a mask, which is a function of indices, with the causal one within its reach."""
        if used is None:
            return
        found = [(mask, local) for stand_in, mask, local in self._masks if stand_in is used]
        if not found:
            raise self._refusal("it makes masks of its own")
        mask, local = found[0]
        self._bound(local)
        size = min(_MASK_SIZE, local or _MASK_SIZE)
        index_N, zero = torch.arange(size), torch.zeros((), dtype=torch.int64)
        seen_NN = mask(zero, zero, index_N[:, None], index_N[None, :])
        if not torch.equal(seen_NN, torch.ones(size, size, dtype=torch.bool).tril()):
            raise self._refusal("its mask is not causal")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        del layer_idx
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        del layer_idx
        return query_length, 0

    def shape(self, num_layers: int) -> tuple[int, int, int]:
        """(query heads, KV heads, head size) of all layers. Raises CheckpointError."""
        missing = sorted(set(range(num_layers)) - set(self._written))
        if missing or len(self._written) != num_layers:
            raise self._refusal(
                f"of {num_layers} layers, {len(missing)} write no keys and values of their own; "
                "they are recurrent or share those of others"
            )
        if len(self._num_heads) != num_layers:
            raise closed_attention(self._family)
        shapes = {shape for pair in self._written.values() for shape in pair}
        if len(shapes) > 1 or len(set(self._num_heads)) > 1:
            listed = ", ".join(sorted(str(list(shape)) for shape in shapes))
            raise self._refusal(f"keys and values of its layers differ in shape ({listed})")
        _, num_kv_heads, _, head_dim = shapes.pop()
        return self._num_heads[0], num_kv_heads, head_dim

    def _bound(self, window: int | None) -> None:
        if window is not None:
            self.local = min(window, self.local or window)

    def _refusal(self, reason: str) -> CheckpointError:
        return _refusal(self._family, reason)


def _refusal(family: str, reason: str) -> CheckpointError:
    return unsupported(family, f"the transformers adapter cannot run it: {reason}")
