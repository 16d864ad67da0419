# pyright: basic, reportGeneralTypeIssues=false
"""Triton kernels of acceptance on chains (token and block rule) and of draws: rounds/verdicts.py.

Four steps, each a kernel: the ratio p / q of every drafted token; for the block rule, the part of
the target's distribution that the draft does not cover after each prefix; the number of accepted
tokens; the next token, drawn from the rest. Random numbers are made in the kernels from the keys.
Comparisons are written so that NaN stays NaN where the definition keeps it: a minimum of a GPU
would drop it.

Shapes:  as flat pointers; B = chains, K = drafted tokens, W = K + 1; distributions of p are [B, W,
V], of q
         [B, K, V], sums of pieces [.., pieces].
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.core.rng import Role
from outrider.plugins.gpu.kernels.sampling import probability, read_distribution, uniform

_ACCEPT = tl.constexpr(int(Role.ACCEPT))
_NOWHERE = tl.constexpr(0x7FFFFFFF)
# A point mass of this size covers all of a distribution's mass on its token.
_COVER = tl.constexpr(2.0)


@triton.jit(do_not_specialize=["num_drafted"])
def ratio_kernel(
    tokens_ptr, lengths_ptr, p_ptr, p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr,
    q_ptr, q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, ratio_ptr,
    num_drafted, size, num_pieces,
    P_READY: tl.constexpr, Q_READY: tl.constexpr, POINT: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """p / q of drafted token i of chain b, float64; 0 where q is, or where no token is."""
    chain, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    drafted = place < tl.load(lengths_ptr + chain)
    at = chain * num_drafted + place
    token = tl.load(tokens_ptr + at).to(tl.int64)
    inside = drafted & (token >= 0) & (token < size)
    row = at + chain
    distribution = read_distribution(
        p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr, row, num_pieces,
        num_drafted + 1, P_READY, PIECES,
    )  # fmt: skip
    value = tl.load(p_ptr + row * size + token, mask=inside, other=0.0).to(tl.float32)
    p = probability(value, token, distribution, P_READY).to(tl.float64)
    q = tl.full((), 1.0, tl.float64)
    if not POINT:
        distribution = read_distribution(
            q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, at, num_pieces,
            num_drafted, Q_READY, PIECES,
        )  # fmt: skip
        value = tl.load(q_ptr + at * size + token, mask=inside, other=0.0).to(tl.float32)
        q = probability(value, token, distribution, Q_READY).to(tl.float64)
    ratio = tl.where(q > 0, p / tl.where(q > 0, q, 1.0), 0.0)
    tl.store(ratio_ptr + at, tl.where(inside, ratio, 0.0))


@triton.jit
def _times(share, ratio):
    """The share of one token more: at most 1."""
    share = share * ratio
    return tl.where(share > 1.0, 1.0, share)


@triton.jit
def _weights(
    index, mask, share, p_ptr, p_distribution, q_ptr, q_distribution, p_row, q_row, covered, token,
    size, P_READY: tl.constexpr, Q_READY: tl.constexpr, POINT: tl.constexpr
):  # fmt: skip
    """(max(share * p - q, 0), p) at `index`, float64; q is 0 unless `covered`."""
    value = tl.load(p_ptr + p_row * size + index, mask=mask, other=0.0).to(tl.float32)
    p = tl.where(mask, probability(value, index, p_distribution, P_READY), 0.0).to(tl.float64)
    if POINT:
        q = tl.where(index == token, _COVER, 0.0).to(tl.float64)
    else:
        value = tl.load(q_ptr + q_row * size + index, mask=mask & covered, other=0.0)
        q = probability(value.to(tl.float32), index, q_distribution, Q_READY).to(tl.float64)
    left = share * p - tl.where(mask & covered, q, 0.0)
    return tl.where(left < 0, 0.0, left), p


@triton.jit(do_not_specialize=["num_drafted"])
def uncovered_kernel(
    lengths_ptr, p_ptr, p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr,
    q_ptr, q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, ratio_ptr, left_ptr,
    num_drafted, size, num_pieces,
    P_READY: tl.constexpr, Q_READY: tl.constexpr, POINT: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """A piece of the sum of max(share * p - q, 0) after n tokens, for n of 1 to the length - 1."""
    chain, kept = (tl.program_id(0) // num_drafted).to(tl.int64), tl.program_id(0) % num_drafted
    piece = tl.program_id(1)
    at = chain * num_drafted + kept
    if (kept > 0) & (kept < tl.load(lengths_ptr + chain)):
        share = tl.full((), 1.0, tl.float64)
        for place in range(kept):
            share = _times(share, tl.load(ratio_ptr + chain * num_drafted + place))
        p_distribution = read_distribution(
            p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr, at + chain, num_pieces,
            num_drafted + 1, P_READY, PIECES,
        )  # fmt: skip
        q_distribution = read_distribution(
            q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, at, num_pieces,
            num_drafted, Q_READY, PIECES,
        )  # fmt: skip
        index = piece * PIECE + tl.arange(0, PIECE)
        left, _ = _weights(
            index, index < size, share, p_ptr, p_distribution, q_ptr, q_distribution, at + chain,
            at, True, 0, size, P_READY, Q_READY, POINT,
        )  # fmt: skip
        tl.store(left_ptr + at * num_pieces + piece, tl.sum(left, 0))


@triton.jit(do_not_specialize=["num_drafted"])
def decide_kernel(
    lengths_ptr, seed_ptr, sample_ptr, start_ptr, ratio_ptr, left_ptr, kept_ptr, share_ptr,
    num_drafted, num_pieces, BLOCK_RULE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """How many tokens of a chain are kept, and the share that what is left is taken of."""
    chain = tl.program_id(0).to(tl.int64)
    # Lengths may be int64, and a loop's variables keep the type that they had before it.
    length = tl.load(lengths_ptr + chain).to(tl.int32)
    seed = tl.load(seed_ptr + chain)
    sample, start = tl.load(sample_ptr + chain), tl.load(start_ptr + chain)
    piece = tl.arange(0, PIECES)
    share = tl.full((), 1.0, tl.float64)
    kept, kept_share = tl.full((), 0, tl.int32), tl.full((), 1.0, tl.float64)
    for place in range(length):
        count = tl.full((), 1, tl.int32) + place
        at = chain * num_drafted + count
        ratio = tl.load(ratio_ptr + at - 1)
        coin = uniform(seed, count, start, sample, _ACCEPT)
        if BLOCK_RULE:
            share = _times(share, ratio)
            within = (piece < num_pieces) & (count < length)
            left = tl.sum(tl.load(left_ptr + at * num_pieces + piece, mask=within, other=0.0), 0)
            below = tl.where(left > 0, left + 1.0 - share, 1.0)
            chance = tl.where(left > 0, left / below, tl.where(share == 1.0, 1.0, 0.0))
            chance = tl.where(count < length, chance, share)
            heads = (chance >= 1.0) | (coin < chance)
            kept = tl.where(heads, count, kept)
            kept_share = tl.where(heads, share, kept_share)
        else:
            heads = (kept == count - 1) & ((ratio >= 1.0) | (coin < ratio))
            kept = tl.where(heads, count, kept)
    tl.store(kept_ptr + chain, kept)
    tl.store(share_ptr + chain, kept_share)


@triton.jit
def _at_kept(chain, kept_ptr, lengths_ptr, tokens_ptr, num_drafted, CHAINS: tl.constexpr):
    """(kept, row of p, row of q, is there a q, the drafted token that was refused)."""
    if CHAINS:
        kept = tl.load(kept_ptr + chain)
        covered = kept < tl.load(lengths_ptr + chain)
        q_row = chain * num_drafted + kept
        token = tl.load(tokens_ptr + q_row, mask=covered, other=-1).to(tl.int64)
        return kept, q_row + chain, tl.where(covered, q_row, 0), covered, token
    else:
        none = chain < 0
        return tl.full((), 0, tl.int32), chain, chain * 0, none, chain * 0 - 1


@triton.jit(do_not_specialize=["num_drafted"])
def left_kernel(
    kept_ptr, share_ptr, lengths_ptr, tokens_ptr,
    p_ptr, p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr,
    q_ptr, q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, sums_ptr,
    num_drafted, size, num_pieces,
    P_READY: tl.constexpr, Q_READY: tl.constexpr, POINT: tl.constexpr, CHAINS: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """A piece of the sums that the next token is drawn by: what is left, and p itself."""
    chain, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, p_row, q_row, covered, token = _at_kept(
        chain, kept_ptr, lengths_ptr, tokens_ptr, num_drafted, CHAINS
    )
    share = tl.full((), 1.0, tl.float64)
    if CHAINS:
        share = tl.load(share_ptr + chain)
    p_distribution = read_distribution(
        p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr, p_row, num_pieces,
        num_drafted + 1, P_READY, PIECES,
    )  # fmt: skip
    q_distribution = read_distribution(
        q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, q_row, num_pieces,
        num_drafted, Q_READY, PIECES,
    )  # fmt: skip
    index = piece * PIECE + tl.arange(0, PIECE)
    left, p = _weights(
        index, index < size, share, p_ptr, p_distribution, q_ptr, q_distribution, p_row, q_row,
        covered, token, size, P_READY, Q_READY, POINT,
    )  # fmt: skip
    at = (chain * num_pieces + piece) * 2
    tl.store(sums_ptr + at, tl.sum(left, 0))
    tl.store(sums_ptr + at + 1, tl.sum(p, 0))


@triton.jit(do_not_specialize=["node_word", "num_drafted"])
def pick_kernel(
    kept_ptr, share_ptr, lengths_ptr, tokens_ptr,
    p_ptr, p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr,
    q_ptr, q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, sums_ptr,
    seed_ptr, sample_ptr, start_ptr, num_accepted_ptr, next_ptr,
    node_word, num_drafted, size, num_pieces,
    P_READY: tl.constexpr, Q_READY: tl.constexpr, POINT: tl.constexpr, CHAINS: tl.constexpr,
    GIVEN: tl.constexpr, ROLE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """The index at which the running sum of what is left (of p, if nothing is) first exceeds a
    uniform share of its total: first the piece, then the place in it. With GIVEN, `seed_ptr` holds
    the uniform number itself."""
    chain = tl.program_id(0).to(tl.int64)
    kept, p_row, q_row, covered, token = _at_kept(
        chain, kept_ptr, lengths_ptr, tokens_ptr, num_drafted, CHAINS
    )
    share = tl.full((), 1.0, tl.float64)
    if CHAINS:
        share = tl.load(share_ptr + chain)
    piece = tl.arange(0, PIECES)
    at = (chain * num_pieces + piece) * 2
    lefts = tl.load(sums_ptr + at, mask=piece < num_pieces, other=0.0)
    plains = tl.load(sums_ptr + at + 1, mask=piece < num_pieces, other=0.0)
    any_left = tl.sum(lefts, 0) > 0
    sums = tl.where(any_left, lefts, plains)
    total = tl.sum(sums, 0)
    lawful = (total > 0) & (total < float("inf"))
    if GIVEN:
        number = tl.load(seed_ptr + chain)
    else:
        number = uniform(
            tl.load(seed_ptr + chain), node_word + kept, tl.load(start_ptr + chain),
            tl.load(sample_ptr + chain), ROLE,
        )  # fmt: skip
    # Rounding may reach the total itself; step back to the number before it.
    below = (tl.where(lawful, total, 1.0).to(tl.int64, bitcast=True) - 1).to(
        tl.float64, bitcast=True
    )
    threshold = tl.minimum(number * total, below)
    reached = (tl.cumsum(sums, 0) > threshold) & (sums > 0)
    last = tl.max(tl.where(sums > 0, piece, 0), 0)
    chosen = tl.minimum(tl.min(tl.where(reached, piece, _NOWHERE), 0), last)
    before = tl.sum(tl.where(piece < chosen, sums, 0.0), 0)

    p_distribution = read_distribution(
        p_temperature_ptr, p_best_ptr, p_total_ptr, p_first_ptr, p_row, num_pieces,
        num_drafted + 1, P_READY, PIECES,
    )  # fmt: skip
    q_distribution = read_distribution(
        q_temperature_ptr, q_best_ptr, q_total_ptr, q_first_ptr, q_row, num_pieces,
        num_drafted, Q_READY, PIECES,
    )  # fmt: skip
    index = chosen * PIECE + tl.arange(0, PIECE)
    left, p = _weights(
        index, index < size, share, p_ptr, p_distribution, q_ptr, q_distribution, p_row, q_row,
        covered, token, size, P_READY, Q_READY, POINT,
    )  # fmt: skip
    weight = tl.where(any_left, left, p)
    reached = (before + tl.cumsum(weight, 0) > threshold) & (weight > 0)
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    found = tl.minimum(tl.min(tl.where(reached, index, _NOWHERE), 0), last)
    found = tl.where(lawful, found, -1)
    tl.store(next_ptr + chain, found.to(next_ptr.dtype.element_ty))
    if CHAINS:
        tl.store(num_accepted_ptr + chain, kept.to(num_accepted_ptr.dtype.element_ty))
