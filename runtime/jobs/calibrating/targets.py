"""What operating points are asked for: each target is a frozen dataclass."""

import math
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal, localcontext

from offramp.runtime import arrays
from offramp.runtime.errors import InputError


@dataclass(frozen=True)
class Budget:
    """At most this share of the full model's cost, in (0, 1], at 95% confidence: the most accurate rule that keeps it,
    or the simplest that can't be told apart from it."""

    share: float
    name: str = ""
    kind: str = field(default="budget", init=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.share, "budget", high_open=False)


@dataclass(frozen=True)
class MaxMs:
    """At most this many milliseconds a row on average, as the `TimeModel` of this machine expects them."""

    ms: float
    name: str = ""
    kind: str = field(default="max-ms", init=False)

    def __post_init__(self) -> None:
        if not (self.ms > 0 and math.isfinite(self.ms)):
            raise InputError(f"max_ms: expected milliseconds above 0, got {self.ms!r}.")


@dataclass(frozen=True)
class MaxDrop:
    """Accuracy at most this much below the full model's, as measured: the cheapest rule, with 1.645 standard errors in
    hand. Where no abstention is promised from the certify rows, it must not be more on them either."""

    drop: float
    name: str = ""
    kind: str = field(default="max-drop", init=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.drop, "max_drop")


@dataclass(frozen=True)
class Guarantee:
    """Accuracy at most `epsilon` below the full model's, with probability ≥ 1 − delta over the certifying rows."""

    epsilon: float
    delta: float = 0.05
    name: str = ""
    kind: str = field(default="guarantee", init=False)

    def __post_init__(self) -> None:
        arrays.fraction(self.epsilon, "guarantee")
        arrays.fraction(self.delta, "delta")


@dataclass(frozen=True)
class AbstainRisk:
    """Error among the answered rows at most `risk`, with probability ≥ 1 − delta over the certifying rows."""

    risk: float
    delta: float = 0.05

    def __post_init__(self) -> None:
        arrays.fraction(self.risk, "abstain_risk")
        arrays.fraction(self.delta, "delta")


Target = Budget | MaxMs | MaxDrop | Guarantee
DEFAULT = (Budget(0.5, "balanced"), Budget(0.3, "fast"))


def label_of(target: Target) -> str:
    """The operating point's name where none was given."""
    if target.name:
        return target.name
    if isinstance(target, Budget):
        return f"budget-{percent(target.share)}"
    if isinstance(target, MaxMs):
        return f"max-ms-{target.ms:g}"
    if isinstance(target, MaxDrop):
        return f"max-drop-{percent(target.drop)}"
    return f"guarantee-{percent(target.epsilon)}"


def percent(share: float) -> str:
    return f"{share * 100:.6g}%"


def percent_above(share: float, asked: float, digits: int = 6, rounding: str = ROUND_CEILING) -> str:
    """A share that is above what was asked for, and reads so: with more digits, where it takes them.

    rounding: one of decimal's; up by default, so that who asks for what is said gets it.
    """
    for more in range(digits, 13):
        with localcontext(prec=more, rounding=rounding):
            shown = +Decimal(f"{share * 100:.12g}")  # not what a float adds behind that
        if shown > Decimal(f"{asked * 100:.6g}"):
            break
    return f"{shown.normalize():f}%"
