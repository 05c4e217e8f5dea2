"""The exit gate's Triton code: a row of logits is read once, and everything the cascade needs is left behind.

Per row, with z' = scale z + bias (float32), y = argmax z' (lowest index), t = inv_temperature[y],
m = max_{k != y} z'_k:
    S = sum_{k != y} exp(t (z'_k - m))          the others, summed against their own maximum
    W = sum_{k != y} t (z'_k - m) exp(t (z'_k - m))
    d = t (m - z'_y)                            how far the others are behind
    score = -(d + log S),  confidence = 1 / (1 + e^d S),  entropy = log(1 + e^d S) - e^d (W + d S) / (1 + e^d S)
d and the score are float64 until they are stored; the rest is float32.
Nothing here is ever log(p / (1 - p)).

Importing this module imports triton; `offramp.kernels.exit_gate` does so only for tensors that need it.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
# exp(-200) is 0 in float32: differences are held above it, so that 0 * difference is never 0 * infinity.
FARTHEST = tl.constexpr(-200.0)


@triton.jit
def _read(row, columns, inside, column_stride, scale, bias):
    """z' at some columns of a row (or rows), float32; -inf outside, and whether each is NaN."""
    z = tl.load(row + columns * column_stride, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        z = z * tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z = z + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    unknown = (z != z) & inside
    known = inside & (z == z)
    return tl.where(known, tl.minimum(tl.maximum(z, -LARGEST), LARGEST), float("-inf")), unknown


@triton.jit
def _log1p(x):
    """log(1 + x) to the last bits (Kahan): the rounding of 1 + x is undone by the quotient."""
    w = 1.0 + x
    safe = tl.where((w == 1.0) | (w <= 0.0), 2.0, w)
    return tl.where(w == 1.0, x, tl.where(w <= 0.0, float("-inf"), tl.log(safe) * x / (safe - 1.0)))


@triton.jit
def _conclude(
    rows,
    there,
    label,
    top,
    runner_up,
    total,
    weighted,
    unknown,
    t,
    classes: tl.constexpr,
    threshold,
    live,
    out_label,
    out_confidence,
    out_score,
    out_entropy,
    out_margin,
    out_leave,
):
    """From a row's sums (or rows') to everything that is stored of it."""
    alone = total == 0.0  # C = 1: there is nobody to be behind
    d = tl.where(alone, -LARGEST, t.to(tl.float64) * (runner_up.to(tl.float64) - top.to(tl.float64)))
    s = tl.where(alone, 1.0, total)
    score = tl.where(alone, LARGEST, -(d + tl.log(s.to(tl.float64))))
    score = tl.minimum(tl.maximum(score, -LARGEST), LARGEST)
    nothing = float("nan")
    known = unknown == 0
    score32 = tl.where(known, score.to(tl.float32), nothing)
    tl.store(out_label + rows, tl.where(known, label, -1), mask=there)
    tl.store(out_score + rows, score32, mask=there)
    leave = (score32 >= threshold) & known
    if live is not None:
        leave = leave & (tl.load(live + rows, mask=there, other=0) != 0)
    tl.store(out_leave + rows, leave.to(tl.int8), mask=there)
    if out_confidence is not None:
        # float32 from here on but for what is missing to 1: where few rows are gated, float64's latency would show.
        near = tl.maximum(d, FARTHEST).to(tl.float32)
        odds = tl.where(alone, 0.0, tl.exp(near))
        others = odds * s
        whole = 1.0 + others
        reported = 1.0 - (others / whole).to(tl.float64)
        tl.store(out_confidence + rows, tl.where(known, reported, nothing), mask=there)
        if out_entropy is not None:
            spread = tl.where(alone, 0.0, odds * (weighted + near * s) / whole)
            tl.store(out_entropy + rows, tl.where(known, _log1p(others) - spread, nothing), mask=there)
        if out_margin is not None:
            tl.store(out_margin + rows, tl.where(known, (1.0 - odds) / whole, nothing), mask=there)


@triton.jit
def stable_compaction(leave, live, survivors, count, rows, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Indices of the rows that stay, in order, by one program; `count` is how many."""
    before = tl.zeros([], tl.int32)
    for step in range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)
        there = at < rows
        # Other programs wrote these in this launch: past the first cache, which may hold what was there before.
        stays = (tl.load(leave + at, mask=there, other=1, cache_modifier=".cg") == 0) & there
        if live is not None:
            stays = stays & (tl.load(live + at, mask=there, other=0) != 0)
        kept = stays.to(tl.int32)
        tl.store(survivors + before + tl.cumsum(kept, 0) - kept, at, mask=stays)
        before += tl.sum(kept, 0)
    tl.store(count, before)


@triton.jit
def _compact_if_last(tickets, leave, live, survivors, count, rows, programs, STEPS: tl.constexpr):
    """The program that finishes last sees all rows decided, and writes down who stays."""
    tl.debug_barrier()  # every thread's stores come before the ticket is drawn
    if tl.atomic_add(tickets, 1, sem="acq_rel") == programs - 1:
        stable_compaction(leave, live, survivors, count, rows, STEPS, 1024)
        tl.store(tickets, 0)  # ready for the next launch on this stream


@triton.jit
def gate_tile(
    logits,
    row_stride,
    column_stride,
    rows,
    scale,
    bias,
    inv_temperature,
    uniform,
    threshold,
    live,
    label,
    confidence,
    score,
    entropy,
    margin,
    leave,
    survivors,
    count,
    tickets,
    classes: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
):
    """Rows that fit on chip whole: ROWS of them a program, all classes at once.

    ALIGNED: rows start at multiples of so many elements, which is what lets loads be wide. COMPACT: tiles of 1,024
    rows to go over when writing down who stays; 0 doesn't.
    """
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = at < rows
    columns = tl.arange(0, BLOCK)[None, :]
    inside = there[:, None] & (columns < classes)
    base = logits + tl.multiple_of(at.to(tl.int64) * row_stride, ALIGNED)[:, None]
    z, bad = _read(base, columns, inside, column_stride, scale, bias)
    unknown = tl.max(bad.to(tl.int32), 1)
    top = tl.max(z, 1)
    lowest = tl.min(tl.where(z == top[:, None], columns, BLOCK), 1)
    lowest = tl.minimum(lowest, classes - 1)
    if inv_temperature is not None:
        t = tl.load(inv_temperature + lowest, mask=there, other=1.0).to(tl.float32)
    else:
        t = tl.zeros([ROWS], tl.float32) + uniform
    rest = tl.where(columns == lowest[:, None], float("-inf"), z)
    runner_up = tl.maximum(tl.max(rest, 1), -LARGEST)
    behind = tl.maximum((rest - runner_up[:, None]) * t[:, None], FARTHEST)
    odds = tl.where(rest > float("-inf"), tl.exp(behind), 0.0)
    _conclude(
        at,
        there,
        lowest,
        top,
        runner_up,
        tl.sum(odds, 1),
        tl.sum(odds * behind, 1),
        unknown,
        t,
        classes,
        threshold,
        live,
        label,
        confidence,
        score,
        entropy,
        margin,
        leave,
    )
    if COMPACT > 0:
        _compact_if_last(tickets, leave, live, survivors, count, rows, tl.num_programs(0), COMPACT)


@triton.jit
def _join(y, m, s, w, t):
    """One more of the others, y, into a lane's running sums s and w against their maximum m: one exponential."""
    behind = tl.maximum(-tl.abs(y - m) * t, FARTHEST)
    e = tl.exp(behind)
    higher = y > m
    w = tl.where(higher, e * (w + behind * s), w + behind * e)
    s = tl.where(higher, s * e + 1.0, s + e)
    return tl.maximum(m, y), s, w


@triton.jit
def _merge(top, index, m, s, w, t):
    """Lanes (or parts of a row) into one: each has its own top, and the others that it saw beside it."""
    best = tl.max(top, 0)
    label = tl.min(tl.where(top == best, index, 2147483647), 0)
    beaten = tl.where(index == label, float("-inf"), top)
    runner_up = tl.maximum(tl.max(beaten, 0), tl.max(tl.where(s > 0, m, float("-inf")), 0))
    runner_up = tl.maximum(runner_up, -LARGEST)
    d_top = tl.maximum((beaten - runner_up) * t, FARTHEST)
    e_top = tl.where(beaten > float("-inf"), tl.exp(d_top), 0.0)
    d_others = tl.maximum((m - runner_up) * t, FARTHEST)
    e_others = tl.where(s > 0, tl.exp(d_others), 0.0)
    total = tl.sum(e_top + e_others * s, 0)
    weighted = tl.sum(e_top * d_top + e_others * (w + d_others * s), 0)
    return best, label, runner_up, total, weighted


@triton.jit
def gate_stream(
    logits,
    row_stride,
    column_stride,
    rows,
    scale,
    bias,
    inv_temperature,
    uniform,
    threshold,
    live,
    label,
    confidence,
    score,
    entropy,
    margin,
    leave,
    survivors,
    count,
    tickets,
    parts_f,
    parts_i,
    classes: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
):
    """Rows too long to hold: a row, or one of its PARTS, is streamed through BLOCK lanes with running sums, in STEPS.

    A per-class temperature isn't known before the label is: then the row is read twice (and PARTS is 1).
    parts_f (rows, 5, PARTS) and parts_i (rows, 2, PARTS): where parts of a row leave their sums for the last one.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    base = logits + tl.multiple_of(row.to(tl.int64) * row_stride, ALIGNED)
    start = part * (STEPS * BLOCK)
    lanes = tl.arange(0, BLOCK)
    t = tl.zeros([], tl.float32) + uniform
    if inv_temperature is not None:
        first_top = tl.full([BLOCK], float("-inf"), tl.float32)
        first_index = tl.zeros([BLOCK], tl.int32)
        for step in range(STEPS):
            columns = step * BLOCK + lanes
            z, _ = _read(base, columns, columns < classes, column_stride, scale, bias)
            first_index = tl.where(z > first_top, columns, first_index)
            first_top = tl.maximum(first_top, z)
        lead = tl.max(first_top, 0)
        t = tl.load(inv_temperature + tl.min(tl.where(first_top == lead, first_index, 2147483647), 0)).to(tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    m = tl.full([BLOCK], -LARGEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    w = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        columns = start + step * BLOCK + lanes
        z, broken = _read(base, columns, columns < classes, column_stride, scale, bias)
        bad = bad | broken.to(tl.int32)
        index = tl.where(z > top, columns, index)
        m, s, w = _join(tl.minimum(z, top), m, s, w, t)
        top = tl.maximum(top, z)
    best, lowest, runner_up, total, weighted = _merge(top, index, m, s, w, t)
    unknown = tl.max(bad, 0)
    last = True
    if PARTS > 1:
        into_f = parts_f + row * 5 * PARTS + part
        into_i = parts_i + row * 2 * PARTS + part
        tl.store(into_f, best)
        tl.store(into_f + PARTS, runner_up)
        tl.store(into_f + 2 * PARTS, total)
        tl.store(into_f + 3 * PARTS, weighted)
        tl.store(into_i, lowest)
        tl.store(into_i + PARTS, unknown)
        tl.debug_barrier()
        last = tl.atomic_add(tickets + 1 + row, 1, sem="acq_rel") == PARTS - 1
        if last:
            each = tl.arange(0, PARTS)
            from_f = parts_f + row * 5 * PARTS + each
            from_i = parts_i + row * 2 * PARTS + each
            tops = tl.load(from_f, cache_modifier=".cg")
            best, lowest, runner_up, total, weighted = _merge(
                tops,
                tl.load(from_i, cache_modifier=".cg"),
                tl.load(from_f + PARTS, cache_modifier=".cg"),
                tl.load(from_f + 2 * PARTS, cache_modifier=".cg"),
                tl.load(from_f + 3 * PARTS, cache_modifier=".cg"),
                t,
            )
            unknown = tl.max(tl.load(from_i + PARTS, cache_modifier=".cg"), 0)
            tl.store(tickets + 1 + row, 0)
    if last:
        lowest = tl.minimum(lowest, classes - 1)
        _conclude(
            row,
            row < rows,
            lowest,
            best,
            runner_up,
            total,
            weighted,
            unknown,
            t,
            classes,
            threshold,
            live,
            label,
            confidence,
            score,
            entropy,
            margin,
            leave,
        )
        if COMPACT > 0:
            _compact_if_last(tickets, leave, live, survivors, count, rows, rows, COMPACT)
