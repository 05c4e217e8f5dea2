"""Threshold rules: when to leave a cascade, and when to abstain.

search: rules with one dial over sets of open exits. accuracy_target: the cheapest of them with at most so much
accuracy lost, as measured. exit_share: by a cost budget, as published.
risk_control: the same as a promise. sgr, fixed_coverage: abstention. joint_choice: exits and abstention together.
reached, leave_at: the rule itself.
"""

from offramp.runtime.thresholds.accuracy_target import AccuracyTarget, accuracy_target
from offramp.runtime.thresholds.coverage import FixedCoverage, fixed_coverage
from offramp.runtime.thresholds.exit_share import (
    ExitShare,
    exit_share,
    geometric_shares,
    thresholds_for_shares,
)
from offramp.runtime.thresholds.joint import JointChoice, joint_choice
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
from offramp.runtime.thresholds.searching import ExitCost, Rule, cheapest_within, judge, pareto, search
from offramp.runtime.thresholds.sgr import SelectiveRisk, expected_coverage, risk_bound, sgr, sgr_of_any

__all__ = [
    "AccuracyTarget",
    "ExitCost",
    "ExitShare",
    "FixedCoverage",
    "JointChoice",
    "RiskControl",
    "Rule",
    "SelectiveRisk",
    "accuracy_target",
    "betting_bound",
    "betting_p_value",
    "binomial_bound",
    "binomial_p_value",
    "cheapest_within",
    "exit_share",
    "expected_coverage",
    "fixed_coverage",
    "geometric_shares",
    "hoeffding_bentkus_bound",
    "hoeffding_bentkus_p_value",
    "joint_choice",
    "judge",
    "leave_at",
    "pareto",
    "plug_in_bound",
    "plug_in_p_value",
    "reached",
    "risk_bound",
    "risk_control",
    "search",
    "sgr",
    "sgr_of_any",
    "thresholds_for_shares",
]
