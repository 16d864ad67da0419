# pyright: basic, reportGeneralTypeIssues=false
"""Triton kernels of the gated delta rule of one layer, in two launches.

A prompt goes through the same steps as a verification, and a replayed token through the same code
as one that is read, so a text's bits do not depend on how it is cut into passes. Cells may be
anywhere in memory, so tables (delta_tables.py) have their addresses; 0 means none.
kernels/reference/delta.py is the definition.

Shapes:  as flat pointers; queries and keys are [tokens, key heads, key size], values and changes
         [tokens, value heads, value size], rates and decays [tokens, value heads].
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.reference import delta as definition
from outrider.plugins.gpu.kernels import delta_tables

LINE_FIELDS = tl.constexpr(delta_tables.LINE_FIELDS)
TOKEN_FIELDS = tl.constexpr(delta_tables.TOKEN_FIELDS)
RUN_FIELDS = tl.constexpr(delta_tables.RUN_FIELDS)
REPLAY_FIELDS = tl.constexpr(delta_tables.REPLAY_FIELDS)
NORM_EPS = tl.constexpr(definition.NORM_EPS)
FLOATS = tl.constexpr(tl.pointer_type(tl.float32))


@triton.jit
def _read(first_ptr, lines_ptr, number, layer, row_stride, channel, mask):
    """A line's channels. Lines of a token follow those of the token before it."""
    lines_ptr += number * LINE_FIELDS
    address, where = tl.load(lines_ptr), tl.load(lines_ptr + 1)
    in_pass = first_ptr.to(tl.int64) + 4 * row_stride * tl.maximum(where, 0)
    there = tl.where(address == 0, in_pass, address + 4 * where * layer)
    real = (address != 0) | (where >= 0)
    return tl.load(there.to(FLOATS) + channel, mask=mask & real, other=0.0)


@triton.jit
def _keep(
    address, first_line, first_ptr, lines_ptr, layer, row_stride, channel, mask,
    WINDOW: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """A window of lines, into the cell at `address`."""
    to_ptr = address.to(FLOATS) + layer * WINDOW * CHANNELS + channel
    for row in tl.static_range(WINDOW):
        x = _read(first_ptr, lines_ptr, first_line + row, layer, row_stride, channel, mask)
        tl.store(to_ptr + row * CHANNELS, x, mask=mask)


@triton.jit
def _convolved(
    first_ptr, conv_ptr, lines_ptr, token_ptr, token, layer, row_stride, channel, mask,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """These channels of one token, after SiLU; what cells keep of them is written."""
    line = token * TAPS
    after, before = tl.load(token_ptr), tl.load(token_ptr + 1)
    if after != 0:
        _keep(
            after, line + 1, first_ptr, lines_ptr, layer, row_stride, channel, mask,
            TAPS - 1, CHANNELS,
        )  # fmt: skip
    if before != 0:
        _keep(
            before, line, first_ptr, lines_ptr, layer, row_stride, channel, mask,
            TAPS - 1, CHANNELS,
        )  # fmt: skip
    x = _read(first_ptr, lines_ptr, line, layer, row_stride, channel, mask)
    total = x * tl.load(conv_ptr + channel, mask=mask, other=0.0)
    for tap in tl.static_range(1, TAPS):
        x = _read(first_ptr, lines_ptr, line + tap, layer, row_stride, channel, mask)
        total += x * tl.load(conv_ptr + tap * CHANNELS + channel, mask=mask, other=0.0)
    kept = tl.load(token_ptr + 2)
    if kept != 0:
        tl.store(kept.to(FLOATS) + layer * CHANNELS + channel, x, mask=mask)
    return tl.div_rn(total, 1.0 + tl.exp(-total))


@triton.jit
def _unit(x, scale):
    return tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) + NORM_EPS) * scale)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(tl.where(x < -88.0, 88.0, -x)))


