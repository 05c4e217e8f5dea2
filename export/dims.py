"""Sizes as formulas in the symbolic axes, found by looking at real shapes.

Exporters annotate some sizes, name some by accident, and leave others out; what a value's shape really
does when an axis grows is seen by running the model at several sizes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod


@dataclass(frozen=True)
class Dim:
    """(factor * product of axes + offset) // divisor."""

    factor: int = 0
    axes: tuple[str, ...] = ()
    offset: int = 0
    divisor: int = 1

    def at(self, sizes: Mapping[str, int]) -> int:
        return (self.factor * prod(sizes[a] for a in self.axes) + self.offset) // self.divisor

    @property
    def constant(self) -> int | None:
        return self.offset // self.divisor if not self.axes else None

    @property
    def plain(self) -> str | None:
        """The axis this size simply is, if it is one."""
        return self.axes[0] if self == Dim(1, self.axes[:1]) and self.axes else None

    def __str__(self) -> str:
        if not self.axes:
            return str(self.constant)
        text = "*".join(([str(self.factor)] if self.factor != 1 else []) + list(self.axes))
        if self.offset:
            text += f"{self.offset:+d}"
        return f"({text})//{self.divisor}" if self.divisor != 1 else text


def fit(samples: Sequence[tuple[Mapping[str, int], int]]) -> Dim | None:
    """The simplest Dim that gives every observed size, or None.

    samples: (axis sizes, observed size); they must differ in every axis to tell axes apart.
    """
    for candidate in _candidates(samples):
        if all(candidate.at(sizes) == size for sizes, size in samples):
            return candidate
    return None


def _candidates(samples: Sequence[tuple[Mapping[str, int], int]]) -> Iterator[Dim]:
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
    for name in names:  # strided windows: (axis + offset) // divisor
        for divisor in (2, 4, 8, 16, 32, 64, 3, 5, 6, 7, 12, 14, 28):
            for offset in range(-divisor, divisor + 1):
                yield Dim(1, (name,), offset, divisor)
                yield Dim(1, (name,), offset + divisor, divisor)


class Cost:
    """A sum of products of sizes, as in FLOPs: {factors: coefficient}, printed with `batch` in front."""

    def __init__(self) -> None:
        self.terms: Counter[tuple[str, ...]] = Counter()

    def add(self, coefficient: int, *dims: Dim) -> None:
        """Add coefficient * the product of dims."""
        terms: Counter[tuple[str, ...]] = Counter({(): coefficient})
        for dim in dims:
            parts: list[tuple[tuple[str, ...], int]]
            if dim.divisor != 1 and dim.axes:
                parts = [((f"({dim})",), 1)]
            elif not dim.axes:
                parts = [((), dim.constant or 0)]
            else:
                parts = [(dim.axes, dim.factor)] + ([((), dim.offset)] if dim.offset else [])
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
