"""Operating points: rules for leaving and abstaining."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from offramp.runtime.calibration import Calibrator, get
from offramp.runtime.errors import InputError
from offramp.runtime.scores import LARGEST
from offramp.runtime.thresholds.rule import effective

FULL = "full"
MEASURED = ("accuracy", "flops_fraction", "coverage", "risk")
"""Fields of `expected` that every report shows, None where they aren't known."""


@dataclass(frozen=True)
class OperatingPoint:
    """A rule for leaving and abstaining.

    thresholds: one an exit, on the score's scale (log-odds). A row leaves at the first exit whose score
        reaches its threshold; +inf switches an exit off, and the last one is always -inf. What lies beyond ±3.4e38,
        where float32 ends, is ±inf.
    abstain_below: log-odds of the calibrated confidence under which the answer is flagged as an abstention;
        -inf never abstains, +inf always does.
    calibrators: one an exit, or none for plain maximum softmax response.
    expected, provenance: what calibration measured and promised, and how; free-form, kept in the bundle.
    """

    thresholds: tuple[float, ...]
    abstain_below: float = -math.inf
    name: str = "custom"
    calibrators: tuple[Calibrator, ...] = ()
    expected: Mapping[str, Any] = field(default_factory=dict, compare=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        try:
            given: Any = self.thresholds
            if isinstance(given, bytes):  # whose items are numbers
                raise TypeError
            thresholds = tuple(effective(_number(t)) for t in given)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"operating point {self.name!r}: thresholds is {self.thresholds!r}, expected numbers, one an exit."
            ) from error
        try:
            below = _number(self.abstain_below)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"operating point {self.name!r}: abstain_below is {self.abstain_below!r}, expected a number."
            ) from error
        object.__setattr__(self, "thresholds", thresholds)
        object.__setattr__(self, "abstain_below", below)
        if math.isnan(self.abstain_below):
            raise InputError(
                f"operating point {self.name!r}: abstain_below is NaN, expected log-odds; -inf never abstains."
            )
        if not thresholds or any(math.isnan(t) for t in thresholds):
            raise InputError(f"operating point {self.name!r}: expected one threshold an exit, none of them NaN.")
        if thresholds[-1] != -math.inf:
            raise InputError(
                f"operating point {self.name!r}: the last threshold is {thresholds[-1]}, expected -inf: "
                f"the last exit always answers. It was given {len(thresholds)} thresholds, and takes one an exit."
            )
        self._check_measured()
        if self.calibrators and len(self.calibrators) != len(thresholds):
            raise InputError(
                f"operating point {self.name!r}: {len(self.calibrators)} calibrators for {len(thresholds)} exits."
            )

    def _check_measured(self) -> None:
        """`expected` is free-form, but what is reckoned with must be numbers."""
        where = f"operating point {self.name!r}"
        for name in ("expected", "provenance"):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise InputError(f"{where}: {name} is {given!r}, expected a mapping.")
        shares = self.expected.get("exit_shares", ())
        if not isinstance(shares, Sequence) or isinstance(shares, str) or not all(map(_is_number, shares)):
            raise InputError(f"{where}: expected.exit_shares is {shares!r}, expected a list of numbers, one an exit.")
        for name in MEASURED:
            value = self.expected.get(name)
            if value is not None and not _is_number(value):
                raise InputError(f"{where}: expected.{name} is {value!r}, expected a number.")

    def stopping_at(self, exit: int) -> "OperatingPoint":
        """The same rule with nobody going past an exit: there the threshold is -inf, as the last one's is.

        What was measured for the whole rule doesn't hold for the shortened one, so it isn't carried over.
        """
        if not 0 <= exit < len(self.thresholds):
            raise InputError(f"exit is {exit}, expected 0 to {len(self.thresholds) - 1}.")
        thresholds = (*self.thresholds[:exit], *[-math.inf] * (len(self.thresholds) - exit))
        if thresholds == self.thresholds:
            return self
        return replace(self, thresholds=thresholds, expected={}, provenance={})

    def out_of_reach(self) -> "OperatingPoint":
        """The same exits and gates, with thresholds that no row reaches: everybody goes the whole way."""
        bars = (t if t == math.inf else LARGEST for t in self.thresholds[:-1])
        return replace(self, thresholds=(*bars, -math.inf), expected={}, provenance={})

    @property
    def exits(self) -> tuple[int, ...]:
        """The exits that are switched on."""
        return open_exits(self.thresholds)

    def calibrator(self, exit: int) -> Calibrator:
        """The exit's calibrator; the identity where none was fitted."""
        return self.calibrators[exit] if self.calibrators else get("identity")


def open_exits(thresholds: Sequence[float]) -> tuple[int, ...]:
    """The exits that thresholds leave switched on: all but those at +inf."""
    return tuple(j for j, t in enumerate(thresholds) if t != math.inf)


def full(exits: int) -> OperatingPoint:
    """The whole network for every row: nothing leaves early, nothing abstains."""
    return OperatingPoint((*[math.inf] * (exits - 1), -math.inf), name=FULL)


def _number(value: Any) -> float:
    """As a float; TypeError for a bool, or a text other than calibration.json's own: float() would read "0.5", too."""
    if isinstance(value, str | bytes | bool | np.bool_) and value not in ("inf", "-inf"):
        raise TypeError
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
