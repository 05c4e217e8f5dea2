"""Calibrators: maps from an exit's raw output to probabilities that can be believed.

`get(name, **options)` gives a fresh one; `fit(logits, labels, aux=…, weights=…)` fits it; `apply(logits)`
gives (N, C) probabilities, `score` and `confidence` the calibrated log-odds and probability of the label;
`to_dict`/`from_dict` store it. `register` adds your own subclass of `Calibrator`.
"""

from offramp.runtime.calibration.binning import BBQ, HistogramBinning
from offramp.runtime.calibration.cwmcs import CwMCS
from offramp.runtime.calibration.exits import fit_exits
from offramp.runtime.calibration.identity import Identity
from offramp.runtime.calibration.kernel import (
    ARCondCal,
    KernelCalibrator,
    NWConfidence,
    NWConfidenceEntropy,
)
from offramp.runtime.calibration.linear import ClasswiseTemperature, VectorScaling
from offramp.runtime.calibration.monotone import Beta, Isotonic, Platt, isotonic_regression
from offramp.runtime.calibration.parametric import ParametricTemperature
from offramp.runtime.calibration.powered import Powered, ordered_by, same_order
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.rank_preserving import RankPreservingIsotonic, RankPreservingPower
from offramp.runtime.calibration.rcmmc import RCMMC
from offramp.runtime.calibration.registry import from_dict, get, kind, names, register, unregister
from offramp.runtime.calibration.solvers.attain import at_confidence
from offramp.runtime.calibration.temperature import (
    EnsembleTemperature,
    LogitNorm,
    SoftBinnedTemperature,
    Temperature,
)
from offramp.runtime.calibration.top_one import TopOne

__all__ = [
    "BBQ",
    "RCMMC",
    "ARCondCal",
    "Beta",
    "Calibrator",
    "ClasswiseTemperature",
    "CwMCS",
    "EnsembleTemperature",
    "Given",
    "HistogramBinning",
    "Identity",
    "Isotonic",
    "KernelCalibrator",
    "LogitNorm",
    "NWConfidence",
    "NWConfidenceEntropy",
    "ParametricTemperature",
    "Platt",
    "Powered",
    "RankPreservingIsotonic",
    "RankPreservingPower",
    "SoftBinnedTemperature",
    "Temperature",
    "TopOne",
    "VectorScaling",
    "at_confidence",
    "fit_exits",
    "from_dict",
    "get",
    "isotonic_regression",
    "kind",
    "names",
    "ordered_by",
    "register",
    "same_order",
    "unregister",
]
