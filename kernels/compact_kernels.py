"""Compaction and gathering in Triton. Importing this module imports triton."""

import triton
import triton.language as tl
from offramp.kernels.gate_kernels import stable_compaction


@triton.jit
def compact_rows(leave, live, survivors, count, rows, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """All rows by one program: up to a few thousand."""
    stable_compaction(leave, live, survivors, count, rows, STEPS, BLOCK)


@triton.jit
def _stays(leave, live, at, rows):
    there = at < rows
    stays = (tl.load(leave + at, mask=there, other=1) == 0) & there
    if live is not None:
        stays = stays & (tl.load(live + at, mask=there, other=0) != 0)
    return stays


@triton.jit
def count_blocks(leave, live, counts, rows, BLOCK: tl.constexpr):
    """How many stay in each block of rows."""
    block = tl.program_id(0)
    stays = _stays(leave, live, block * BLOCK + tl.arange(0, BLOCK), rows)
    tl.store(counts + block, tl.sum(stays.to(tl.int32), 0))


@triton.jit
def place_blocks(leave, live, counts, survivors, count, rows, blocks, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Each block's survivors behind those of the blocks before it."""
    block = tl.program_id(0)
    earlier = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        other = step * BLOCK + tl.arange(0, BLOCK)
        earlier += tl.load(counts + other, mask=other < block, other=0)
    before = tl.sum(earlier, 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    stays = _stays(leave, live, at, rows)
    kept = stays.to(tl.int32)
    tl.store(survivors + before + tl.cumsum(kept, 0) - kept, at, mask=stays)
    if block == blocks - 1:
        tl.store(count, before + tl.sum(kept, 0))


@triton.jit
def gather_tensors(sources, targets, starts, sizes, index, picked, rows, SHAPES: tl.constexpr):
    """Rows of several tensors in one launch; each program moves one tile of one tensor.

    sources, targets: a tensor each as whole words. starts: the first program of each, and one past the last.
    sizes: (words a row, rows of the source, tiles across a row, lines to write) of each. index: rows of the source;
    beyond `picked` of them the last is repeated, up to `rows`. SHAPES: (rows, words) of each one's tile.
    """
    program = tl.program_id(0)
    for k in tl.static_range(len(SHAPES)):
        if (program >= starts[k]) & (program < starts[k + 1]):
            tile = program - starts[k]
            words = sizes[k][0]
            height = sizes[k][1]
            across = sizes[k][2]
            line = (tile // across) * SHAPES[k][0] + tl.arange(0, SHAPES[k][0])  # (outer, row) pairs, flattened
            outer = line // rows
            row = line - outer * rows
            chosen = tl.load(index + tl.minimum(row, picked - 1))
            word = (tile % across) * SHAPES[k][1] + tl.arange(0, SHAPES[k][1])
            there = (line[:, None] < sizes[k][3]) & (word[None, :] < words)
            source = (outer.to(tl.int64) * height + chosen) * words
            target = line.to(tl.int64) * words
            moved = tl.load(sources[k] + source[:, None] + word[None, :], mask=there)
            tl.store(targets[k] + target[:, None] + word[None, :], moved, mask=there)
