"""The quantisation of a published folder, as `quantization_config` in its config.json says it.

plugins/published reads the methods and their tensors; plain checkpoints need none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from outrider.core.errors import given
from outrider.models.checkpoint import CONFIG, Checkpoint, Scheme
from outrider.models.json_object import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.plugins.published.tensors import Quantised

_KEY = "quantization_config"
# MLX has a key of its own.
_MLX_KEY = "quantization"
# Old folders of GPTQ have a file of its own for the config.
_GPTQ_FILE = "quantize_config.json"
# ModelOpt's file, which newer versions repeat in config.json.
_MODELOPT_FILE = "hf_quant_config.json"


def scheme_of(raw: JsonObject) -> Scheme | None:
    """The scheme of a config.json's weights; None if they are not quantised.

    Raises CheckpointError for an unsupported method or setting.
    """
    text = raw.child("text_config")
    mlx = raw.values.get(_MLX_KEY)
    if isinstance(mlx, dict) and "bits" in mlx:
        return _read_method(given(raw.child(_MLX_KEY), "settings of MLX"), "mlx")
    found = raw.child(_KEY) or (text.child(_KEY) if text else None)
    return None if found is None else _read_method(found)


def scheme_in(checkpoint: Checkpoint) -> Scheme | None:
    """The scheme of a model or of heads; None for a GGUF file, whose blocks are no such method."""
    if checkpoint.is_gguf or not checkpoint.has(CONFIG):
        return None
    config = checkpoint.document(CONFIG)
    if not config.has(_KEY) and checkpoint.has(_GPTQ_FILE):
        return _read_method(checkpoint.document(_GPTQ_FILE), "gptq")
    if not config.has(_KEY) and checkpoint.has(_MODELOPT_FILE):
        own = checkpoint.document(_MODELOPT_FILE).child("quantization")
        return None if own is None else _read_method(own, "modelopt")
    return scheme_of(config)


def _read_method(raw: JsonObject, method: str = "") -> Scheme:
    from outrider.plugins.published.methods import read_method

    return read_method(raw, method)


def quantised_in(
    checkpoint: Checkpoint, stored: Collection[str], read: Callable[[str], Tensor]
) -> Quantised | None:
    """The quantised matrices of a checkpoint; None if it has no scheme. `stored` are the names of
    its tensors, and `read` returns a tensor by its name."""
    scheme = scheme_in(checkpoint)
    if scheme is None:
        return None
    from outrider.plugins.published.tensors import Quantised

    return Quantised(scheme, stored, read)
