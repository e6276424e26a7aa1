"""Triton's programs: each reads its inputs once, and writes its outputs once.

They compute in float32, and round wherever torch's operations round. So results equal torch's to the last bit, except
where there is an exponential, of which torch and Triton have their own.

Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(value, to: tl.constexpr):
    """Return float32 numbers as torch would have stored them between two operations in `to`."""
    return value.to(to).to(tl.float32)


@triton.jit
def place(pair, half, neighbours: tl.constexpr):
    """Return where the two dimensions of a pair stand: side by side, or half a head apart."""
    if neighbours:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, half + pair
    return first, second


@triton.jit
def turn(
    x,
    out,
    x_head,
    out_head,
    heads,
    cosines,
    sines,
    half,
    backward: tl.constexpr,
    opposite: tl.constexpr,
    angles: tl.constexpr,
    pairs: tl.constexpr,
    into_pairs: tl.constexpr,
    wide: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
):
    """Rotate the heads of one token: x * cos + [sign * x2 * into_first, -sign * x1 * into_second]."""
    column = tl.arange(0, columns)[None, :]
    known = column < half
    of_first, of_second = place(column, half, angles == 1)
    if angles == 2:
        of_first, of_second = column, column
    cos_first = tl.load(cosines + of_first, mask=known).to(tl.float32)
    cos_second = tl.load(cosines + of_second, mask=known).to(tl.float32)
    into_first = tl.load(sines + (of_second if backward else of_first), mask=known).to(tl.float32)
    into_second = tl.load(sines + (of_first if backward else of_second), mask=known).to(tl.float32)
    from_first, from_second = place(column, half, pairs)
    at_first, at_second = place(column, half, into_pairs)
    sign: tl.constexpr = 1 if backward != opposite else -1
    kind: tl.constexpr = x.dtype.element_ty
    between: tl.constexpr = tl.float32 if wide else kind
    for start in range(0, heads, at_once):
        head = start + tl.arange(0, at_once)[:, None]
        inside = (head < heads) & known
        first = tl.load(x + head * x_head + from_first, mask=inside).to(tl.float32)
        second = tl.load(x + head * x_head + from_second, mask=inside).to(tl.float32)
        to_first = rounded(first * cos_first, between) + sign * rounded(second * into_first, between)
        to_second = rounded(second * cos_second, between) - sign * rounded(first * into_second, between)
        tl.store(out + head * out_head + at_first, to_first.to(kind), mask=inside)
        tl.store(out + head * out_head + at_second, to_second.to(kind), mask=inside)


@triton.jit
def rotate(
    q,
    k,
    out_q,
    out_k,
    cos,
    sin,
    tokens,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    out_q_batch,
    out_q_head,
    out_q_token,
    out_k_batch,
    out_k_head,
    out_k_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    heads_q,
    heads_k,
    half,
    backward: tl.constexpr,
    opposite: tl.constexpr,
    angles: tl.constexpr,
    pairs: tl.constexpr,
    into_pairs: tl.constexpr,
    wide: tl.constexpr,
    columns: tl.constexpr,
    at_once: tl.constexpr,
):
    """Rotate queries and keys of one token; `angles`: 0 half a head apart, 1 side by side, 2 one for both."""
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    cosines, sines = cos + batch * cos_batch + token * cos_token, sin + batch * sin_batch + token * sin_token
    turn(
        q + batch * q_batch + token * q_token,
        out_q + batch * out_q_batch + token * out_q_token,
        q_head,
        out_q_head,
        heads_q,
        cosines,
        sines,
        half,
        backward,
        opposite,
        angles,
        pairs,
        into_pairs,
        wide,
        columns,
        at_once,
    )
    turn(
        k + batch * k_batch + token * k_token,
        out_k + batch * out_k_batch + token * out_k_token,
        k_head,
        out_k_head,
        heads_k,
        cosines,
        sines,
        half,
        backward,
        opposite,
        angles,
        pairs,
        into_pairs,
        wide,
        columns,
        at_once,
    )


@triton.jit
def logistic(x):
    """Return 1 / (1 + exp(-x)) as torch does, in float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activated(x, activation: tl.constexpr, beta: tl.constexpr, between: tl.constexpr):
    """Return an activation of float32 numbers; what torch computes in several operations is rounded after each."""
    if activation == "silu":
        return x / (1.0 + tl.exp(-x))
    if activation == "swish":
        return x * rounded(logistic(rounded(beta * x, between)), between)
    if activation == "sigmoid":
        return logistic(x)
    if activation == "gelu":
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    if activation == "gelu_tanh":
        # (1 + tanh(y)) / 2 is logistic(2 * y)
        return x * logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if activation == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    return tl.maximum(x, 0.0)


