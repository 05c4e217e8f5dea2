"""What was chosen for a target."""

from dataclasses import dataclass
from typing import Any

# Standard errors of the measured drop that are kept in hand: of hundreds of rules the luckiest is taken.
MARGIN = 1.645


@dataclass(frozen=True)
class Choice:
    """Thresholds for a target. unmet: what couldn't be kept and the closest that can, in words; None if met.

    share: where certifying rows chose among rules fixed beforehand, this one's part of the delta of a further
    promise on the same rows. The parts are fixed beforehand too, and sum to 1 at most.
    """

    thresholds: tuple[float, ...]
    provenance: dict[str, Any]
    unmet: str | None = None
    share: float = 1.0
