"""Draft model: a smaller model drafts a chain, or a tree, one pass a token or level for the batch.

Tokens that were fed since the last commit (the pending token and the draft) stay staged in the
draft model's KV cache until the next proposal. Then the tokens that became text are committed and
the rest is dead space: no accepted token is fed twice, and a round without a draft needs no
message. Nodes of a tree's last level are never fed, since nothing is drafted after them.

A copy of the target (Zhang et al. 2023, "Draft & Verify") drafts in the target's own KV cache.

Shapes:  V = the target's vocabulary, M = logits rows of a pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.config import EngineConfig
from outrider.core.draft import Draft, common_prefix
from outrider.core.errors import ConfigError, given
from outrider.core.plugins import AUTO, DrafterKind
from outrider.core.protocols import CausalLM, DraftNeeds, DraftRow, StepRow
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.core.tree import ROOT
from outrider.drafters.common.growth import DraftSampler, FusedDrafts, TextPart, draft_some
from outrider.drafters.common.native import fused_model_drafts
from outrider.kernels.native.cpu import last_cache_bytes, num_physical_cores
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.operators import DTYPES, Kernels, compile_ahead, for_kinds, pick_device
from outrider.kernels.plan import PackedLinear, PackedTable
from outrider.kernels.registry import choose, is_native
from outrider.models.checkpoint import open_checkpoint, scheme_in
from outrider.models.configs import LlamaConfig
from outrider.models.families import LLAMA_FAMILIES
from outrider.models.llama import CheaperParts, LlamaModel
from outrider.models.weights import Placement, TextNames, WeightReader, Weights

# The pending token, and the last token of a draft that was accepted whole: it was never fed.
LEAST_SHARE = 2


class ModelDrafter:
    """A drafter with `model`, whose tokens `sampler` chooses; it feeds at most `chunk` tokens of a
    prompt in one pass. With `fused`, drafts are made in one call where possible. A model that
    `borrows` its memory only stages nodes there: the owner opens and closes sequences. A `mask`,
    -1 for none, is read in place of tokens not drafted yet, so that one pass drafts them all."""

    name = "model"
    needs = DraftNeeds()

    def __init__(
        self,
        model: CausalLM,
        sampler: DraftSampler,
        *,
        chunk: int,
        fused: FusedDrafts | None = None,
        borrows: bool = False,
        mask: int = -1,
    ) -> None:
        self.model, self.sampler, self.mask = model, sampler, mask
        self._chunk, self._fused, self._borrows = chunk, fused, borrows
        # The tokens fed of each sequence since the last commit; without parents they are a chain.
        self._staged: dict[int, list[int]] = {}
        self._parents: dict[int, list[int]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        if not self._borrows:
            self.model.state.open(seq_id, prompt[:-1])
        self.note(seq_id, ())

    def close(self, seq_id: int) -> None:
        if not self._borrows:
            self.model.state.close(seq_id)
        del self._staged[seq_id]
        self._parents.pop(seq_id, None)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [row.budget.depth for row in rows], self._drafts)

    def share(self, num_rows: int, *, less: int = 0) -> int:
        """Return the unread tokens of each of so many rows that one pass takes, with `less` other
        rows for each."""
        return max(self._chunk // num_rows - less, LEAST_SHARE)

    def begin(
        self, seq_id: int, tokens: Sequence[int], *, most: int = LEAST_SHARE
    ) -> Sequence[int]:
        """Commit the drafted tokens that became part of the text `tokens`. If more than `most`
        tokens are left to read, read all but the last. Return the tokens that are then left to
        read. For a round that runs the model by itself."""
        state = self.model.state
        length = state.length(seq_id)
        kept = self._kept(seq_id, tokens[length:-1])
        state.commit({seq_id: kept})
        self.note(seq_id, ())
        start, end = length + len(kept), len(tokens) - 1
        if end - start >= most:
            for at in range(start, end, self._chunk):
                self._read(seq_id, tokens[at : min(at + self._chunk, end)])
            start = end
        return tokens[start:]

    def note(self, seq_id: int, fed: Sequence[int], parents: Sequence[int] = ()) -> None:
        """Record that the model has `fed` staged: the end of the text and a draft, which is a chain
        except for a drafter of trees."""
        self._staged[seq_id] = list(fed)
        if self.sampler.branches:
            self._parents[seq_id] = list(parents)

    def _kept(self, seq_id: int, text: Sequence[int]) -> Sequence[int]:
        """Return the staged nodes that `text` runs through."""
        staged = self._staged[seq_id]
        if not self.sampler.branches:
            return range(common_prefix(staged, text))
        parents, path = self._parents[seq_id], [ROOT]
        for token in text:
            below = range(path[-1] + 1, len(staged))
            child = (n for n in below if parents[n] == path[-1] and staged[n] == token)
            node = next(child, None)
            if node is None:
                break
            path.append(node)
        return path[1:]

    def _read(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.model.step([StepRow.chain(seq_id, tokens, logits_from=len(tokens))], self.needs)
        self.model.state.commit({seq_id: range(len(tokens))})

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        most = self.share(len(rows))
        parts = [TextPart.end(row, self.begin(row.seq_id, row.tokens, most=most)) for row in rows]
        fused = None if self._fused is None else self._fused.try_rows(parts)
        if fused is not None:
            for row, one in zip(rows, fused, strict=True):
                self.note(row.seq_id, one.tokens, one.parents)
            return [one.draft for one in fused]
        steps = [part.step for part in parts]
        logits_MV = self._step(steps)
        builder = self.sampler.builder(rows, [step.logits_from for step in steps])
        while steps := builder.grow(logits_MV):
            logits_MV = self._step(steps)
        return builder.drafts()

    def _step(self, steps: Sequence[StepRow]) -> Tensor:
        """Stage these tokens; return the logits that follow them."""
        logits_MV = self.model.step(steps, self.needs).logits_MV
        for step in steps:
            self._staged[step.seq_id] += step.tokens
            if self.sampler.branches:
                self._parents[step.seq_id] += step.parents
        return logits_MV


# Self-speculation: the target drafts in its own KV cache, with fewer bits or fewer layers.
#
# The cheaper copy reads the keys and values that the target wrote, so it has no prompt to read and
# no cache of its own. Its drafts are staged in the very slots that the target's next pass writes
# before it reads them; none of them is ever committed. Zhang et al. 2023, "Draft & Verify"; Tiwari
# et al. 2025, "QuantSpec". Self-speculation loses where a draft pass costs nearly what the target's
# costs: small models that fit a CPU cache, and passes spent in attention over a long text.
class SelfDrafter:
    """A drafter with `model`, whose `state` is the target's own. Otherwise it drafts like a draft
    model (draft_model.py): the same draws, the same distributions reported. With `fused` drafts are
    made in one call where possible.

    `name` is its name in traces: quantised-self or layer-skip.

    Drafts need a target that has read all of a text but its pending token, which the engine ensures
    (`shares_memory`). Pages are reserved as the target's own are, and are those that verifying the
    draft needs. When `propose` returns or raises, all drafted tokens are dead space.
    """

    needs = DraftNeeds(shares_memory=True)

    def __init__(
        self,
        model: CausalLM,
        sampler: DraftSampler,
        *,
        name: str,
        fused: FusedDrafts | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.name, self.model, self.sampler, self.notes = name, model, sampler, notes
        # It never has text to read, so the chunk does not matter.
        self._drafts = ModelDrafter(model, sampler, chunk=1, fused=fused, borrows=True)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._drafts.open(seq_id, prompt)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        length = self.model.state.length
        ready = [row for row in rows if length(row.seq_id) == len(row.tokens) - 1]
        try:
            drafted = self._drafts.propose(ready)
        finally:
            self._forget(ready)
        drafts = {row.seq_id: draft for row, draft in zip(ready, drafted, strict=True)}
        return [drafts.get(row.seq_id, Draft.empty()) for row in rows]

    def close(self, seq_id: int) -> None:
        self._drafts.close(seq_id)

    def _forget(self, rows: Sequence[DraftRow]) -> None:
        """Unstage everything, so that the target's pass begins after its text."""
        self.model.state.commit({row.seq_id: () for row in rows})
        for row in rows:
            self._drafts.note(row.seq_id, ())


