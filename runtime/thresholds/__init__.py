"""Threshold rules: when to leave a cascade, and when to abstain."""

from offramp.runtime.thresholds.exit_share import (
    ExitShare,
    exit_share,
    geometric_shares,
    thresholds_for_shares,
)
from offramp.runtime.thresholds.sgr import SelectiveRisk, risk_bound, sgr

__all__ = [
    "ExitShare",
    "SelectiveRisk",
    "exit_share",
    "geometric_shares",
    "risk_bound",
    "sgr",
    "thresholds_for_shares",
]
