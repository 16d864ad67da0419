"""Adapter: any decoder of transformers as a CausalLM, with the paged KV cache as its only cache.

One pass takes the packed tokens of all sequences as one row of a batch, each with its position. The
model computes everything but attention, so prefill, decode, trees and rollback work as for our own
decoders. A model is surveyed without weights, loaded, made row-invariant, and must then pass a
trial against its own plain attention; see docs/algorithms/adapter.md.

Shapes:  N = tokens of all texts that are compared or packed tokens, V = vocabulary, M = packed
         logits rows, D = hidden size, K = captured layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.errors import ConfigError, ContractError
from outrider.core.protocols import CausalLM, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.core.tree import ROOT
from outrider.kernels.operators import Kernels, pick_device, pick_dtype, tried
from outrider.kernels.registry import choose
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.decoder import LoadOptions, ModelCapacity, wanted_tokens
from outrider.models.json_object import unsupported
from outrider.models.weights import Weights
from outrider.plugins.transformers.attention import ArenaCache, attending
from outrider.plugins.transformers.config import AdapterConfig, read_adapter_config
from outrider.plugins.transformers.row_modules import RowByRow, RowLinear, prepare, use_kernels
from outrider.plugins.transformers.transformers import (
    calling,
    load,
    read_hf_config,
    transposed_linear,
    use_arena,
)

_MOST_TOKENS = 8
_PAGE_SIZE = 4
# The largest error allowed, relative to the spread of the logits. Attention and residuals are
# float32 on both sides; linears with shorter weights round their inputs, which adds errors.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}


class AdapterTrial:
    """Texts that one model reads twice, and the comparison of its logits (`run`).

    The model reads three texts with its own attention and no cache, and then through the KV cache:
    one step has the beginning of a chain; the next has the rest of the chain, a second branch of
    the tree and a second sequence. A model fails if it counts positions itself, adds something to
    attention that we do not, or mixes neighbouring tokens outside attention. The rest of the chain
    is then fed again token by token, which shows whether rows are invariant.
    """

    def __init__(self, max_tokens: int, vocab_size: int) -> None:
        length = min(_MOST_TOKENS, max_tokens)
        self._start = length // 2
        chain = tuple((7 * i * i + 3 * i + 1) % vocab_size for i in range(length))
        begin, rest = chain[: self._start], chain[self._start :]
        branch = tuple((token + 1) % vocab_size for token in rest[:-1])
        self.texts = (chain, begin + branch, chain[::-1])

    @property
    def capacity(self) -> ModelCapacity:
        """A small arena of pages that the texts cross."""
        tokens = sum(map(len, self.texts))
        return ModelCapacity(num_slots=2 * tokens, page_size=_PAGE_SIZE, max_rows=tokens)

    def run(self, model: CausalLM, expected_NV: Tensor, weights: torch.dtype) -> bool:
        """Compare the model's logits with `expected_NV`, those of all texts one after another.

        `weights` is the type of the linears' weights. Return True if rows are bit-identical alone
        and together. Raises CheckpointError if logits differ.
        """
        chain, other_path, other = self.texts
        begin, rest, branch = (
            chain[: self._start],
            chain[self._start :],
            other_path[self._start :],
        )
        model.state.open(0, ())
        model.state.open(1, ())
        begin_NV = _step(model, StepRow.chain(0, begin))
        model.state.commit({0: range(len(begin))})
        forks = (ROOT, *range(len(rest), len(rest) + len(branch) - 1))[: len(branch)]
        tree = StepRow(0, rest + branch, (*range(ROOT, len(rest) - 1), *forks))
        together_NV = _step(model, tree, StepRow.chain(1, other))
        model.state.commit({0: ()})
        alone_NV = torch.cat(
            [
                _step(model, StepRow.chain(0, rest[i : i + 1], parent=i - 1))
                for i in range(len(rest))
            ]
        )
        found_NV = torch.cat(
            [begin_NV, together_NV[: len(rest)], begin_NV, together_NV[len(rest) :]]
        )
        _compare(found_NV, expected_NV, _TOLERANCE[weights], model.spec.name)
        return torch.equal(together_NV[: len(rest)], alone_NV)


def _step(model: CausalLM, *rows: StepRow) -> Tensor:
    return model.step(rows, DraftNeeds()).logits_MV.clone()


def _compare(found_NV: Tensor, expected_NV: Tensor, tolerance: float, name: str) -> None:
    if found_NV.shape != expected_NV.shape:
        raise unsupported(
            name,
            f"its logits have shape {list(expected_NV.shape)}, "
            f"while {list(found_NV.shape)} were requested",
        )
    spread = (expected_NV - expected_NV.mean(-1, keepdim=True)).abs().max()
    error = (found_NV - expected_NV).abs().max()
    # Written so that NaN fails.
    if not bool(error <= tolerance * spread):
        raise unsupported(
            name,
            f"over the arena this model computes other logits than by itself (off by "
            f"{float(error):.2g}, allowed are {float(tolerance * spread):.2g}): it counts "
            "positions or mixes tokens in a way that the adapter does not know",
        )


@dataclass(frozen=True, slots=True)
class Body:
    """A loaded transformers model whose attention is ours, with its kernels, dtype and device, and
    linears of matrices that have no module, by address."""

    model: Any
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    matrices: Mapping[int, RowLinear]


class AdapterModel:
    """CausalLM over a PagedKV that it owns. Several may share one body, each with its own arena."""

    def __init__(
        self, config: AdapterConfig, body: Body, capacity: ModelCapacity, *, name: str
    ) -> None:
        self.config, self.body, self.capacity = config, body, capacity
        size = body.dtype.itemsize
        self._spec = config.spec(name, bytes_per_weight=size, bytes_per_kv=size)
        self._kv = PagedKV(
            self._spec,
            dtype=body.dtype,
            device=body.device,
            size=ArenaSize(capacity.num_slots, capacity.page_size),
        )
        self._cache = ArenaCache(
            self._kv, body.kernels, num_heads=config.num_heads, max_rows=capacity.max_rows
        )
        # On other devices nothing is row-invariant, so rows may as well run together.
        self._rows = RowByRow(body.kernels, body.matrices)
        self._by_row = self._rows if body.device.type == "cpu" else nullcontext()
        accepted = inspect.signature(body.model.forward).parameters
        self._slices_logits = "logits_to_keep" in accepted

    @property
    def kernels(self) -> Kernels:
        return self.body.kernels

    @kernels.setter
    def kernels(self, kernels: Kernels) -> None:
        """Exchange the kernels of the body, and so of all models that share it; attention over the
        arena changes for this model only."""
        use_kernels(self.body.model, self.body.kernels, kernels)
        self.body = replace(self.body, kernels=kernels)
        self._cache.attention = kernels.attention

    @property
    def multiplied(self) -> Container[int]:
        """Addresses of the matrices without a module that passes have multiplied by."""
        return self._rows.used

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def state(self) -> PagedKV:
        return self._kv

    def twin(self) -> None:
        """Return None: the modules of transformers find their cache through the model, so only one
        pass can use it at a time."""

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """Run at most `max_rows` tokens. Hidden layer i is the residual after i layers, 0 to L - 1.

        Raises ConfigError for a hidden layer that transformers does not return.
        """
        if not 0 < sum(len(row.tokens) for row in rows) <= self.capacity.max_rows:
            raise ContractError("a step has 1 to max_rows tokens")
        self._check_layers(needs.hidden_layers)
        with torch.inference_mode(), self._by_row:
            plan = self._kv.plan(rows)
            wanted_M = plan.tokens_N.new_tensor(wanted_tokens(rows), dtype=torch.int64)
            self._cache.begin(plan)
            options: dict[str, Any] = {}
            if needs.hidden_layers:
                options["output_hidden_states"] = True
            if self._slices_logits:
                options["logits_to_keep"] = wanted_M
            with attending(self._cache):
                out = self.body.model(
                    input_ids=plan.tokens_N[None].long(),
                    position_ids=plan.positions_N[None].long(),
                    past_key_values=self._cache,
                    use_cache=True,
                    **options,
                )
            logits_MV = out.logits[0] if self._slices_logits else out.logits[0, wanted_M]
            return StepOutput(logits_MV.float(), self._hidden(out, needs.hidden_layers))

    def _check_layers(self, layers: tuple[int, ...]) -> None:
        beyond = [layer for layer in layers if layer >= self._spec.num_layers]
        if beyond:
            raise ConfigError(
                f"{self._spec.name}: transformers gives the residual before layer "
                f"{self._spec.num_layers - 1} at the latest, and {beyond[0]} was requested.",
                hint="choose a drafter that reads earlier layers, or none: --drafter ngram",
            )

    def _hidden(self, out: Any, layers: tuple[int, ...]) -> Tensor | None:
        if not layers:
            return None
        if not out.hidden_states:
            raise ConfigError(
                f"{self._spec.name}: transformers does not give this model's hidden states.",
                hint="choose a drafter that needs none: --drafter ngram",
            )
        return torch.stack([out.hidden_states[layer][0].float() for layer in layers], dim=1)


def load_adapter(folder: Path, options: LoadOptions, *, name: str = "") -> AdapterModel:
    """Load the model in `folder`. Reports call it `name`, by default the folder's name.

    Raises CheckpointError, with the reason, for a folder or a model that cannot run over the arena;
    ConfigError or MachineError if `options` do not fit the model or the machine.
    """
    checkpoint = open_checkpoint(folder)
    config = read_adapter_config(checkpoint)
    device = pick_device(options.device)
    # A checkpoint that names no dtype counts as float32.
    dtype = pick_dtype(options.dtype, config.dtype or "float32", folder)
    # Our own reader checks the files first: they are all safetensors, and none is missing.
    with Weights(checkpoint):
        pass
    kernels, wide = _kernels(options, device, dtype), _kernels(options, device, torch.float32)
    hf_config = read_hf_config(checkpoint.document(CONFIG))
    model = load(hf_config, folder, dtype).to(device)
    prepared = prepare(model, kernels, wide, dtype, transposed_linear())
    kernels = tried(kernels, config)
    body = Body(model, wide, torch.float32, device, prepared.matrices)
    alike, multiplied = _try(body, config, dtype)
    foreign = prepared.foreign(multiplied)
    exact = kernels.exact and alike and not foreign
    if kernels.exact and not exact:
        reason = f"{foreign[0]} is not read by our kernels" if foreign else "bits differ in a trial"
        note = (
            f"a row's bits depend on other rows ({reason}): with speculation, greedy text "
            "may differ from plain decoding where two tokens nearly tie"
        )
        config = replace(config, notes=(*config.notes, note))
    body = replace(body, kernels=replace(kernels, exact=exact), dtype=dtype)
    return AdapterModel(config, body, options.capacity, name=name or folder.name)


def _try(body: Body, config: AdapterConfig, weights: torch.dtype) -> tuple[bool, Container[int]]:
    """Run a model's trial and leave the model with our attention. Return whether rows are
    invariant, and which matrices without a module were multiplied by.

    The arena of the trial is float32, so that rounding hides no mistake.
    """
    trial = AdapterTrial(config.max_tokens, config.vocab_size)
    with calling(f"{config.family}: it fails over the arena"):
        expected_NV = torch.cat([_alone(body, text) for text in trial.texts])
        use_arena(body.model)
        model = AdapterModel(config, body, trial.capacity, name=config.family)
        return trial.run(model, expected_NV, weights), model.multiplied


def _kernels(options: LoadOptions, device: torch.device, dtype: torch.dtype) -> Kernels:
    return choose(
        device=device, dtype=dtype, force_reference=options.force_reference, threads=options.threads
    )


def _alone(body: Body, text: Sequence[int]) -> Tensor:
    """logits_NV of `text` by the model's own attention, without any cache."""
    with torch.inference_mode():
        tokens_1N = torch.tensor([list(text)], device=body.device)
        return body.model(input_ids=tokens_1N, use_cache=False).logits[0].float()
