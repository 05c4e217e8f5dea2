"""From measured figures to a sentence: does a point pay, from which batch on, why not, and what would help."""

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.runtime.jobs.benching.turns import Middle

# Heads, gates and cuts that cost less than this of the whole network aren't what keeps a point from paying.
_CHEAP = 0.05


@dataclass(frozen=True)
class Mode:
    """A way that rows come. rows: in a batch. pace: milliseconds between two batches, None: one right after another."""

    rows: int
    pace: float | None = None

    @property
    def name(self) -> str:
        if self.pace is not None:
            return f"batch {self.rows}, one every {self.pace:g} ms"
        return f"batch {self.rows}, one after another" if self.rows == 1 else f"batch {self.rows}"


@dataclass(frozen=True)
class Measured:
    """A point in a mode. speedup: the plain session's time over the point's, paired. plain, point, nobody: medians,
    seconds a batch; nobody: the point's graphs and gates if nobody leaves early, so nobody − plain is what heads,
    gates, cuts and the code around them cost, and nobody − point what leaving early saves."""

    mode: Mode
    speedup: Middle
    plain: float
    point: float
    nobody: float

    @property
    def pays(self) -> bool:
        return self.speedup.low > 1

    @property
    def costs(self) -> float:
        return self.nobody - self.plain

    @property
    def cheap(self) -> bool:
        return self.costs <= _CHEAP * self.plain

    @property
    def saves(self) -> float:
        return self.nobody - self.point


@dataclass(frozen=True)
class Verdict:
    """sentence: about one point. pays: the modes in which all of the speed-up's 95% interval is above 1. hints: what
    would help."""

    point: str
    sentence: str
    pays: tuple[Mode, ...]
    hints: tuple[str, ...] = ()


def judge(point: str, early_exits: int, measured: Sequence[Measured], threads: int) -> Verdict:
    """The verdict on a point. early_exits: how many exits before the last it has open. measured: a mode each."""
    pays = tuple(one.mode for one in measured if one.pays)
    others = [one for one in measured if not one.pays]
    if not early_exits:
        return Verdict(point, f"{point} leaves nowhere early, so there is nothing that could pay.", pays)
    if not others:
        return Verdict(point, f"{point} pays: {_range(measured)} as fast as the plain session.", pays)
    slower = any(one.speedup.high < 1 for one in others)
    worst = min(others, key=lambda one: one.speedup.value)
    paying = [one for one in measured if one.pays]
    first = _from(measured)
    if first is not None:
        said = f"{point} pays from batch {first} on ({_range(paying)} as fast)"
    elif paying and not slower:
        said = f"{point} pays at {_listed(pays)} ({_range(paying)} as fast)"
    elif paying:
        said = f"{point} pays at {_listed(pays)} only ({_range(paying)} as fast)"
    else:
        said = f"{point} doesn't pay" if slower else f"{point} isn't shown to pay"
    return Verdict(point, f"{said}; {_because(worst)}.", pays, _hints(worst, early_exits, threads))


def ranked(verdicts: Sequence[Verdict], means: Sequence[float]) -> list[Verdict]:
    """The one to speak of first first: which pays in most modes; among equals which is fastest in the mean."""
    order = sorted(range(len(verdicts)), key=lambda k: (-len(verdicts[k].pays), -means[k]))
    return [verdicts[k] for k in order]


def _from(measured: Sequence[Measured]) -> int | None:
    """The smallest batch from which on all modes pay, if none with fewer rows does; None if there is none."""
    first = None
    for rows in sorted({one.mode.rows for one in measured}, reverse=True):
        if not all(one.pays for one in measured if one.mode.rows == rows):
            break
        first = rows
    return None if first is None or any(one.pays for one in measured if one.mode.rows < first) else first


def _because(worst: Measured) -> str:
    low, high = worst.speedup.low, worst.speedup.high
    said = f"at {worst.mode.name} it is {worst.speedup.value:.2f} times as fast [{low:.2f}, {high:.2f}]"
    if worst.speedup.value >= 1:
        return f"{said}, which so few rounds don't show to be faster"
    costs = f"heads, gates and what is around them cost {_ms(worst.costs)}"
    if worst.cheap:
        why = f"too few rows leave early: that saves {_ms(worst.saves)}, and {costs}"
    else:
        more = "more than" if worst.costs > worst.saves else "as much as"
        why = f"its {costs}, {more} the {_ms(worst.saves)} that leaving early saves"
    return f"{said}, because {why}" if high < 1 else f"{said}, within noise: {why}"


def _hints(worst: Measured, early_exits: int, threads: int) -> tuple[str, ...]:
    if worst.speedup.value >= 1:
        return ("more rounds: a larger --seconds, on a machine that does nothing else",)
    hints = []
    if worst.cheap:
        hints.append("let more rows leave: `offramp calibrate` with a smaller --budget or a larger --max-drop")
    elif early_exits > 1:
        hints.append("drop the exits that cost more than they save: `offramp repack --auto --records RECORDS`")
        hints.append("or calibrate a point with fewer exits open")
    else:
        hints.append("a deeper exit, or a cheaper head: the one that is open costs more than its leavers save")
    if worst.mode.rows == 1:
        if threads > 1:
            hints.append("`--threads 1`: small operations gain little by more threads, and waking them costs")
        hints.append("larger batches, if the traffic has them: heads and gates cost a batch little more than a row")
    return tuple(hints)


def _listed(modes: Sequence[Mode]) -> str:
    return "; ".join(mode.name for mode in modes)


def _range(measured: Sequence[Measured]) -> str:
    low, high = (f(one.speedup.value for one in measured) for f in (min, max))
    return f"{low:.2f} times" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f} times"


def _ms(seconds: float) -> str:
    return f"{max(0.0, seconds) * 1e3:.3g} ms"
