"""Batch sizes that a device sees: few, so that a shrinking batch neither re-plans, re-tunes nor re-captures."""

from functools import lru_cache


@lru_cache(maxsize=64)
def buckets(most: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, … and `most`: at most a third of a bucket is padding."""
    sizes = {most}
    power = 1
    while power < most:
        sizes.update(size for size in (power, power + power // 2) if size < most)
        power *= 2
    return tuple(sorted(sizes))


def bucket(rows: int, most: int) -> int:
    """The smallest bucket that holds so many rows, 1 <= rows <= most."""
    return next(size for size in buckets(most) if size >= rows)