@triton.jit
def slope(x, activation: tl.constexpr, beta: tl.constexpr):
    """Return the derivative of an activation."""
    if activation == "silu":
        share = logistic(x)
        return share * (1.0 + x * (1.0 - share))
    if activation == "swish":
        share = logistic(beta * x)
        return share * (1.0 + beta * x * (1.0 - share))
    if activation == "sigmoid":
        share = logistic(x)
        return share * (1.0 - share)
    if activation == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    if activation == "gelu_tanh":
        share = logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if activation == "relu2":
        return 2.0 * tl.maximum(x, 0.0)
    return tl.where(x > 0.0, 1.0, 0.0)


@triton.jit
def at_most(x, limit, clamped: tl.constexpr):
    """Return numbers, those above the limit as the limit; NaN stays."""
    if clamped:
        return tl.where(x > limit, limit, x)
    return x


@triton.jit
def gate(
    gates,
    ups,
    out,
    gate_row,
    up_row,
    width,
    step: tl.constexpr,
    activation: tl.constexpr,
    beta: tl.constexpr,
    clamped: tl.constexpr,
    limit: tl.constexpr,
    clamps_after: tl.constexpr,
    offset: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
):
    """Write activation(gate) * (up + offset) of a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    kind: tl.constexpr = out.dtype.element_ty
    between: tl.constexpr = tl.float32 if wide else kind
    x = tl.load(gates + row * gate_row + column * step, mask=inside).to(tl.float32)
    up = tl.load(ups + row * up_row + column * step, mask=inside).to(tl.float32)
    x = at_most(x, limit, clamped and not clamps_after)
    active = at_most(rounded(activated(x, activation, beta, between), between), limit, clamped and clamps_after)
    up = -at_most(-at_most(up, limit, clamped), limit, clamped)
    product = rounded(active, between) * rounded(up + offset, between)
    tl.store(out + row * width + column, product.to(kind), mask=inside)


@triton.jit
def gate_backward(
    grads,
    gates,
    ups,
    of_gates,
    of_ups,
    grad_row,
    gate_row,
    up_row,
    out_row,
    width,
    step: tl.constexpr,
    activation: tl.constexpr,
    beta: tl.constexpr,
    clamped: tl.constexpr,
    limit: tl.constexpr,
    clamps_after: tl.constexpr,
    offset: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
):
    """Write the gradients of gate and up of a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    kind: tl.constexpr = of_gates.dtype.element_ty
    between: tl.constexpr = tl.float32 if wide else kind
    grad = tl.load(grads + row * grad_row + column, mask=inside).to(tl.float32)
    given = tl.load(gates + row * gate_row + column * step, mask=inside).to(tl.float32)
    given_up = tl.load(ups + row * up_row + column * step, mask=inside).to(tl.float32)
    x = at_most(given, limit, clamped and not clamps_after)
    free = rounded(activated(x, activation, beta, between), between)
    active = at_most(free, limit, clamped and clamps_after)
    up = -at_most(-at_most(given_up, limit, clamped), limit, clamped)
    of_up = grad * rounded(active, between)
    of_gate = rounded(grad * rounded(up + offset, between), between) * slope(x, activation, beta)
    if clamped:  # what is clamped has no gradient
        of_up = tl.where((given_up > limit) | (given_up < -limit), 0.0, of_up)
        of_gate = tl.where((free if clamps_after else given) > limit, 0.0, of_gate)
    tl.store(of_ups + row * out_row + column * step, of_up.to(kind), mask=inside)
    tl.store(of_gates + row * out_row + column * step, of_gate.to(kind), mask=inside)


