"""How sure a metric is: bootstrap intervals, paired comparison of two models, tables by subgroup."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.arrays import Array, Floats
from offramp.runtime.errors import InputError

Metric = TypeVar("Metric", bound=Callable[..., Any])

# Draws are held as (replicates, rows) counts in pieces of at most this many values: 64 MiB.
DRAWN_VALUES = 1 << 23


@dataclass(frozen=True)
class Resampled:
    """A metric made ready for many draws: `many(counts)` maps (R, rows) draw counts to (R,) values."""

    rows: int
    many: Callable[[Floats], Floats]


def resampled(prepare: Callable[..., Resampled]) -> Callable[[Metric], Metric]:
    """Give a metric its vectorised bootstrap: `prepare` takes the metric's own arguments."""

    def attach(metric: Metric) -> Metric:
        metric.__dict__["resampled"] = prepare
        return metric

    return attach


@dataclass(frozen=True)
class Interval:
    """A metric's value on all rows, with a percentile interval. Arrays for metrics that return arrays.

    replicates: (R, …) the values on the resamples.
    """

    value: Any
    low: Any
    high: Any
    confidence: float
    replicates: Floats


@dataclass(frozen=True)
class Comparison:
    """first − second on the same resamples, with a percentile interval. Arrays for metrics that return arrays.

    p_value: two-sided, twice the share of differences on the less populated side of 0, at least 1/(R + 1).
    """

    difference: Any
    low: Any
    high: Any
    p_value: Any
    confidence: float
    replicates: Floats


def _rows(data: Sequence[Array], axis: int) -> int:
    if not data:
        raise InputError("arrays: expected at least one.")
    lengths = {array.shape[axis] for array in data}
    if len(lengths) != 1:
        raise InputError(f"arrays: expected the same number of rows in all, got {sorted(lengths)}.")
    return int(lengths.pop())


def _check(replicates: int, confidence: float, seed: int) -> None:
    if replicates < 1:
        raise InputError(f"replicates: expected at least 1, got {replicates!r}.")
    arrays.fraction(confidence, "confidence")
    arrays.seed(seed)