@triton.jit
def _softplus(x):
    """log(1 + e^x). A small e^x loses digits in 1 + e^x; the logarithm of the rounded sum is scaled
    by how much was lost (Kahan)."""
    # Not `minimum`, which takes the number where there is a NaN.
    grown = tl.exp(tl.where(x > 20.0, 20.0, x))
    sum_1 = 1.0 + grown
    lost = sum_1 == 1.0
    log = tl.log(sum_1) * tl.div_rn(grown, tl.where(lost, 1.0, sum_1 - 1.0))
    return tl.where(x > 20.0, x, tl.where(lost, grown, log))


# One binary whatever the layer.
@triton.jit(do_not_specialize=["layer"])
def prepare_kernel(
    first_ptr, conv_ptr, rate_ptr, bias_ptr, lines_ptr, tokens_ptr,
    query_ptr, key_ptr, value_ptr, rates_ptr, decays_ptr, layer, row_stride, gates, query_scale,
    KEY_HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    TAPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, GATES: tl.constexpr
):  # fmt: skip
    """Convolution, norms and gates: a program takes one token and one key head's value heads.

    The program also writes what cells keep of them.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    layer = tl.cast(layer, tl.int64)
    all_keys: tl.constexpr = KEY_HEADS * KEY
    values: tl.constexpr = SHARED * VALUE
    channels: tl.constexpr = 2 * all_keys + KEY_HEADS * values
    heads: tl.constexpr = KEY_HEADS * SHARED
    token_ptr = tokens_ptr + token * TOKEN_FIELDS

    place = tl.arange(0, KEYS)
    mask = place < KEY
    at = head * KEY + place
    query = _convolved(
        first_ptr, conv_ptr, lines_ptr, token_ptr, token, layer, row_stride, at, mask,
        TAPS, channels,
    )  # fmt: skip
    key = _convolved(
        first_ptr, conv_ptr, lines_ptr, token_ptr, token, layer, row_stride, all_keys + at, mask,
        TAPS, channels,
    )  # fmt: skip
    key = _unit(key, 1.0)
    query = _unit(query, query_scale)
    tl.store(query_ptr + token * all_keys + at, query, mask=mask)
    tl.store(key_ptr + token * all_keys + at, key, mask=mask)
    kept = tl.load(token_ptr + 3)
    if kept != 0:
        tl.store(kept.to(FLOATS) + layer * all_keys + at, key, mask=mask)

    place = tl.arange(0, VALUES)
    at = head * values + place
    value = _convolved(
        first_ptr, conv_ptr, lines_ptr, token_ptr, token, layer, row_stride, 2 * all_keys + at,
        place < values, TAPS, channels,
    )  # fmt: skip
    tl.store(value_ptr + token * (heads * VALUE) + at, value, mask=place < values)

    place = tl.arange(0, GATES)
    mask = place < SHARED
    at = head * SHARED + place
    gates_ptr = first_ptr + token * row_stride + gates + at
    rate = _sigmoid(tl.load(gates_ptr, mask=mask, other=0.0))
    step = tl.load(gates_ptr + heads, mask=mask, other=0.0)
    step = _softplus(step + tl.load(bias_ptr + at, mask=mask, other=0.0))
    decay = tl.exp(-tl.load(rate_ptr + at, mask=mask, other=0.0) * step)
    tl.store(rates_ptr + token * heads + at, rate, mask=mask)
    tl.store(decays_ptr + token * heads + at, decay, mask=mask)
    kept = tl.load(token_ptr + 4)
    if kept != 0:
        tl.store(kept.to(FLOATS) + layer * heads + at, decay, mask=mask)


@triton.jit
def _inputs(
    query_ptr, key_ptr, value_ptr, rates_ptr, decays_ptr, token, head, place, column,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr
):  # fmt: skip
    """What one token brings to a value head: query, key, value, rate and decay."""
    row = token * HEADS + head
    at = (token * (HEADS // SHARED) + head // SHARED) * KEY + place
    query = tl.load(query_ptr + at, mask=place < KEY, other=0.0)
    key = tl.load(key_ptr + at, mask=place < KEY, other=0.0)
    value = tl.load(value_ptr + row * VALUE + column, mask=column < VALUE, other=0.0)
    return query, key, value, tl.load(rates_ptr + row), tl.load(decays_ptr + row)


@triton.jit
def _changed(decayed, key, change):
    return decayed + key[:, None] * change[None, :]


@triton.jit(do_not_specialize=["layer"])
def recur_kernel(
    query_ptr, key_ptr, value_ptr, rates_ptr, decays_ptr, tokens_ptr, runs_ptr, replayed_ptr,
    groups_ptr, out_ptr, layer,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One program takes some columns of one value head's matrix through a group of runs, token by
    token; the columns stay in its registers from a run's first token to its last.
    """
    blocks: tl.constexpr = (VALUE + COLUMNS - 1) // COLUMNS
    head, group = tl.program_id(0) // blocks, tl.program_id(1)
    # Of this head among those of all layers.
    number = tl.cast(layer, tl.int64) * HEADS + head
    place = tl.arange(0, KEYS)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    at = number * (KEY * VALUE) + place[:, None] * VALUE + column[None, :]
    whole = (place[:, None] < KEY) & (column[None, :] < VALUE)

    for index in range(tl.load(groups_ptr + group), tl.load(groups_ptr + group + 1)):
        run_ptr = runs_ptr + index * RUN_FIELDS
        first, stop = tl.load(run_ptr), tl.load(run_ptr + 1)
        # A tensor begins at a multiple of 16 bytes, which wide loads and stores must be told.
        source, fold = tl.load(run_ptr + 2), tl.load(run_ptr + 3)
        source_ptr = tl.multiple_of(source.to(FLOATS), 16)
        fold_ptr = tl.multiple_of(fold.to(FLOATS), 16)
        # What a run before this one wrote may lie with other threads of this program.
        tl.debug_barrier()
        state = tl.load(source_ptr + at, mask=whole & (source != 0), other=0.0)
        for cell in range(tl.load(run_ptr + 4), tl.load(run_ptr + 5)):
            cell_ptr = replayed_ptr + cell * REPLAY_FIELDS
            key_at = (number // SHARED) * KEY + place
            key = tl.load(tl.load(cell_ptr).to(FLOATS) + key_at, mask=place < KEY, other=0.0)
            change = tl.load(
                tl.load(cell_ptr + 1).to(FLOATS) + number * VALUE + column,
                mask=column < VALUE,
                other=0.0,
            )
            decay = tl.load(tl.load(cell_ptr + 2).to(FLOATS) + number)
            state = _changed(state * decay, key, change)
        tl.store(fold_ptr + at, state, mask=whole & (fold != 0))

        query, key, value, rate, decay = _inputs(
            query_ptr, key_ptr, value_ptr, rates_ptr, decays_ptr, first, head, place, column,
            HEADS, SHARED, KEY, VALUE,
        )  # fmt: skip
        for token in range(first, stop):
            # The next token's inputs are on their way while this one is done.
            coming = _inputs(
                query_ptr, key_ptr, value_ptr, rates_ptr, decays_ptr,
                tl.minimum(token + 1, stop - 1), head, place, column, HEADS, SHARED, KEY, VALUE,
            )  # fmt: skip
            decayed = state * decay
            seen = tl.sum(decayed * key[:, None], 0)
            change = rate * (value - seen)
            state = _changed(decayed, key, change)
            out = tl.sum(state * query[:, None], 0)
            out_at = (token * HEADS + head) * VALUE + column
            tl.store(out_ptr + out_at, out, mask=column < VALUE)
            token_ptr = tokens_ptr + token * TOKEN_FIELDS
            kept, noted = tl.load(token_ptr + 5), tl.load(token_ptr + 6)
            if kept != 0:
                tl.store(tl.multiple_of(kept.to(FLOATS), 16) + at, state, mask=whole)
            if noted != 0:
                to_ptr = noted.to(FLOATS) + number * VALUE + column
                tl.store(to_ptr, change, mask=column < VALUE)
            query, key, value, rate, decay = coming
