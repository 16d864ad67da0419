"""Synthetic acceptance: a model does its work, a script says the words; random-weight Llamas.

A `WordScript` is a hash of the last tokens. The target's script says one token after every context;
the draft's says the same token in a share alpha of all contexts, and another elsewhere. So

    P(n of K kept) = alpha^n (1 - alpha) for n < K,    alpha^K for n = K.

Rates may differ by the place of a draft. Distributions are as good as point masses, so greedy and
sampled text are the same: a pure function of the target's seed and the prompt.

Shapes:  M = packed logits rows, V = vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.core.files import new_folder
from outrider.core.protocols import CacheStore, CausalLM, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.models.llama_weights import EMBEDDING
from outrider.models.weights import HEAD
from outrider.plugins.lanes.ahead.fan_out import PRIOR_CURVE, MissCurve
from outrider_lab.models.gemm import GemmShape
from outrider_lab.models.inflate import NORM, meaningless
from outrider_lab.models.inflate_files import llama_json, write_json, write_shards
from outrider_lab.models.scripted import TokenMemory


def write_random(folder: Path, shape: GemmShape, dtype: torch.dtype, *, max_tokens: int) -> None:
    """One file for the tables and one a layer; config.json comes last, so half a folder is never
    taken for a model. Raises ConfigError if there is something in the folder already.

    The folder is an ordinary checkpoint without a tokenizer, so it loads as any does, in one
    process or shared among ranks.
    """
    with new_folder(folder) as files:
        shards = (
            {name: _made(name, size, dtype) for name, size in sizes.items()}
            for sizes in _shards(shape)
        )
        for _ in write_shards(folder, shards, shape.num_layers + 1, files):
            pass
        own = {"max_tokens": max_tokens, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
        config = replace(shape.config(), **own)
        files.append(folder / "config.json")
        write_json(files[-1], llama_json(config, dtype))


def _made(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones(size, dtype=dtype) if len(size) == 1 else meaningless(name, size, dtype)


def _shards(shape: GemmShape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Sizes of tensors by name, a file after the other."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    attended, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    table = (shape.vocab_size, hidden)
    yield {EMBEDDING: table, HEAD: table, NORM: (hidden,)}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}."
        yield {
            f"{layer}self_attn.q_proj.weight": (attended, hidden),
            f"{layer}self_attn.k_proj.weight": (kv, hidden),
            f"{layer}self_attn.v_proj.weight": (kv, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, attended),
            f"{layer}mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}mlp.up_proj.weight": (ffn, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, ffn),
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
        }


# Ranks that stand out; a token beyond is as unlikely as any.
NUM_RANKS = 64
# Logits of the token that is said and of those that rank after it; of all others they are 0.
_LEVELS = (100.0, *(40.0 - 0.1 * rank for rank in range(NUM_RANKS)))
_FOUR = struct.Struct("<4Q")
# Tokens that a word depends on. Shorter contexts come again, and texts would run in circles.
_ORDER = 8
_ALL_SLOTS = 1 << 62
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a draft agrees with its target: entry j of `rates` is of the draft's place j + 1, the
    last one of all later places. `misses` is the distribution of ranks."""

    rates: tuple[float, ...]
    misses: MissCurve = PRIOR_CURVE

    def __post_init__(self) -> None:
        if not self.rates:
            raise ContractError("there is one rate or more")
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise ContractError("rates lie between 0 and 1")

    def rate(self, place: int) -> float:
        """Of a place from 0."""
        return self.rates[min(place, len(self.rates) - 1)]

    def rank(self, coin: float) -> int:
        """The rank, from 1, of a coin in [0, 1): the least F with P(R > F) <= coin, NUM_RANKS + 1
        if it is above NUM_RANKS."""
        return 1 + bisect_left(range(1, NUM_RANKS + 1), -coin, key=lambda f: -self.misses(f))


@dataclass(frozen=True, slots=True, kw_only=True)
class WordScript:
    """What is said after a context. Without an `agreement` it is the target's own word.

    Where draft and target disagree, the target's token stands at rank R of what the draft finds
    likely, with P(R > F) = min(1, scale F^-power), the distribution of misses of drafting ahead
    (`MissCurve`); so F foreseen tokens hold it as often as theory says. The next token below
    has e^-60 of the weight at temperature 1.
    """

    vocab_size: int
    seed: int = 0
    agreement: Agreement | None = None

    def ids(self, context: Sequence[int], place: int) -> list[int]:
        """What is said at `place` of a draft, and then what else is likely, in order."""
        word, agree, wrong, rank = self._numbers(context)
        true, size = word % self.vocab_size, self.vocab_size
        if self.agreement is None or agree * 2.0**-64 < self.agreement.rate(place):
            return [true]
        first, count = wrong % (size - 1), min(NUM_RANKS + 1, size - 1)
        others = [(true + 1 + (first + i) % (size - 1)) % size for i in range(count)]
        place_of_true = self.agreement.rank((rank >> 11) * 2.0**-53)
        if place_of_true < count:
            others.insert(place_of_true, true)
            del others[NUM_RANKS + 1 :]
        return others

    def _numbers(self, context: Sequence[int]) -> tuple[int, int, int, int]:
        """Four of 64 bits."""
        data = array("q", (self.seed, *context)).tobytes()
        return _FOUR.unpack(hashlib.blake2b(data, digest_size=_FOUR.size).digest())


def write_words(ids: Sequence[Sequence[int]], logits_MV: Tensor) -> None:
    """Write logits by which `ids` of each row are said and likely, in order, over all others."""
    rows = [row for row, found in enumerate(ids) for _ in found]
    columns = [token for found in ids for token in found]
    levels = [level for found in ids for level in _LEVELS[: len(found)]]
    if logits_MV.device.type == "cpu":
        # A draft pass takes less than a millisecond, of which calls of torch would be a part.
        host_MV = logits_MV.numpy()
        host_MV.fill(0)
        host_MV[rows, columns] = levels
        return
    with torch.inference_mode():
        logits_MV.zero_()
        places = torch.tensor([rows, columns], device=logits_MV.device)
        logits_MV[places[0], places[1]] = torch.tensor(levels).to(logits_MV)


class SyntheticMemory:
    """StateStore that is the inner model's, and remembers tokens and places of drafts besides.

    What is read first after a commit ends with place 0, or, where logits are wanted after several
    of its tokens, has places from the first of these on: a draft that is read at once, a trunk.
    A token below a trunk follows a foreseen verdict and has place 0; one below another token has
    the place after that one's.
    """

    def __init__(self, inner: CacheStore) -> None:
        self.inner = inner
        self._tokens = TokenMemory(_ALL_SLOTS)
        self._places: dict[int, list[int]] = {}
        self._trunks: dict[int, int] = {}

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        reused = self.inner.open(seq_id, tokens, salt)
        self._tokens.open(seq_id, tokens)
        if reused:
            self._tokens.stage([StepRow.chain(seq_id, tokens[:reused])])
            self._tokens.commit({seq_id: range(reused)})
        self._places[seq_id] = []
        return reused

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        self.inner.fork(source, new, length)
        self._tokens.fork(source, new, length)
        self._places[new] = []

    def length(self, seq_id: int) -> int:
        return self.inner.length(seq_id)

    def num_staged(self, seq_id: int) -> int:
        return self.inner.num_staged(seq_id)

    def reserve(self, counts: Mapping[int, int]) -> None:
        self.inner.reserve(counts)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        num_copied = self.inner.commit(paths)
        self._tokens.commit(paths)
        for seq_id in paths:
            self._places[seq_id] = []
        return num_copied

    def close(self, seq_id: int) -> None:
        self.inner.close(seq_id)
        self._tokens.close(seq_id)
        del self._places[seq_id]

    @property
    def num_free_tokens(self) -> int:
        return self.inner.num_free_tokens

    def note(self, rows: Sequence[StepRow]) -> None:
        """Say that the inner model has staged `rows`."""
        self._tokens.stage(rows)
        for row in rows:
            places = self._places[row.seq_id]
            if places:
                trunk = self._trunks[row.seq_id]
                for parent in row.parents:
                    places.append(0 if parent < trunk else places[parent] + 1)
            else:
                self._trunks[row.seq_id] = len(row.tokens) if row.num_logits > 1 else 0
                places += [max(node - row.logits_from, 0) for node in range(len(row.tokens))]

    def context(self, seq_id: int, node: int) -> tuple[int, ...]:
        """The last tokens that a staged node sees, its own the last."""
        return self._tokens.context(seq_id, node, _ORDER)

    def place(self, seq_id: int, node: int) -> int:
        """How many tokens of a draft stand before what follows a staged node."""
        return self._places[seq_id][node]


class SyntheticLM:
    """CausalLM that does the work of `inner` and says what `script` says.

    It keeps no hidden states. `device` is where the inner model leaves its logits.
    """

    def __init__(self, inner: CausalLM, script: WordScript, *, device: torch.device = _CPU) -> None:
        if inner.spec.vocab_size != script.vocab_size:
            raise ContractError("model and script have different vocabularies")
        self.inner, self.script = inner, script
        self._device = device
        self._memory = SyntheticMemory(inner.state)

    @property
    def spec(self) -> ModelSpec:
        return self.inner.spec

    @property
    def state(self) -> SyntheticMemory:
        return self._memory

    def beside(self, twin: CausalLM) -> SyntheticLM:
        """The same over `twin`, which shares the inner model's memory."""
        other = copy(self)
        other.inner = twin
        return other

    def without_cost(self) -> SyntheticLM:
        """One that says the same and does no work, with a memory of its own."""
        return SyntheticLM(_Idle(self.spec, self._device), self.script, device=self._device)

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        first = [self._memory.num_staged(row.seq_id) for row in rows]
        out = self.inner.step(rows, needs)
        self._memory.note(rows)
        memory, script = self._memory, self.script
        ids = [
            script.ids(memory.context(row.seq_id, node), memory.place(row.seq_id, node))
            for start, row in zip(first, rows, strict=True)
            for node in range(start + row.logits_from, start + len(row.tokens))
        ]
        if ids:
            write_words(ids, out.logits_MV)
        return out


class _Idle:
    """A model that remembers its tokens and does no work."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.spec, self.state = spec, TokenMemory(_ALL_SLOTS)
        self._device = device

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        del needs
        self.state.stage(rows)
        num_logits = sum(row.num_logits for row in rows)
        return StepOutput(torch.empty(num_logits, self.spec.vocab_size, device=self._device))
