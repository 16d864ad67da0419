# pyright: basic, reportGeneralTypeIssues=false
"""Triton kernels of paged attention: softmax over the keys that a plan names, in two launches.

Logical positions alone decide which keys form a step and which steps form a part, so a row's bits
do not depend on its neighbours, on other sequences or on pages. Tokens of a tile share the steps
whose keys all of them see; the rest, each token's own last keys, is processed token by token. Keys
past a token's last are never loaded.

Shapes:  as flat pointers; the arena is [key heads, slots, head size], parts are
         [rows, query heads, parts] and [rows, query heads, parts, head size].
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.plugins.gpu.kernels.tiles import dot_whole, rounded


@triton.jit
def _num_keys(visible_ptr, offsets_ptr, row, LISTED: tl.constexpr):
    """Keys of a token: those of its pages, and those that the plan lists."""
    visible = tl.load(visible_ptr + row)
    if LISTED:
        return visible + tl.load(offsets_ptr + row + 1) - tl.load(offsets_ptr + row)
    return visible


@triton.jit
def _tables(
    token, seq_ptr, visible_ptr, offsets_ptr, extra_ptr, pages_ptr, num_columns,
    LISTED: tl.constexpr
):  # fmt: skip
    """How many keys lie in a token's pages, where its page table begins, and where its list."""
    if LISTED:
        extra_ptr += tl.load(offsets_ptr + token)
    table_ptr = pages_ptr + tl.load(seq_ptr + token).to(tl.int64) * num_columns
    return tl.load(visible_ptr + token), table_ptr, extra_ptr


