"""Logits processors: bias, repetition, frequency and presence penalties, bans, masks of tokens.

Each row of a verify pass is processed with the history of its own draft node: the sequence's tokens
and the node's ancestors. So the distribution at a node is the one of plain decoding, and every
exact rule stays exact. Order: bias, repetition penalty (over prompt and text; Keskar et al. 2019,
arXiv 1909.05858), frequency and presence penalty (over the text alone), then masks, then bans. A
ban that would leave no token is not applied: bad words and early endings give way to the mask. A
mask that allows nothing ends the text, or counts for nothing where no token can end it.

Shapes:  N = nodes, V = vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ConfigError, ContractError
from outrider.core.params import SamplingParams

# Token constraints: the interface between a logits processor and its mask or grammar.
#
# A round requests the masks of all nodes of a draft at once. A constraint may therefore walk the
# draft as a tree, forward and back, and remember its position in the text from round to round.

# Given the text written so far (ids after the prompt): which ids may come next, as booleans of
# shape V; None allows all. It is called for drafted text too, so it must not depend on earlier
# calls.
AllowedTokens = Callable[[Sequence[int]], Tensor | None]


class TokenConstraint(Protocol):
    """The allowed next tokens after each text of one request. Answers depend on the text alone, not
    on earlier calls; between two calls the text grows by the committed tokens, and never shrinks.
    `knows_forced` says that `forced` costs next to nothing, so that it is called every round."""

    @property
    def knows_forced(self) -> bool: ...

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor | None:
        """Masks after `text` and then each suffix: booleans of shape NV, None allows all. A row
        without a true value says that the text is at its end."""
        ...

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` tokens that surely or almost surely follow `text`. They are a draft only:
        the masks after them may allow others."""
        ...

    def is_idle(self, text: Sequence[int]) -> bool:
        """True if all tokens are surely allowed in the round after `text`."""
        ...


class CallbackConstraint:
    """A TokenConstraint that calls a callback for each node."""

    knows_forced = False

    def __init__(self, allowed: AllowedTokens) -> None:
        self._allowed = allowed

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor | None:
        """Raises ConfigError if the callback returns no mask."""
        found = [_checked(self._allowed([*text, *suffix]), vocab_size) for suffix in suffixes]
        first = next((mask_V for mask_V in found if mask_V is not None), None)
        if first is None:
            return None
        all_V = torch.ones_like(first)
        return torch.stack([all_V if mask is None else mask.to(first.device) for mask in found])

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        """The following tokens while exactly one is allowed. Each costs a call of the mask."""
        found: list[int] = []
        while len(found) < most:
            mask_V = self._allowed([*text, *found])
            if mask_V is None or int(mask_V.sum()) != 1:
                break
            found.append(int(mask_V.nonzero()[0, 0]))
        return found

    def is_idle(self, text: Sequence[int]) -> bool:
        del text
        return False


