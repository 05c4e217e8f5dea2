"""A small real bundle that ships with the package: handwritten digits, with rows it has never seen.

`examples/digits.py` trains and rebuilds it.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUNDLE = Path(__file__).parent / "digits"
"""The bundle: 3 exits, uint8 8x8 images, calibrated operating points full, balanced and fast."""


def heldout() -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """The held-out digits: images uint8 (497, 8, 8) of 0…16, labels int64 (497,)."""
    with np.load(Path(__file__).parent / "heldout.npz", allow_pickle=False) as archive:
        return archive["x"], archive["labels"]