@triton.jit
def _slots(position, visible, num_keys, table_ptr, listed_ptr, page_size, LISTED: tl.constexpr):
    """Where the keys at logical `position`s of a token lie: in its pages, the rest by its list."""
    paged = position < visible
    page = tl.load(table_ptr + position // page_size, mask=paged, other=0)
    slot = page * page_size + position % page_size
    if LISTED:
        listed = (position >= visible) & (position < num_keys)
        other = tl.load(listed_ptr + position - visible, mask=listed, other=0)
        slot = tl.where(paged, slot, other)
    return slot


@triton.jit
def _shared_steps(row, tokens, start, seq_ptr, visible_ptr, KEYS: tl.constexpr, PART: tl.constexpr):
    """How many steps of the part that starts at `start` see keys of all rows: none in a tile of one
    token, or of several sequences."""
    seq, visible = tl.load(seq_ptr + row), tl.load(visible_ptr + row)
    shares = (tokens > 1) & (tl.min(seq, 0) == tl.max(seq, 0))
    in_part = tl.minimum(tl.maximum(tl.min(visible, 0) - start, 0), PART)
    return tl.where(shares, in_part // KEYS, 0)


@triton.jit
def _step(q, keys, values, valid, best, total, mixed, scale):
    """The softmax so far, carried on by one step of keys; `best` is the largest score so far."""
    score = tl.zeros((q.shape[0], keys.shape[0]), tl.float32)
    score = dot_whole(q, tl.trans(keys), score) * scale
    score = tl.where(valid[None, :], score, float("-inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    # While every score is -inf, differences from it would be NaN.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    shrink = tl.exp(best - base)
    weight = tl.exp(score - base[:, None])
    total = total * shrink + tl.sum(weight, 1)
    mixed = dot_whole(weight, values, mixed * shrink[:, None])
    return new_best, total, mixed


# One binary whatever the rows, however many tokens share a tile, and wherever a plan's parts begin.
@triton.jit(
    do_not_specialize=["first_row", "end_row", "tokens", "num_parts", "num_columns", "page_size"],
    do_not_specialize_on_alignment=[
        "seq_ptr", "visible_ptr", "offsets_ptr", "extra_ptr", "pages_ptr"
    ],
)  # fmt: skip
def attend_kernel(
    qkv_ptr, k_ptr, v_ptr, seq_ptr, visible_ptr, offsets_ptr, extra_ptr, pages_ptr,
    best_ptr, total_ptr, mixed_ptr, first_row, end_row, tokens, num_parts, num_columns, page_size,
    row_stride, group_stride, slot_stride, scale,
    LISTED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SHARED: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """One program takes a tile of 16 rows (the query heads that share a key head, of one or more
    tokens of a sequence) and one part of the context: PART positions from a multiple of PART. It
    goes over the part's keys in steps, and leaves the largest score, the sum of weights and the
    mixed values.
    """
    first = first_row + tl.program_id(0) * tokens
    head_tiles: tl.constexpr = (SHARED + HEADS - 1) // HEADS
    group = tl.program_id(1) // head_tiles
    start = tl.program_id(2) * PART

    place = tl.arange(0, ROWS)
    head = (tl.program_id(1) % head_tiles) * HEADS + place % HEADS
    live = (place // HEADS < tokens) & (first + place // HEADS < end_row) & (head < SHARED)
    # Rows past the last token ask for its keys, and are not stored.
    row = first + tl.minimum(place // HEADS, tl.minimum(tokens, end_row - first) - 1)
    busy = live & (_num_keys(visible_ptr, offsets_ptr, row, LISTED) > start)
    head = group * SHARED + head
    dim = tl.arange(0, DIMS)
    q = tl.load(
        qkv_ptr + row[:, None].to(tl.int64) * row_stride + head[:, None] * HEAD_DIM + dim[None, :],
        mask=busy[:, None] & (dim[None, :] < HEAD_DIM),
        other=0.0,
    ).to(tl.float32)

    num_shared = _shared_steps(row, tokens, start, seq_ptr, visible_ptr, KEYS, PART)
    best, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIMS), tl.float32)
    arena = group.to(tl.int64) * group_stride
    # Turn 0 is the shared steps; turn i is the own steps of token i - 1.
    for turn in range(tokens + 1):
        index = tl.maximum(turn - 1, 0)
        token = tl.minimum(first + index, end_row - 1)
        num_keys = _num_keys(visible_ptr, offsets_ptr, token, LISTED)
        visible, table_ptr, listed_ptr = _tables(
            token, seq_ptr, visible_ptr, offsets_ptr, extra_ptr, pages_ptr, num_columns, LISTED
        )
        own = tl.cdiv(tl.minimum(tl.maximum(num_keys - start, 0), PART), KEYS)
        own = tl.where(first + index < end_row, own, 0)
        takes = (turn == 0) | (place // HEADS == index)
        for step in range(tl.where(turn == 0, 0, num_shared), tl.where(turn == 0, num_shared, own)):
            position = start + step * KEYS + tl.arange(0, KEYS)
            slot = _slots(position, visible, num_keys, table_ptr, listed_ptr, page_size, LISTED)
            valid = position < num_keys
            at = arena + slot[:, None].to(tl.int64) * slot_stride + dim[None, :]
            mask = valid[:, None] & (dim[None, :] < HEAD_DIM)
            keys = tl.load(k_ptr + at, mask=mask, other=0.0)
            values = tl.load(v_ptr + at, mask=mask, other=0.0)
            new_best, new_total, new_mixed = _step(
                q, keys, values, valid, best, total, mixed, scale
            )
            best = tl.where(takes, new_best, best)
            total = tl.where(takes, new_total, total)
            mixed = tl.where(takes[:, None], new_mixed, mixed)

    num_heads = SHARED * (tl.num_programs(1) // head_tiles)
    out = ((row - first_row).to(tl.int64) * num_heads + head) * num_parts + tl.program_id(2)
    tl.store(best_ptr + out, best, mask=busy)
    tl.store(total_ptr + out, total, mask=busy)
    tl.store(
        mixed_ptr + out[:, None] * HEAD_DIM + dim[None, :],
        mixed,
        mask=busy[:, None] & (dim[None, :] < HEAD_DIM),
    )


@triton.jit(
    do_not_specialize=["first_row", "num_parts"],
    do_not_specialize_on_alignment=["visible_ptr", "offsets_ptr"],
)
def merge_kernel(
    visible_ptr, offsets_ptr, best_ptr, total_ptr, mixed_ptr, out_ptr, first_row, num_parts,
    out_stride,
    LISTED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr
):  # fmt: skip
    """One query head of one token. Sums are taken of PARTS neighbouring parts at once, each PARTS
    apart: their order follows from the number of a part alone."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first_row + index
    dim, lane = tl.arange(0, DIMS), tl.arange(0, PARTS)
    num_keys = _num_keys(visible_ptr, offsets_ptr, row, LISTED)
    first = (index * tl.num_programs(1) + head) * num_parts + lane
    end = tl.cdiv(num_keys, PART)
    bests = tl.full((PARTS,), float("-inf"), tl.float32)
    for part in range(0, end, PARTS):
        live = part + lane < end
        found = tl.load(best_ptr + first + part, mask=live, other=float("-inf"))
        bests = tl.maximum(bests, found)
    best = tl.max(bests, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    totals, mixed = tl.zeros((PARTS,), tl.float32), tl.zeros((PARTS, DIMS), tl.float32)
    for part in range(0, end, PARTS):
        live = part + lane < end
        at = first + part
        share = tl.exp(tl.load(best_ptr + at, mask=live, other=float("-inf")) - base)
        totals += tl.load(total_ptr + at, mask=live, other=0.0) * share
        offsets = at[:, None] * HEAD_DIM + dim[None, :]
        mask = live[:, None] & (dim[None, :] < HEAD_DIM)
        mixed += tl.load(mixed_ptr + offsets, mask=mask, other=0.0) * share[:, None]
    # A token of no keys gets zeros.
    total = tl.where(num_keys > 0, tl.sum(totals, 0), 1.0)
    tl.store(
        out_ptr + row * out_stride + head * HEAD_DIM + dim,
        rounded(tl.div_rn(tl.sum(mixed, 0), total), out_ptr.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )
