"""A model without weights is run once, on two tokens, to learn what it asks of cache and attention.

Its parameters are on PyTorch's meta device, which computes shapes and no values: the pass costs no
memory, and a model that cannot run over the arena is refused before anything is read. What must
hold: every layer writes keys and values, all of one shape; attention goes through transformers'
interface and asks for nothing beyond a causal softmax; masks are causal. A local mask (sliding
window, chunks) sees everything within its width, so it only bounds the window.

Shapes:  N = tokens, H = query heads, G = KV heads, D = head size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.models.adapter_attention import (
    MaskFunction,
    Options,
    answer_attention,
    answer_mask,
    attending,
)
from outrider.models.adapter_hf import calling, closed_attention, register, skeleton
from outrider.models.config_keys import OTHER_CHECKPOINT

# Options of attention that are heeded, and those that change nothing: bookkeeping, and dropout,
# which is off.
_KNOWN = {
    "attention_mask", "is_causal", "scaling", "sliding_window",
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "max_length_k", "max_length_q",
    "output_attentions", "output_hidden_states", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
_MASK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a model's layers keep. `local` is the narrowest local mask, None if all are global, and
    `expert_parameters` are those of the experts among `num_parameters`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    local: int | None
    num_parameters: int
    expert_parameters: int


def survey(config: Any) -> Anatomy:
    """Raises CheckpointError, with the reason, if a model of this `config` cannot run."""
    family, seen = config.model_type, _Survey(config.model_type)
    register(answer_attention, answer_mask)
    model = skeleton(config)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise CheckpointError(
            f"{family}: it takes no positions, so its sequences cannot share a pass.",
            hint=OTHER_CHECKPOINT,
        )
    tokens_1N = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    positions_1N = torch.zeros_like(tokens_1N)
    with calling(f"{family}: a pass without its weights fails"), attending(seen), torch.no_grad():
        try:
            model(
                input_ids=tokens_1N,
                position_ids=positions_1N,
                past_key_values=seen,
                use_cache=True,
            )
        except AttributeError as error:
            if error.obj is not seen:
                raise
            raise _refusal(
                family, f"it keeps more than keys and values (its cache needs {error.name})"
            ) from error
    shape = seen.shape(config.get_text_config(decoder=True).num_hidden_layers)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return Anatomy(*shape, seen.local, sum(sizes.values()), of_experts)


class _Survey:
    """Cache and attention of the pass. Notes shapes and refuses by name what we do not do."""

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
        """An empty stand-in, which tells the layers that use this mask from those that do not."""
        stand_in = torch.empty(1, 1, 2, 2, device="meta")
        self._masks.append((stand_in, mask, local))
        return stand_in

    def _check_mask(self, used: Tensor | None) -> None:
        """A mask is a function of indices: compare it with the causal one where it is in reach."""
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
        """(query heads, KV heads, head size) of every layer, if there are such."""
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
    return CheckpointError(
        f"{family}: the transformers adapter cannot run it: {reason}.", hint=OTHER_CHECKPOINT
    )