@triton.jit
def activate(x, out, count, activation: tl.constexpr, beta: tl.constexpr, block: tl.constexpr):
    """Write an activation of a part of a tensor."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    kind: tl.constexpr = out.dtype.element_ty
    given = tl.load(x + place, mask=inside).to(tl.float32)
    tl.store(out + place, activated(given, activation, beta, kind).to(kind), mask=inside)


@triton.jit
def activate_backward(grads, x, out, count, activation: tl.constexpr, beta: tl.constexpr, block: tl.constexpr):
    """Write the gradient of the input of an activation, a part of a tensor."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    kind: tl.constexpr = out.dtype.element_ty
    grad = tl.load(grads + place, mask=inside).to(tl.float32)
    given = tl.load(x + place, mask=inside).to(tl.float32)
    tl.store(out + place, (grad * slope(given, activation, beta)).to(kind), mask=inside)


@triton.jit
def norm(
    x,
    other,
    weight,
    bias,
    total,
    out,
    scales,
    x_row,
    other_row,
    rows,
    width,
    epsilon: tl.constexpr,
    offset: tl.constexpr,
    centred: tl.constexpr,
    block: tl.constexpr,
    at_once: tl.constexpr,
):
    """Write the norms of some rows of x, or of x + other and these sums, and 1 / the deviation of each row."""
    row = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)
    column = tl.arange(0, block)[None, :]
    known = column < width
    inside = (row < rows)[:, None] & known
    kind: tl.constexpr = out.dtype.element_ty
    given = tl.load(x + row[:, None] * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if other is not None:
        added = tl.load(other + row[:, None] * other_row + column, mask=inside, other=0.0).to(tl.float32)
        given = rounded(given + added, kind)
        tl.store(total + row[:, None] * width + column, given.to(kind), mask=inside)
    given = less_mean(given, known, width, centred)
    scale = 1.0 / tl.sqrt(tl.sum(given * given, axis=1) / width + epsilon)
    factor = tl.load(weight + column, mask=known, other=0.0).to(tl.float32) + offset
    tl.store(scales + row, scale, mask=row < rows)
    normal = given * scale[:, None] * factor
    if bias is not None:
        normal += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * width + column, normal.to(kind), mask=inside)


@triton.jit
def less_mean(rows, known, width, centred: tl.constexpr):
    """Return rows minus the mean of each, if they are centred; 0 outside of them."""
    if centred:
        return tl.where(known, rows - tl.sum(rows, axis=1)[:, None] / width, 0.0)
    return rows


@triton.jit
def norm_backward(
    grads,
    of_total,
    x,
    weight,
    scales,
    of_x,
    of_weights,
    of_biases,
    grad_row,
    total_row,
    x_row,
    rows,
    width,
    tiles,
    offset: tl.constexpr,
    centred: tl.constexpr,
    block: tl.constexpr,
    at_once: tl.constexpr,
):
    """Write the gradients of some tiles of rows, and the sums of what these rows give to weight and bias.

    A sum's gradient is that of its norm and `of_total`, that of its other readers.
    """
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)[None, :]
    known = column < width
    factor = tl.load(weight + column, mask=known, other=0.0).to(tl.float32) + offset
    of_weight = tl.zeros([at_once, block], dtype=tl.float32)
    of_bias = tl.zeros([at_once, block], dtype=tl.float32)
    for tile in range(tiles):
        row = (part * tiles + tile) * at_once + tl.arange(0, at_once)
        inside = (row < rows)[:, None] & known
        grad = tl.load(grads + row[:, None] * grad_row + column, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(x + row[:, None] * x_row + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normal = less_mean(given, known, width, centred) * scale
        mean = tl.sum(grad * factor * normal, axis=1)[:, None] / width
        of_rows = less_mean(grad * factor - normal * mean, known, width, centred) * scale
        if of_total is not None:
            of_rows += tl.load(of_total + row[:, None] * total_row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x + row[:, None] * width + column, of_rows.to(of_x.dtype.element_ty), mask=inside)
        of_weight += grad * normal
        of_bias += grad
    column = tl.arange(0, block)
    tl.store(of_weights + part * width + column, tl.sum(of_weight, axis=0), mask=column < width)
    if of_biases is not None:
        tl.store(of_biases + part * width + column, tl.sum(of_bias, axis=0), mask=column < width)


@triton.jit
def sum_rows(x, out, rows, width, block: tl.constexpr, at_once: tl.constexpr):
    """Write the sums of some columns."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], dtype=tl.float32)
    for start in range(0, rows, at_once):
        row = start + tl.arange(0, at_once)[:, None]
        given = tl.load(x + row * width + column[None, :], mask=(row < rows) & (column < width)[None, :], other=0.0)
        total += tl.sum(given, axis=0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < width)
