"""Triton's programs that round matrices to e4m3: one launch finds all scales, and writes all codes.

A program has a row, or some columns, of up to three matrices a, b and c, of which b and c may be empty. It reads them
twice: for the largest element, and for the codes, when they are still in a cache.

Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST = tl.constexpr(0x2B8CBCCC)  # 1e-12, as the bits of a float32
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def magnitude(x):
    """Return |x| as the bits of a float32: integers in the same order, with infinity and NaN above all numbers."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def powers(largest):
    """Return the largest power of two 2**n with which no element exceeds 448 = 1.75 * 2**8, and 2**-n.

    `largest` is the `magnitude` of the largest element. Both are NaN if it is not finite.
    """
    bits = tl.maximum(largest, SMALLEST)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # one more above 1.75 * 2**n
    scale = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    return tl.where(bits >= INFINITY, float("nan"), scale), tl.where(bits >= INFINITY, float("nan"), factor)


@triton.jit
def code(x, scale, by_hand: tl.constexpr):
    """Return the codes of numbers that `scale` brings into the range of e4m3; a GPU rounds them to the nearest.

    `by_hand`: for Triton's interpreter, which does not. In a sum with 1.5 * 2**20 times the number's power of two, the
    number has three bits after the first; below 2**-6 it has fewer.
    """
    value = x.to(tl.float32) * scale
    if by_hand:
        bits = value.to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) & 0xFF, 121)
        large = ((exponent + 20) << 23 | 0x400000).to(tl.float32, bitcast=True)
        sign = bits & -0x80000000  # which the sum loses if it is 0
        value = (magnitude((value + large) - large) | sign).to(tl.float32, bitcast=True)
    return value.to(tl.float8e4nv)


@triton.jit
def largest_of_row(x, width, top, block: tl.constexpr):
    """Return the larger of `top` [block] and the elements of a row, at stride `block`."""
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        top = tl.maximum(top, magnitude(tl.load(x + column, mask=column < width, other=0.0)))
    return top


@triton.jit
def write_row(x, width, scale, out, until, block: tl.constexpr, by_hand: tl.constexpr):
    """Write the codes of a row, and zeros from `width` to `until`."""
    for start in range(0, until, block):
        column = start + tl.arange(0, block)
        found = tl.load(x + column, mask=column < width, other=0.0)
        tl.store(out + column, code(found, scale, by_hand), mask=column < until)


