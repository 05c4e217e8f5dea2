"""Calibrators: maps from an exit's raw output to probabilities that can be believed.

`get(name, **options)` gives a fresh one; `fit(logits, labels, aux=…, weights=…)` fits it; `apply(logits)`
gives (N, C) probabilities, `score` and `confidence` the calibrated log-odds and probability of the label;
`to_dict`/`from_dict` store it. `register` adds your own subclass of `Calibrator`.
"""

from offramp.runtime.calibration.identity import Identity
from offramp.runtime.calibration.protocol import Calibrator, Given
from offramp.runtime.calibration.registry import from_dict, get, kind, names, register

__all__ = ["Calibrator", "Given", "Identity", "from_dict", "get", "kind", "names", "register"]
