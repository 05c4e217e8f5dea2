"""What was chosen for a target."""

from dataclasses import dataclass
from typing import Any

# Standard errors of the measured drop that are kept in hand: of hundreds of rules the luckiest is taken.
MARGIN = 1.645


@dataclass(frozen=True)
class Choice:
    """Thresholds for a target. unmet: what couldn't be kept and the closest that can, in words; None if met.

    tested: how many rules, fixed beforehand, certifying rows chose among; a further promise on the same rows
    must share its delta out over them.
    """

    thresholds: tuple[float, ...]
    provenance: dict[str, Any]
    unmet: str | None = None
    tested: int = 1
