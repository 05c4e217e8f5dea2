"""Sizes as formulas in the symbolic axes, found by looking at real shapes.

Exporters annotate some sizes, name some by accident, and leave others out; what a value's shape really
does when an axis grows is seen by running the model at several sizes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice
from math import prod

import numpy as np

Sample = tuple[Mapping[str, int], int]
# Times a size, to look there whether another stride does as well.
_FARTHEST = 8
# So many of those that may be meant are told apart at once.
_MOST_STRIDES = 12


@dataclass(frozen=True)
class Dim:
    """(factor * product of axes and quotients + offset) // divisor.

    quotients: sizes that are such formulas themselves, as the height and width of strided maps.
    """

    factor: int = 0
    axes: tuple[str, ...] = ()
    offset: int = 0
    divisor: int = 1
    quotients: tuple["Dim", ...] = ()

    def at(self, sizes: Mapping[str, int]) -> int:
        volume = prod(sizes[a] for a in self.axes) * prod(q.at(sizes) for q in self.quotients)
        return (self.factor * volume + self.offset) // self.divisor

    @property
    def involved(self) -> tuple[str, ...]:
        """Every axis that this size depends on."""
        return (*self.axes, *(axis for q in self.quotients for axis in q.involved))

    @property
    def constant(self) -> int | None:
        return self.offset // self.divisor if not self.involved else None

    @property
    def plain(self) -> str | None:
        """The axis this size simply is, if it is one."""
        return self.axes[0] if self == Dim(1, self.axes[:1]) and self.axes else None

    def __str__(self) -> str:
        if not self.involved:
            return str(self.constant)
        text = "*".join(
            ([str(self.factor)] if self.factor != 1 else []) + list(self.axes) + [f"({q})" for q in self.quotients]
        )
        if self.offset:
            text += f"{self.offset:+d}"
        return f"({text})//{self.divisor}" if self.divisor != 1 else text


def fit(samples: Sequence[Sample], quotients: Iterable[Dim] = ()) -> Dim | None:
    """The simplest Dim that gives every observed size, or None.

    samples: (axis sizes, observed size); they must differ in every axis to tell axes apart. quotients: sizes of other
    tensors, which this one may be a product of.
    """
    for candidate in (*_candidates(samples), *_products(samples, list(quotients))):
        if all(candidate.at(sizes) == size for sizes, size in samples):
            return candidate
    return None


def next_size(samples: Sequence[Sample], axis: str, least: int) -> int | None:
    """Where to look next to know (axis + offset) // divisor for sure: a size of the axis, not below `least`.

    None if the size is no such quotient, or nothing is left to find out.
    """
    windows = list(islice(_windows(samples, axis), _MOST_STRIDES))
    if not windows:
        return None
    divisor, low, high = windows[0]
    if len(windows) > 1:
        guesses = [(d, offset) for d, least_offset, most in windows for offset in {least_offset, most}]

        def undecided(n: int) -> int:
            """How many would still do if that size were looked at, at worst."""
            return Counter((n + offset) // d for d, offset in guesses).most_common(1)[0][1]

        step = max(1, least // 16)
        best = min(range(least, _FARTHEST * least, step), key=undecided)
        if undecided(best) < len(guesses):
            return best
    if low == high:
        return None
    middle = (low + high) // 2  # where an offset of this gives less than one more does
    return next(n for n in range(least, least + divisor) if (n + middle + 1) % divisor == 0)


def _candidates(samples: Sequence[Sample]) -> Iterator[Dim]:
    first_sizes, first = samples[0]
    names = list(first_sizes)
    yield Dim(offset=first)
    for name in names:
        yield Dim(1, (name,))
    for name in names:  # factor * axis + offset
        for sizes, size in samples[1:]:
            step = sizes[name] - first_sizes[name]
            if step and (size - first) % step == 0:
                factor = (size - first) // step
                yield Dim(factor, (name,), first - factor * first_sizes[name])
                break
    for count in (2, 3):
        for axes in combinations_with_replacement(names, count):
            volume = prod(first_sizes[a] for a in axes)
            if volume and first % volume == 0:
                yield Dim(first // volume, axes)
    for name in names:  # strided windows
        for divisor, low, high in _windows(samples, name):
            # No offset and ceilings are usual; else the one in the middle errs least where nobody looked.
            usual = [offset for offset in (0, divisor - 1) if low <= offset <= high]
            yield Dim(1, (name,), usual[0] if usual else (low + high) // 2, divisor)


def _windows(samples: Sequence[Sample], axis: str) -> Iterator[tuple[int, int, int]]:
    """Divisors and their lowest and highest offset with which (axis + offset) // divisor is every size seen.

    Divisors of small primes come first: strides are products of such.
    """
    sizes, seen = np.array([(at[axis], size) for at, size in samples]).T[..., None]
    if (seen == seen[0]).all():
        return
    low = (seen * _DIVISORS - sizes).max(axis=0)
    high = (seen * _DIVISORS - sizes).min(axis=0) + _DIVISORS - 1
    for k in np.flatnonzero(low <= high).tolist():
        yield int(_DIVISORS[k]), int(low[k]), int(high[k])


def _largest_prime(number: int) -> int:
    largest, factor = 1, 2
    while number > 1:
        while number % factor == 0:
            number, largest = number // factor, factor
        factor += 1
    return largest


_DIVISORS = np.array(sorted(range(2, 1025), key=lambda d: (_largest_prime(d), d)))


def _products(samples: Sequence[Sample], quotients: list[Dim]) -> Iterator[Dim]:
    """factor * a product of quotients and plain axes + offset."""
    names, first = list(samples[0][0]), samples[0][1]
    for count in (1, 2, 3):
        for inner in combinations_with_replacement(quotients, count):
            for axes in ((), *((name,) for name in names)):
                volumes = [prod(q.at(n) for q in inner) * prod(n[a] for a in axes) for n, _ in samples]
                other = next((k for k, v in enumerate(volumes) if v != volumes[0]), None)
                if other is None:
                    continue
                factor, rest = divmod(samples[other][1] - first, volumes[other] - volumes[0])
                if factor and not rest:
                    yield Dim(factor, axes, first - factor * volumes[0], quotients=inner)


class Cost:
    """A sum of products of sizes, as in FLOPs: {factors: coefficient}, printed with `batch` in front."""

    def __init__(self) -> None:
        self.terms: Counter[tuple[str, ...]] = Counter()

    def add(self, coefficient: int, *dims: Dim) -> None:
        """Add coefficient * the product of dims."""
        terms: Counter[tuple[str, ...]] = Counter({(): coefficient})
        for dim in dims:
            parts: list[tuple[tuple[str, ...], int]]
            if dim.divisor != 1 and dim.involved:
                parts = [((f"({dim})",), 1)]
            elif not dim.involved:
                parts = [((), dim.constant or 0)]
            else:
                factors = (*dim.axes, *(f"({q})" for q in dim.quotients))
                parts = [(factors, dim.factor)] + ([((), dim.offset)] if dim.offset else [])
            grown: Counter[tuple[str, ...]] = Counter()
            for factors, value in terms.items():
                for more, times in parts:
                    grown[tuple(sorted(factors + more))] += value * times
            terms = grown
        self.terms.update(terms)

    def __str__(self) -> str:
        grouped: dict[bool, list[str]] = {True: [], False: []}
        for factors, coefficient in sorted(self.terms.items(), key=lambda term: (len(term[0]), term[0])):
            rest = list(factors)
            if has_batch := "batch" in rest:
                rest.remove("batch")
            if coefficient:
                grouped[has_batch].append("*".join([str(coefficient), *rest]))
        parts = []
        if grouped[True]:
            parts.append(f"batch*({' + '.join(grouped[True])})")
        return " + ".join(parts + grouped[False]) or "0"
