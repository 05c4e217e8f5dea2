"""Threshold rules: when to leave a cascade, and when to abstain.

exit_share: by a cost budget. accuracy_target: the cheapest with at most so much accuracy lost, as measured.
risk_control: the same as a promise. sgr, fixed_coverage: abstention. joint_choice: exits and abstention together.
reached, leave_at: the rule itself.
"""

from offramp.runtime.thresholds.accuracy_target import AccuracyTarget, FrontierPoint, accuracy_target, pareto
from offramp.runtime.thresholds.coverage import FixedCoverage, fixed_coverage
from offramp.runtime.thresholds.exit_share import (
    ExitShare,
    exit_share,
    geometric_shares,
    thresholds_for_shares,
)
from offramp.runtime.thresholds.joint import JointChoice, joint_choice
from offramp.runtime.thresholds.one_dial import (
    MOST_EXITS_FOR_ALL_SETS,
    along,
    between_rows,
    between_values,
    exit_sets,
)
from offramp.runtime.thresholds.risk_control import (
    RiskControl,
    betting_bound,
    betting_p_value,
    binomial_bound,
    binomial_p_value,
    hoeffding_bentkus_bound,
    hoeffding_bentkus_p_value,
    plug_in_bound,
    plug_in_p_value,
    risk_control,
)
from offramp.runtime.thresholds.rule import leave_at, reached
from offramp.runtime.thresholds.sgr import SelectiveRisk, expected_coverage, risk_bound, sgr, sgr_of_any

__all__ = [
    "MOST_EXITS_FOR_ALL_SETS",
    "AccuracyTarget",
    "ExitShare",
    "FixedCoverage",
    "FrontierPoint",
    "JointChoice",
    "RiskControl",
    "SelectiveRisk",
    "accuracy_target",
    "along",
    "betting_bound",
    "betting_p_value",
    "between_rows",
    "between_values",
    "binomial_bound",
    "binomial_p_value",
    "exit_sets",
    "exit_share",
    "expected_coverage",
    "fixed_coverage",
    "geometric_shares",
    "hoeffding_bentkus_bound",
    "hoeffding_bentkus_p_value",
    "joint_choice",
    "leave_at",
    "pareto",
    "plug_in_bound",
    "plug_in_p_value",
    "reached",
    "risk_bound",
    "risk_control",
    "sgr",
    "sgr_of_any",
    "thresholds_for_shares",
]