def draw_counts(rows: int, replicates: int, random: np.random.Generator) -> Iterator[Floats]:
    """How often each row is drawn in each of the resamples, in pieces (r, rows) that fit in memory."""
    piece = max(1, DRAWN_VALUES // max(1, rows))
    for start in range(0, replicates, piece):
        size = min(piece, replicates - start)
        counts = np.empty((size, rows))
        for one in counts:
            one[:] = np.bincount(random.integers(0, rows, rows), minlength=rows)
        yield counts


def _draws(
    metric: Callable[..., Any],
    data: Sequence[Array],
    replicates: int,
    seed: int,
    axis: int,
    options: dict[str, Any],
) -> Floats:
    """(R, …) the metric on R resamples; the same seed and number of rows draw the same rows."""
    rows = _rows(data, axis)
    prepare = getattr(metric, "resampled", None)
    if prepare is not None and axis == 0:
        ready: Resampled = prepare(*data, **options)
        # Rows that the metric leaves out itself (label −1) would shift the draws of a paired comparison.
        if ready.rows == rows:
            return np.concatenate(
                [ready.many(counts) for counts in draw_counts(rows, replicates, np.random.default_rng(seed))]
            )
    random = np.random.default_rng(seed)
    values = []
    for _ in range(replicates):
        drawn = np.sort(random.integers(0, rows, rows))
        values.append(metric(*(array.take(drawn, axis=axis) for array in data), **options))
    return np.asarray(values, np.float64)


def bootstrap(
    metric: Callable[..., Any],
    *data: ArrayLike,
    confidence: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
    axis: int | None = None,
    **options: Any,
) -> Interval:
    """Percentile bootstrap over rows of `metric(*data, **options)`.

    axis: where the rows are in every array, default the metric's own (0; the last for early-exit metrics).
    Seeded: the same call gives the same interval. Without rows value, low and high are NaN.
    """
    _check(replicates, confidence, seed)
    axis = getattr(metric, "rows_axis", 0) if axis is None else axis
    held = [np.asarray(array) for array in data]
    value = metric(*held, **options)
    if not _rows(held, axis):
        nan = np.full(np.shape(value), np.nan)[()]
        return Interval(value, nan, nan, confidence, np.full((replicates, *np.shape(value)), np.nan))
    drawn = _draws(metric, held, replicates, seed, axis, options)
    low, high = _percentiles(drawn, confidence)
    return Interval(value, low, high, confidence, drawn)


def _percentiles(drawn: Floats, confidence: float) -> tuple[Any, Any]:
    tail = (1 - confidence) / 2
    # Resamples on which a metric is undefined say nothing; where all are, so is the interval.
    defined = ~np.isnan(drawn).all(axis=0)
    ends = np.full((2, *drawn.shape[1:]), np.nan)
    if defined.any():
        ends[:, defined] = np.nanquantile(drawn[:, defined], [tail, 1 - tail], axis=0)
    return ends[0][()], ends[1][()]


def compare(
    metric: Callable[..., Any],
    first: Sequence[ArrayLike],
    second: Sequence[ArrayLike],
    *shared: ArrayLike,
    confidence: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
    axis: int | None = None,
    **options: Any,
) -> Comparison:
    """metric(*first, *shared) − metric(*second, *shared) for two models of the same rows, paired resamples.

    E.g. compare(ece, [p_a], [p_b], labels).
    """
    _check(replicates, confidence, seed)
    axis = getattr(metric, "rows_axis", 0) if axis is None else axis
    a = [np.asarray(array) for array in (*first, *shared)]
    b = [np.asarray(array) for array in (*second, *shared)]
    rows = _rows([*a, *b], axis)
    difference = np.asarray(metric(*a, **options)) - np.asarray(metric(*b, **options))
    if not rows:
        nan = np.full(difference.shape, np.nan)[()]
        return Comparison(nan, nan, nan, nan, confidence, np.full((replicates, *difference.shape), np.nan))
    on_first = _draws(metric, a, replicates, seed, axis, options)
    drawn = on_first - _draws(metric, b, replicates, seed, axis, options)
    low, high = _percentiles(drawn, confidence)
    known = (~np.isnan(drawn)).sum(axis=0)
    smaller = np.minimum((drawn <= 0).sum(axis=0), (drawn >= 0).sum(axis=0))
    p_value = np.where(known > 0, np.minimum(1.0, 2 * (smaller + 1) / (known + 1)), np.nan)[()]
    return Comparison(difference[()], low, high, p_value, confidence, drawn)


@dataclass(frozen=True)
class Subgroup:
    """One line of a table by subgroup; group None is all rows."""

    group: Any
    rows: int
    value: Any
    low: Any
    high: Any


def by_subgroup(
    metric: Callable[..., Any],
    groups: ArrayLike,
    *data: ArrayLike,
    confidence: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
    axis: int | None = None,
    **options: Any,
) -> list[Subgroup]:
    """The metric with its interval on all rows, then on each distinct value of `groups` (N,), sorted."""
    axis = getattr(metric, "rows_axis", 0) if axis is None else axis
    held = [np.asarray(array) for array in data]
    names = np.asarray(groups)
    if names.shape != (_rows(held, axis),):
        raise InputError(f"groups: expected {_rows(held, axis)} values, one a row, got shape {names.shape}.")
    table = []
    for group in [None, *np.unique(names).tolist()]:
        rows = np.arange(len(names)) if group is None else np.flatnonzero(names == group)
        found = bootstrap(
            metric,
            *(array.take(rows, axis=axis) for array in held),
            confidence=confidence,
            replicates=replicates,
            seed=seed,
            axis=axis,
            **options,
        )
        table.append(Subgroup(group, len(rows), found.value, found.low, found.high))
    return table
