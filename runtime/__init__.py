"""offramp.runtime: load a bundle, run its cascade, calibrate it, measure it."""

from offramp.runtime import calibration, metrics, sample, scores, thresholds
from offramp.runtime.bundle import Manifest, own_version
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import (
    BundleError,
    CascadeClosed,
    ExportError,
    InputError,
    OfframpError,
    RuntimeUnavailable,
    Stopped,
)
from offramp.runtime.online.online import Online
from offramp.runtime.points import OperatingPoint
from offramp.runtime.predictions import Predictions, Records

__all__ = [
    "BundleError",
    "Cascade",
    "CascadeClosed",
    "ExportError",
    "InputError",
    "Manifest",
    "OfframpError",
    "Online",
    "OperatingPoint",
    "Predictions",
    "Records",
    "RuntimeUnavailable",
    "Stopped",
    "calibration",
    "metrics",
    "sample",
    "scores",
    "thresholds",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return own_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