def _checked(given: object, vocab_size: int) -> Tensor | None:
    """Check the result of a callback, which may be third-party code."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or (tuple(given.shape), given.dtype) != (
        (vocab_size,),
        torch.bool,
    ):
        raise ConfigError(
            f"an allowed-token mask must be a tensor of {vocab_size} booleans, got "
            f"{_described(given)}."
        )
    if given.is_meta or given.layout is not torch.strided:
        raise ConfigError("an allowed-token mask must hold its booleans: no meta, no sparse.")
    return given


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"


_BANNED = float("-inf")
# Floating-point numbers of this size or more are numpy's as well.
_NUMPY_BYTES = 4
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


@dataclass(slots=True)
class LogitsProcessor:
    """The logits processor of one request. `bad_words` are token sequences; `stop_ids` are banned
    until `params.min_tokens`. Counts of the text so far persist between calls, and only grow.
    `constraint` masks the vocabulary; `allowed` is a callback for the same purpose. `mask_seconds`
    is the time of either since it was last set to 0."""

    params: SamplingParams
    prompt_length: int
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: AllowedTokens | None = None
    clock: Clock = HOST_CLOCK
    mask_seconds: float = 0.0
    constraint: TokenConstraint | None = None
    _counts: _TokenCounts | None = field(default=None)
    _sparse: SparseShaping | None = field(default=None)

    def __post_init__(self) -> None:
        if self.constraint is None and self.allowed is not None:
            self.constraint = CallbackConstraint(self.allowed)

    @property
    def active(self) -> bool:
        """True if it may change logits at all."""
        return self.params.shapes_logits or self.constraint is not None

    def shape(
        self, logits_NV: Tensor, tokens: Sequence[int], suffixes: Sequence[Sequence[int]]
    ) -> Tensor:
        """New logits for nodes with the histories `tokens` + suffix.

        `tokens` starts with the prompt and may only have grown since the call before.
        """
        shaped_NV = logits_NV.clone()
        self.shape_in_place(shaped_NV, tokens, suffixes)
        return shaped_NV

    def shape_in_place(
        self, shaped_NV: Tensor, tokens: Sequence[int], suffixes: Sequence[Sequence[int]]
    ) -> None:
        """Change the logits in place, as `shape` does."""
        if len(suffixes) != shaped_NV.shape[0]:
            raise ValueError(f"{len(suffixes)} histories for {shaped_NV.shape[0]} rows")
        self._add_bias(shaped_NV)
        self._penalise(shaped_NV, tokens, suffixes)
        if self.constraint is not None:
            size = shaped_NV.shape[1]
            self._mask(shaped_NV, self._masks(self.constraint, tokens, suffixes, size))
        if self._may_ban(len(tokens)):
            written = tokens[self.prompt_length :]
            for node, suffix in enumerate(suffixes):
                self._ban(shaped_NV[node], [*written, *suffix])

    def sparse(self, tokens: Sequence[int]) -> SparseShaping | None:
        """The changes of `shape` after `tokens` and any suffix, as lists; None if a mask or a ban
        may apply. `tokens` may only have grown since the call before."""
        masks = self.constraint
        if masks is not None and not masks.is_idle(tokens[self.prompt_length :]):
            return None
        return None if self._may_ban(len(tokens)) else self.lists(tokens)

    def lists(self, tokens: Sequence[int]) -> SparseShaping:
        """The bias and penalties of `shape` after `tokens` and any suffix, without masks and bans.
        `tokens` may only have grown since the call before."""
        if self._sparse is None:
            self._sparse = SparseShaping(self.params, self.prompt_length)
        self._sparse.catch_up(tokens)
        return self._sparse

    def limits(
        self, tokens: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> NodeLimits | None:
        """The masks and bans of `shape` for nodes with the histories `tokens` + suffix; None if no
        token is masked or banned."""
        text, constraint = tokens[self.prompt_length :], self.constraint
        allowed_NV = None
        if constraint is not None and not constraint.is_idle(text):
            allowed_NV = self._masks(constraint, tokens, suffixes, vocab_size)
        may_ban = self._may_ban(len(tokens))
        bans = [self._banned([*text, *suffix]) if may_ban else [] for suffix in suffixes]
        if allowed_NV is None and not any(bans):
            return None
        if allowed_NV is not None:
            allowed_NV = allowed_NV.to(device="cpu").contiguous()
            if allowed_NV.dtype != torch.bool or allowed_NV.shape != (len(bans), vocab_size):
                raise ContractError("a mask has not one boolean for each token after each node")
        starts = accumulate(map(len, bans), initial=0)
        banned = array("i", (token for found in bans for token in found))
        return NodeLimits(allowed_NV, array("i", self.stop_ids), banned, array("i", starts))

    def forced(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` tokens that, by the mask, surely or almost surely follow `tokens`."""
        if self.constraint is None:
            return ()
        began = self.clock()
        try:
            return self.constraint.forced(tokens[self.prompt_length :], most)
        finally:
            self.mask_seconds += self.clock() - began

    def _may_ban(self, num_tokens: int) -> bool:
        early = num_tokens - self.prompt_length < self.params.min_tokens
        return early or bool(self.bad_words)

    def _add_bias(self, shaped_NV: Tensor) -> None:
        bias = self.params.logit_bias
        if bias:
            ids = torch.tensor(list(bias), device=shaped_NV.device)
            values = torch.tensor(list(bias.values()), dtype=shaped_NV.dtype)
            shaped_NV[:, ids] += values.to(shaped_NV.device)

    def _penalise(
        self, shaped_NV: Tensor, tokens: Sequence[int], suffixes: Sequence[Sequence[int]]
    ) -> None:
        params = self.params
        if params.repetition_penalty == 1 and not (
            params.presence_penalty or params.frequency_penalty
        ):
            return
        if self._counts is None:
            self._counts = _TokenCounts(self.prompt_length, shaped_NV[0])
        text_NV, seen_NV = self._counts.of(tokens, suffixes)
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            pushed_NV = torch.where(shaped_NV > 0, shaped_NV / factor, shaped_NV * factor)
            shaped_NV.copy_(torch.where(seen_NV, pushed_NV, shaped_NV))
        shaped_NV -= params.frequency_penalty * text_NV
        shaped_NV -= params.presence_penalty * (text_NV > 0).to(text_NV.dtype)

    def _banned(self, text: Sequence[int]) -> list[int]:
        banned = [word[-1] for word in self.bad_words if _ends_with(text, word[:-1])]
        return banned + [*self.stop_ids] * (len(text) < self.params.min_tokens)

    def _ban(self, shaped_V: Tensor, text: Sequence[int]) -> None:
        banned = self._banned(text)
        if not banned:
            return
        rest_V = shaped_V.clone()
        rest_V[banned] = _BANNED
        if bool((rest_V > _BANNED).any()):
            shaped_V.copy_(rest_V)

    def _masks(
        self,
        constraint: TokenConstraint,
        tokens: Sequence[int],
        suffixes: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> Tensor | None:
        began = self.clock()
        try:
            return constraint.masks(tokens[self.prompt_length :], suffixes, vocab_size)
        finally:
            self.mask_seconds += self.clock() - began

    def _mask(self, shaped_NV: Tensor, masks_NV: Tensor | None) -> None:
        if masks_NV is None:
            return
        masks_NV = masks_NV.to(shaped_NV.device)
        if shaped_NV.is_cpu and shaped_NV.dtype.itemsize >= _NUMPY_BYTES:
            # PyTorch would wake its own threads for each of these, next to those of the kernels.
            self._mask_on_host(shaped_NV.numpy(), masks_NV.numpy())
            return
        ended_N = ~(masks_NV & (shaped_NV > _BANNED)).any(-1)
        if bool(ended_N.any()):
            instead_V = torch.as_tensor(self._ends(shaped_NV.shape[1]), device=shaped_NV.device)
            masks_NV = torch.where(ended_N[:, None], instead_V, masks_NV)
        shaped_NV.masked_fill_(~masks_NV, _BANNED)

    def _mask_on_host(self, shaped_NV: Floats, masks_NV: Bools) -> None:
        for shaped_V, mask_V in zip(shaped_NV, masks_NV, strict=True):
            allowed = np.fmax.reduce(shaped_V, where=mask_V, initial=_BANNED) > _BANNED
            np.copyto(shaped_V, _BANNED, where=~(mask_V if allowed else self._ends(len(mask_V))))

    def _ends(self, vocab_size: int) -> Bools:
        """Allowed tokens at the end of a text: the end tokens, or any token if there are none."""
        ends_V = np.full(vocab_size, not self.stop_ids)
        ends_V[list(self.stop_ids)] = True
        return ends_V


class NodeLimits(NamedTuple):
    """The tokens that masks and bans of one request allow after each node of a draft: `allowed_NV`,
    None for all; `ends` where that has none, which are all if there are no `ends`; and of them not
    `banned[starts[i] : starts[i + 1]]` after node i, unless no other token is left."""

    allowed_NV: Tensor | None
    ends: array[int]
    banned: array[int]
    starts: array[int]


class SparseShaping:
    """Bias and penalties of one request by token id: `bias_ids`, and `seen_ids`, the ids in prompt
    or text, each once, with their counts in the text."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        bias = params.logit_bias or {}
        self.bias_ids, self.biases = array("i", bias), array("f", bias.values())
        self.repetition = params.repetition_penalty
        self.frequency, self.presence = params.frequency_penalty, params.presence_penalty
        self.seen_ids, self.counts = array("i"), array("f")
        self._prompt_length, self._index_of = prompt_length, dict[int, int]()
        self._num_counted = 0

    def catch_up(self, tokens: Sequence[int]) -> None:
        for position in range(self._num_counted, len(tokens)):
            token = tokens[position]
            if token not in self._index_of:
                self._index_of[token] = len(self.seen_ids)
                self.seen_ids.append(token)
                self.counts.append(0)
            self.counts[self._index_of[token]] += position >= self._prompt_length
        self._num_counted = len(tokens)


class _TokenCounts:
    """Counts of each id in the text, and flags of ids in prompt or text."""

    def __init__(self, prompt_length: int, like_V: Tensor) -> None:
        self._prompt_length = prompt_length
        self._text_V = torch.zeros_like(like_V)
        self._seen_V = torch.zeros_like(like_V, dtype=torch.bool)
        self._num_counted = 0

    def of(self, tokens: Sequence[int], suffixes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(text_NV, seen_NV) of the histories `tokens` + suffix."""
        self._catch_up(tokens)
        text_NV = self._text_V.repeat(len(suffixes), 1)
        seen_NV = self._seen_V.repeat(len(suffixes), 1)
        nodes = [node for node, suffix in enumerate(suffixes) for _ in suffix]
        if nodes:
            device = text_NV.device
            ids = torch.tensor([t for suffix in suffixes for t in suffix], device=device)
            where = (torch.tensor(nodes, device=device), ids)
            ones = torch.ones(len(nodes), dtype=text_NV.dtype, device=device)
            text_NV.index_put_(where, ones, accumulate=True)
            seen_NV[where] = True
        return text_NV, seen_NV

    def _catch_up(self, tokens: Sequence[int]) -> None:
        if len(tokens) < self._num_counted:
            raise ValueError("the text has become shorter than it was")
        new = torch.tensor(tokens[self._num_counted :], dtype=torch.int64)
        new = new.to(self._text_V.device)
        self._seen_V[new] = True
        text = new[max(self._prompt_length - self._num_counted, 0) :]
        self._text_V.index_add_(0, text, torch.ones_like(text, dtype=self._text_V.dtype))
        self._num_counted = len(tokens)


def _ends_with(text: Sequence[int], head: Sequence[int]) -> bool:
    return len(text) >= len(head) and list(text[len(text) - len(head) :]) == list(head)


def suffixes_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The drafted text before each distribution of a draft: () at the root, then each path."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


# Deepest possible draft (`k` of core/settings.py is at most 64).
_DEEPEST = 128


# Thinking budget: a constraint that ends a model's thoughts after so many tokens.
#
# Tokens alone decide, so that each node of a draft has the mask of its own text: where the thoughts
# have reached the limit, the mask allows the next token of `closing` and no other.
class ThoughtTags(NamedTuple):
    """Delimiters of thoughts. `begin` opens an answer, after blanks at most, unless it may open
    thoughts `anywhere`; any of `ends` ends them."""

    begin: bytes
    ends: tuple[bytes, ...]
    anywhere: bool = False


class _Position(NamedTuple):
    """The state after some tokens: `num` of them are thoughts, and the last `begun` may be the
    beginning of an end. `closed` of the closing sequence are written (-1: a grammar did not allow
    it), `held` may be a part of a delimiter, and `cut` says that the limit ended thoughts."""

    phase: Literal["before", "within", "after"]
    num: int = 0
    begun: int = 0
    closed: int = 0
    held: bytes = b""
    cut: bool = False


class ThoughtBudget:
    """A TokenConstraint of one request: after `limit` tokens of thoughts come those of `closing`.
    `piece` gives a token's bytes, `begun` says that the prompt has opened the thoughts, and `inner`
    masks the rest of the text: a token that it refuses is not forced. Without a limit it only
    counts."""

    knows_forced = True

    def __init__(
        self,
        tags: ThoughtTags,
        piece: Callable[[int], bytes],
        *,
        begun: bool,
        limit: int | None = None,
        closing: Sequence[int] = (),
        inner: TokenConstraint | None = None,
    ) -> None:
        self._tags, self._piece, self._closing, self._inner = tags, piece, closing, inner
        self._limit = limit if closing else None
        self._longest = max(map(len, (tags.begin, *tags.ends)))
        self._start = _Position("within" if begun else "before")
        # The position after so many tokens, of which these are the last.
        self._at, self._num, self._last = self._start, 0, list[int]()

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor | None:
        found = None if self._inner is None else self._inner.masks(text, suffixes, vocab_size)
        at = self._after(text)
        if not self._is_near(at, max(map(len, suffixes), default=0)):
            return found
        known: dict[tuple[int, ...], _Position] = {(): at}
        for node, suffix in enumerate(map(tuple, suffixes)):
            for size in range(1, len(suffix) + 1):
                if suffix[:size] not in known:
                    known[suffix[:size]] = self._next(known[suffix[: size - 1]], suffix[size - 1])
            if (token := self._due(known[suffix])) is None:
                continue
            if found is None:
                found = torch.ones((len(suffixes), vocab_size), dtype=torch.bool)
            if bool(found[node, token]):
                found[node] = False
                found[node, token] = True
        return found

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        at = self._after(text)
        if self._due(at) is not None:
            return self._closing[at.closed :][:most]
        inner = self._inner
        return inner.forced(text, most) if inner is not None and inner.knows_forced else ()

    def is_idle(self, text: Sequence[int]) -> bool:
        idle = self._inner is None or self._inner.is_idle(text)
        return idle and not self._is_near(self._after(text), _DEEPEST)

    def count(self, text: Sequence[int]) -> tuple[int, bool | None]:
        """Tokens of thoughts in `text`, and whether the limit ended any; None without a limit."""
        at = self._after(text)
        return at.num, None if self._limit is None else at.cut

    def _after(self, text: Sequence[int]) -> _Position:
        """The position after `text`, found from that of the call before if its text is the
        beginning of this one. Texts of a request differ only in a draft, so no more is compared."""
        num, last = self._num, self._last
        if list(text[num - len(last) : num]) != last:
            self._at, num = self._start, 0
        for token in text[num:]:
            self._at = self._next(self._at, token)
        self._num = len(text)
        self._last = list(text[-_DEEPEST:])
        return self._at

    def _is_near(self, at: _Position, depth: int) -> bool:
        """True if a token within `depth` tokens may be forced."""
        return (
            self._limit is not None
            and at.phase != "after"
            and at.num + at.begun + depth >= self._limit
        )

    def _due(self, at: _Position) -> int | None:
        """The token that must come next, if one must."""
        if self._limit is None or at.phase != "within" or at.num < self._limit or at.closed < 0:
            return None
        return self._closing[at.closed]

    def _next(self, at: _Position, token: int) -> _Position:
        if at.phase == "after":
            return at
        if (due := self._due(at)) == token:
            if at.closed + 1 < len(self._closing):
                return at._replace(closed=at.closed + 1)
            num = at.num + at.begun
            return self._before(at._replace(num=num, begun=0, cut=True), b"")
        held = at.held + (piece := self._piece(token))
        if at.phase == "before":
            return self._before(at, held)
        ends = [held.find(end) + len(end) for end in self._tags.ends if end in held]
        if ends:
            return self._before(at._replace(begun=0), held[min(ends) :])
        size = max(num_begun(held, end) for end in self._tags.ends)
        goes_on = size > len(piece) and at.begun < self._longest
        return at._replace(
            num=at.num if goes_on else at.num + at.begun + (size == 0),
            begun=at.begun + 1 if goes_on else int(size > 0),
            closed=at.closed if due is None else -1,
            held=held[-self._longest :],
        )

    def _before(self, at: _Position, held: bytes) -> _Position:
        """The position with `held` as the text after the last thoughts, or after the prompt."""
        tags = self._tags
        held = held if tags.anywhere else held.lstrip()
        start = held.find(tags.begin) if tags.anywhere else 0
        if start >= 0 and held.startswith(tags.begin, start):
            held = held[start + len(tags.begin) :]
            return at._replace(phase="within", closed=0, held=held)
        goes_on = tags.anywhere or tags.begin.startswith(held)
        held = held[-self._longest :]
        return at._replace(phase="before" if goes_on else "after", closed=0, held=held)


def num_begun(text: bytes, end: bytes) -> int:
    """Bytes of the longest end of `text` that `end` begins with."""
    sizes = range(min(len(text), len(end)), 0, -1)
    return next((size for size in sizes if text.endswith(end[:size])), 0)
