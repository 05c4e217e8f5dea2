"""Two small real bundles that ship with the package, with rows that they have never seen.

`digits`: handwritten digits, tiny, as it is. `intents`: what an English sentence asks for, one of 150 intents; its
weights are stored as int8, so it has to be unpacked. `examples/` has the scripts that train and rebuild them, NOTICE.md
beside this file says what they are made of.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.errors import InputError
from offramp.runtime.sample.packing import unpack

_HERE = Path(__file__).parent
BUNDLE = _HERE / "digits"
"""The digits' bundle: 3 exits, uint8 8x8 images, calibrated operating points full, balanced and fast."""


def heldout() -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """The held-out digits: images uint8 (497, 8, 8) of 0…16, labels int64 (497,)."""
    with np.load(_HERE / "heldout.npz", allow_pickle=False) as archive:
        return archive["x"], archive["labels"]


def intents(folder: str | Path) -> Path:
    """Unpack the intents' bundle as `folder`, which isn't there yet, and return it: 53 MB in a fifth of a second.

    "~" is your home. Raises InputError if the folder is there already, or can't be written.

    4 exits, after layers 1, 2, 3 and 6 of a small BERT; takes texts; operating points full and fast, which loses at
    most half a point of accuracy. Both abstain on what is unlike the 150 intents.
    """
    try:
        target = Path(folder).expanduser()
    except RuntimeError as error:  # of somebody who isn't known here
        raise InputError(f"folder is {str(folder)!r}, whose home isn't known: name another place.") from error
    return unpack(_HERE / "intents", target)


def sentences() -> tuple[list[tuple[str, str]], list[str]]:
    """Held-out sentences for `intents`: 4,500 with their intents, and 1,000 that ask for something else."""
    held_out = json.loads((_HERE / "intents.json").read_text(encoding="utf-8"))
    return [(text, intent) for text, intent in held_out["test"]], [text for text, _ in held_out["oos_test"]]