@triton.jit
def largest_of_columns(x, stride, rows, column, width, top, tall: tl.constexpr):
    """Return the larger of `top` [tall, columns] and the elements of some columns, at stride `tall`."""
    for start in range(0, rows, tall):
        row = (start + tl.arange(0, tall)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        top = tl.maximum(top, magnitude(tl.load(x + row * stride + column, mask=inside, other=0.0)))
    return top


@triton.jit
def write_columns(x, stride, rows, column, width, scale, out, length, until, tall: tl.constexpr, by_hand: tl.constexpr):
    """Write the codes of some columns to `out`, where each is a row of `length`, and zeros from `rows` to `until`."""
    for start in range(0, until, tall):
        row = (start + tl.arange(0, tall)).to(tl.int64)[:, None]
        inside = column < width
        found = tl.load(x + row * stride + column, mask=inside & (row < rows), other=0.0)
        tl.store(out + column * length + row, code(found, scale, by_hand), mask=inside & (row < until))


@triton.jit
def columns_of_one(
    x,
    stride,
    rows,
    width,
    at,
    before,
    codes,
    factors,
    length,
    tall: tl.constexpr,
    wide: tl.constexpr,
    by_hand: tl.constexpr,
):
    """Round `wide` columns of a matrix, each with its own scale; `before`: columns of the matrices on its left."""
    column = (at * wide + tl.arange(0, wide)).to(tl.int64)[None, :]
    top = largest_of_columns(x, stride, rows, column, width, tl.zeros([tall, wide], tl.int32), tall)
    scale, factor = powers(tl.max(top, 0)[None, :])
    first = column * 0 + before  # in 64 bits
    tl.store(factors + first + column, factor, mask=column < width)
    write_columns(x, stride, rows, column, width, scale, codes + first * length, length, length, tall, by_hand)


@triton.jit
def one_row(
    a,
    b,
    c,
    a_width,
    b_width,
    c_width,
    row,
    largest,
    codes,
    factors,
    length,
    is_given: tl.constexpr,
    block: tl.constexpr,
    by_hand: tl.constexpr,
):
    """Round a row that lies in several matrices, with one scale, to `length` codes."""
    if is_given:
        top = tl.load(largest + row).to(tl.int32, bitcast=True)
    else:
        tops = largest_of_row(a, a_width, tl.zeros([block], tl.int32), block)
        tops = largest_of_row(b, b_width, tops, block)
        top = tl.max(largest_of_row(c, c_width, tops, block), 0)
    scale, factor = powers(top)
    tl.store(factors + row, factor)
    out = codes + row * length
    before = a_width + b_width
    write_row(a, a_width, scale, out, a_width, block, by_hand)
    write_row(b, b_width, scale, out + a_width, b_width, block, by_hand)
    write_row(c, c_width, scale, out + before, length - before, block, by_hand)


@triton.jit
def by_row(
    a,
    b,
    c,
    a_stride,
    b_stride,
    c_stride,
    a_width,
    b_width,
    c_width,
    rows,
    largest,
    codes,
    factors,
    length,
    column_codes,
    column_factors,
    column_length,
    of_a,
    of_b,
    of_columns,
    is_given: tl.constexpr,
    block: tl.constexpr,
    by_hand: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """Round the rows of matrices that stand side by side; each row has one scale for all of them.

    The first `of_columns` programs round the columns of each matrix, which take longer than a row: `of_a` of them those
    of `a`, and `of_b` those of `b`. `is_given`: the largest element of each row is read from `largest`.
    """
    program = tl.program_id(0)
    if program < of_a:
        columns_of_one(
            a, a_stride, rows, a_width, program, 0, column_codes, column_factors, column_length, tall, wide, by_hand
        )
    elif program < of_a + of_b:
        at = program - of_a
        columns_of_one(
            b, b_stride, rows, b_width, at, a_width, column_codes, column_factors, column_length, tall, wide, by_hand
        )
    elif program < of_columns:
        at = program - of_a - of_b
        before = a_width + b_width
        columns_of_one(
            c, c_stride, rows, c_width, at, before, column_codes, column_factors, column_length, tall, wide, by_hand
        )
    else:
        row = (program - of_columns).to(tl.int64)
        a_row = a + row * a_stride
        b_row = b + row * b_stride
        c_row = c + row * c_stride
        one_row(
            a_row,
            b_row,
            c_row,
            a_width,
            b_width,
            c_width,
            row,
            largest,
            codes,
            factors,
            length,
            is_given,
            block,
            by_hand,
        )


@triton.jit
def by_column(
    a,
    b,
    c,
    a_stride,
    b_stride,
    c_stride,
    a_rows,
    b_rows,
    c_rows,
    width,
    largest,
    codes,
    factors,
    length,
    is_given: tl.constexpr,
    by_hand: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """Round the columns of matrices that stand on one another, into rows of `length` codes; each has one scale."""
    column = (tl.program_id(0) * wide + tl.arange(0, wide)).to(tl.int64)[None, :]
    if is_given:
        top = tl.load(largest + column, mask=column < width, other=0.0).to(tl.int32, bitcast=True)
    else:
        tops = largest_of_columns(a, a_stride, a_rows, column, width, tl.zeros([tall, wide], tl.int32), tall)
        tops = largest_of_columns(b, b_stride, b_rows, column, width, tops, tall)
        top = tl.max(largest_of_columns(c, c_stride, c_rows, column, width, tops, tall), 0)[None, :]
    scale, factor = powers(top)
    tl.store(factors + column, factor, mask=column < width)
    write_columns(a, a_stride, a_rows, column, width, scale, codes, length, a_rows, tall, by_hand)
    write_columns(b, b_stride, b_rows, column, width, scale, codes + a_rows, length, b_rows, tall, by_hand)
    before = a_rows + b_rows
    write_columns(c, c_stride, c_rows, column, width, scale, codes + before, length, length - before, tall, by_hand)


@triton.jit
def row_maxima(a, b, c, a_stride, b_stride, c_stride, a_width, b_width, c_width, largest, block: tl.constexpr):
    """Write the largest absolute element of each row of matrices that stand side by side."""
    row = tl.program_id(0).to(tl.int64)
    tops = largest_of_row(a + row * a_stride, a_width, tl.zeros([block], tl.int32), block)
    tops = largest_of_row(b + row * b_stride, b_width, tops, block)
    top = tl.max(largest_of_row(c + row * c_stride, c_width, tops, block), 0)
    tl.store(largest + row, top.to(tl.float32, bitcast=True))


@triton.jit
def column_maxima(
    a,
    b,
    c,
    a_stride,
    b_stride,
    c_stride,
    a_rows,
    b_rows,
    c_rows,
    width,
    largest,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """Write the largest absolute element of each column of matrices that stand on one another."""
    column = (tl.program_id(0) * wide + tl.arange(0, wide)).to(tl.int64)[None, :]
    tops = largest_of_columns(a, a_stride, a_rows, column, width, tl.zeros([tall, wide], tl.int32), tall)
    tops = largest_of_columns(b, b_stride, b_rows, column, width, tops, tall)
    top = tl.max(largest_of_columns(c, c_stride, c_rows, column, width, tops, tall), 0)[None, :]
    tl.store(largest + column, top.to(tl.float32, bitcast=True), mask=column < width)
