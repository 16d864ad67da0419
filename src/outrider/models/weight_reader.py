"""From a checkpoint's tensors, under their Hugging Face names, to what a decoder multiplies by.

Tensors of several names become one matrix where the decoder wants one product: fewer, larger ones.
A tied output head shares the embedding's values but not its memory, since a head is packed for
products and an embedding is looked up by row.

Shapes:  D = hidden size, V = vocabulary, T = positions, O = outputs, I = inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.spec import ModelSpec
from outrider.kernels.plan import PackedLinear
from outrider.kernels.registry import Kernels
from outrider.models.hf_config import DecoderConfig
from outrider.models.weights import HEAD, Weights

# Names of the table of tokens in all families' files.
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
)
EVERYTHING = slice(None)


@dataclass(frozen=True, slots=True)
class Placement:
    """The precision of weights and KV, and where they live; `name` is the model's, for reports.
    `quantise`, int8 or int4, says that the matrices are held so."""

    name: str
    dtype: torch.dtype
    device: torch.device
    quantise: str = "none"

    def spec(self, config: DecoderConfig) -> ModelSpec:
        size = self.dtype.itemsize
        plain = config.spec(self.name, bytes_per_weight=size, bytes_per_kv=size)
        return replace(plain, quantise=self.quantise)


class WeightReader:
    """Reads, converts and packs one matrix at a time, so the peak is one matrix over the model.

    Every method raises CheckpointError for a tensor that is missing or has another shape.
    """

    def __init__(self, weights: Weights, kernels: Kernels, place: Placement) -> None:
        self._weights, self._kernels, self._place = weights, kernels, place

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def table(self, name: str, *shape: int) -> Tensor:
        """A matrix that is looked up by row, in the weights' dtype."""
        return self._copy(self._weights.take(name, *shape), self._place.dtype)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Norms, biases and positions, in float32."""
        return self._copy(self._weights.take(name, *shape), torch.float32)

    def head(self, embedding_VD: Tensor, *, tied: bool, rows: slice = EVERYTHING) -> PackedLinear:
        """As in transformers, a head that is stored wins over tying. `rows` are those wanted."""
        if tied and HEAD not in self._weights:
            return self._kernels.pack(embedding_VD[rows])
        return self._kernels.pack(self.table(HEAD, *embedding_VD.shape)[rows])

    def linear(
        self,
        outputs: Mapping[str, int],
        num_in: int,
        order_O: Tensor | None = None,
        *,
        columns: slice = EVERYTHING,
    ) -> PackedLinear:
        """One matrix of the weights of `outputs`, in that order; then its rows in `order_O`, and
        of its inputs those in `columns`."""
        parts = [
            self._weights.take(f"{name}.weight", num_out, num_in)
            for name, num_out in outputs.items()
        ]
        return self._packed(_ordered(torch.cat(parts), order_O)[:, columns].contiguous())

    def stacked(self, name: str, count: int, num_out: int, num_in: int) -> list[PackedLinear]:
        """The matrices of one tensor that holds `count` of them."""
        stack = self._weights.take(name, count, num_out, num_in)
        return [self._packed(weight_OI) for weight_OI in stack]

    def conv(self, name: str, num_in: int, num_out: int) -> PackedLinear:
        """A Conv1D of GPT-2, which is a linear stored as inputs by outputs."""
        return self._packed(self._weights.take(f"{name}.weight", num_in, num_out).T)

    def bias(
        self, outputs: Mapping[str, int], *, present: bool, order_O: Tensor | None = None
    ) -> Tensor | None:
        if not present:
            return None
        parts = [self._weights.take(f"{name}.bias", num_out) for name, num_out in outputs.items()]
        return self._copy(_ordered(torch.cat(parts), order_O), torch.float32)

    def _packed(self, weight_OI: Tensor) -> PackedLinear:
        place = self._place
        return self._kernels.pack(weight_OI.to(device=place.device, dtype=place.dtype))

    def _copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of our own: the file may change or vanish while the model runs."""
        return tensor.to(device=self._place.device, dtype=dtype, copy=True)


def _ordered(rows: Tensor, order_O: Tensor | None) -> Tensor:
    return rows if order_O is None else rows[order_O]