# If a copy's passes read a larger share of the target's bytes, a note says that it gains little.
_LITTLE_GAIN = 0.6


def gain_notes(target: CausalLM, copy: LlamaModel) -> tuple[str, ...]:
    """Return notes on a copy in fewer bits before it drafts: its largest possible gain, if that is
    little. A text of n tokens takes at least n passes of the copy."""
    if not isinstance(target, LlamaModel) or target.config.sparse_layers:
        return ()
    read = [sum(part.nbytes for part in model.streamed) for model in (copy, target)]
    share = read[0] / read[1]
    if share <= _LITTLE_GAIN:
        return ()
    most = (
        "cannot make a text faster"
        if share >= 1
        else f"make a text at most {1 / share:.1f} times as fast, even if all of them are accepted"
    )
    return (
        f"a pass of the copy that drafts reads {100 * share:.0f} % of the bytes of a pass of the "
        f"target: its drafts {most}",
    )


# If the settings name no layers, one in so many is left out.
SKIP_ONE_IN = 4
_RANGE = re.compile(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SelfDraftSpec:
    """A target's copy that drafts for it: `quantise` is none, int8 or int4; `skipped` are the
    layers that it leaves out. `folder` is the target's checkpoint.

    A quantised copy reads the checkpoint once more and stores its matrices as integers; norms,
    biases, positions and the embedding are unchanged. A copy with fewer layers stores nothing of
    its own but buffers.
    """

    folder: Path
    quantise: str = "none"
    skipped: tuple[int, ...] = ()
    force_reference: bool = False
    threads: int = 0

    def of(self, target: CausalLM) -> LlamaModel:
        """Load the copy over the memory of `target`. Raises ConfigError for a target that cannot be
        copied, CheckpointError if its files changed."""
        if not isinstance(target, LlamaModel):
            raise ConfigError(
                "this target cannot draft for itself: only Outrider's own decoders of the Llama "
                "family can, in one process.",
                hint=f"choose another --drafter, or a target of: {', '.join(LLAMA_FAMILIES)}",
            )
        depths = [d for d in range(target.config.num_layers) if d not in self.skipped]
        parts = _fewer_layers if self.quantise == "none" else self._quantised
        made = target.cheaper(parts(target, depths))
        step = partial(made.step, needs=DraftNeeds())
        compile_ahead(made.kernels, made.spec.vocab_size, made.state, lambda row: step([row]))
        return made

    def _quantised(self, target: LlamaModel, depths: Sequence[int]) -> CheaperParts:
        config, states = target.config, target.state.hidden_SKD
        kernels = choose(
            device=states.device,
            dtype=states.dtype,
            force_reference=self.force_reference,
            threads=self.threads,
            quantise=self.quantise,
        )
        kernels = for_kinds(kernels) if config.attends_otherwise else kernels
        placement = Placement(target.spec.name, states.dtype, states.device, self.quantise)
        own = target.layers
        held = _HeldBlocks.of(target)
        if held is not None:
            layers = [
                held.again(layer, kernels) if depth in depths else layer
                for depth, layer in enumerate(own)
            ]
            return CheaperParts(kernels, held.head(kernels), layers, depths)
        with Weights.at(self.folder) as weights:
            reader = WeightReader(weights, kernels, placement, text=TextNames.of(weights))
            return CheaperParts(
                kernels=kernels,
                head=reader.head(target.tables.embedding, tied=config.tie_word_embeddings),
                layers=[
                    target.read_layer(reader, depth) if depth in depths else own[depth]
                    for depth in range(config.num_layers)
                ],
                depths=depths,
            )


@dataclass(frozen=True, slots=True)
class _HeldBlocks:
    """The matrices of a target that are blocks of a file, as `table` reads them: natively, and from
    memory. Matrices of the same `call` are such blocks."""

    target: LlamaModel
    table: Callable[[PackedLinear, torch.dtype], PackedTable]
    call: int

    @classmethod
    def of(cls, target: LlamaModel) -> _HeldBlocks | None:
        """Return the blocks; None unless all matrices are blocks."""
        embedding, table = target.tables.embedding, target.kernels.table
        if table is None or not isinstance(embedding, PackedTable):
            return None
        found = cls(target, table, embedding.packed.call)
        dense = [_dense(layer) for layer in target.layers]
        every = [target.tables.head, *(one for packed in dense if packed for one in packed)]
        whole = all(dense) and all(one.call == found.call for one in every)
        return found if whole else None

    def again(self, layer: LayerWeights, kernels: Kernels) -> LayerWeights:
        """Return `layer` with matrices that `kernels` pack."""
        dense = given(_dense(layer), "dense layer")
        qkv, out, gate_up, down = (kernels.pack(self._floats(one)) for one in dense)
        return replace(layer, qkv=qkv, out=out, gate_up=gate_up, down=down)

    def head(self, kernels: Kernels) -> PackedLinear:
        """Return the output head: the target's own, already small, if `kernels` run on blocks."""
        head = self.target.tables.head
        return kernels.pack(self._floats(head)) if kernels.table is None else head

    def _floats(self, packed: PackedLinear) -> Tensor:
        return self.table(packed, self.target.state.hidden_SKD.dtype).floats()


def _dense(layer: LayerWeights) -> tuple[PackedLinear, ...] | None:
    """Return the four matrices of a layer; None for a mixture and for latent attention."""
    matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
    found = tuple(one for one in matrices if one is not None)
    has_others = layer.latent or layer.inputs or layer.norms
    return found if len(found) == len(matrices) and not has_others else None


def _fewer_layers(target: LlamaModel, depths: Sequence[int]) -> CheaperParts:
    if target.kernels.twin is None:
        raise ConfigError(
            "drafter 'layer-skip': these kernels serve one model at a time.",
            hint="choose another --drafter",
        )
    return CheaperParts(target.kernels.twin(), target.tables.head, target.layers, depths)


def skipped_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers that `text` names, as in "2,5-7"; if it names none, some of the middle.

    Raises ConfigError if it names no layer of `num_layers`, or leaves none.

    Without named layers, the skipped ones are spread over the middle, since first and last layers
    change the residual most. (Zhang et al. 2023 search for the best set; `outrider bench drafters`
    compares named ones.)
    """
    if not text.strip():
        return tuple(range(SKIP_ONE_IN // 2, num_layers - 1, SKIP_ONE_IN))
    named: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < num_layers:
            raise ConfigError(
                f"skip_layers: {part.strip()!r} names no layers of a model that has layers 0 to "
                f"{num_layers - 1}.",
                hint="name some as in --skip-layers 2,5-7",
            )
        named |= set(range(first, last + 1))
    if len(named) == num_layers:
        raise ConfigError(
            f"skip_layers={text!r} leaves none of {num_layers} layers.",
            hint="leave out fewer of them",
        )
    return tuple(sorted(named))


def own_copy(
    config: EngineConfig, kind: DrafterKind, folder: Path, target: DecoderConfig
) -> SelfDraftSpec:
    """Return the copy of the target in `folder` that a drafter of this `kind` requires.

    Raises ConfigError for a target that cannot draft for itself, or layers that it lacks.
    """
    if not isinstance(target, LlamaConfig):
        raise ConfigError(
            f"drafter {kind.name!r}: a model of type {target.family} cannot draft for itself.",
            hint=f"choose another --drafter, or a target of: {', '.join(LLAMA_FAMILIES)}",
        )
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"drafter {kind.name!r}: a target shared by processes cannot draft for itself.",
            hint="leave --tensor-parallel at 1, or choose another --drafter",
        )
    skipped: tuple[int, ...] = ()
    if not kind.fewer_bits or config.skip_layers:
        skipped = skipped_layers(config.skip_layers, target.num_layers)
    return SelfDraftSpec(
        folder=folder,
        quantise=config.self_quantise if kind.fewer_bits else "none",
        skipped=skipped,
        force_reference=config.force_reference,
        threads=config.threads,
    )


def self_drafter(
    own: SelfDraftSpec | None,
    target: CausalLM,
    sampler: DraftSampler,
    *,
    name: str,
    batch_size: int,
) -> SelfDrafter:
    """Build the drafter `name` of the copy `own`, loaded over the memory of `target`. Raises
    ConfigError if the target has no checkpoint."""
    if own is None:
        raise ConfigError(
            f"drafter {name!r} needs the target's checkpoint, and there is none.",
            hint="load the target from a folder, or choose another --drafter",
        )
    model = own.of(target)
    sampler = replace(sampler, argmax=model.kernels.argmax, sampling=model.kernels.sampling)
    fused = fused_model_drafts(model, sampler, batch_size=batch_size)
    notes = () if own.quantise == "none" else gain_notes(target, model)
    return SelfDrafter(model, sampler, name=name, fused=fused, notes=notes)


# Decision whether drafter auto copies the target in fewer bits.
#
# A copy needs no file, only memory and a moment at loading. It is made if a pass of the target is
# bound by reading floats from memory: on CPUs with native kernels, of a dense decoder that no cache
# holds, in one process. Sizes decide, and the goodput controller stops drafting that does not pay.
#
# If caches hold much of the weights, or reading them takes no time, a copy gains little.
_LEAST_BYTES = 128 << 20
_TIMES_CACHE = 2
# Weights that a core quantises in some seconds; a copy of more must be requested by name.
_WEIGHTS_A_CORE = 300_000_000
# The most of the target's bytes with which a copy pays: a share of 0.6 gains 14 %, 0.5 gains 27 %.
_MOST_OF_TARGET = 0.6


def why_no_copy(folder: Path, target: DecoderConfig, config: EngineConfig) -> str:
    """Reason for which drafter auto makes no copy of the target in `folder` in fewer bits, in words
    that follow "a copy in 4 bits"; "" if it makes one."""
    if not (_is_left_to_us(config) and isinstance(target, LlamaConfig)):
        return "is made for targets of the Llama family alone, with settings left at auto"
    if target.sparse_layers:
        return "is not made of mixtures of experts"
    checkpoint = open_checkpoint(folder)
    if checkpoint.is_gguf or scheme_in(checkpoint) is not None:
        return "would gain little, since the weights are quantised already"
    dtype = DTYPES.get(target.dtype if config.dtype == AUTO else config.dtype, torch.float32)
    spec = target.spec("target", bytes_per_weight=dtype.itemsize, bytes_per_kv=dtype.itemsize)
    device = pick_device(config.device)
    if device.type != "cpu" or not is_native(device, dtype, config.force_reference):
        return "needs the native kernels of CPUs"
    return _why_no_gain(spec, config.self_quantise)


def _why_no_gain(spec: ModelSpec, bits: str) -> str:
    """Reason by sizes."""
    if spec.weight_bytes < max(_LEAST_BYTES, _TIMES_CACHE * last_cache_bytes()):
        return "would gain little, since caches hold the weights"
    if spec.num_parameters > _WEIGHTS_A_CORE * num_physical_cores():
        return "would take long to make; --drafter quantised-self makes it"
    if not copy_pays(spec, bits):
        return f"would read more than {_MOST_OF_TARGET:.0%} of the target's bytes in a pass"
    return ""


def _is_left_to_us(config: EngineConfig) -> bool:
    """True if no drafter, no ever-drafting controller and no other precision is named."""
    return (
        config.drafter == AUTO
        and config.controller in (AUTO, "goodput")
        and config.most_k > 0
        and config.tensor_parallel == 1
        and config.drafter_home == "thread"
        and config.quantise == "none"
    )


def copy_pays(target: ModelSpec, bits: str) -> bool:
    """True if a pass of a copy in so many `bits` reads few bytes compared with the target's."""
    copied = replace(target, quantise=bits)
    return copied.weight_bytes <= _MOST_OF_TARGET * target.weight_bytes
