"""What was chosen for a target."""

from dataclasses import dataclass
from typing import Any

# Standard errors of the measured drop that are kept in hand: of hundreds of rules the luckiest is taken.
MARGIN = 1.645


@dataclass(frozen=True)
class Choice:
    """Thresholds for a target. unmet: what couldn't be kept and the closest that can, in words; None if met.

    share, rivals: where certifying rows chose among rules fixed beforehand, a further promise on the same rows has
    this part of its delta, and is tested for all `rivals` at once, this rule among them; none where it is tested
    alone. Who is tested with whom, and the parts, are fixed beforehand; the parts sum to 1 at most.
    like: the rule that calibrators are fitted for, the same for all rivals but `full`, which has its own; None for
    this one.
    """

    thresholds: tuple[float, ...]
    provenance: dict[str, Any]
    unmet: str | None = None
    share: float = 1.0
    rivals: tuple[tuple[float, ...], ...] = ()
    like: tuple[float, ...] | None = None
