"""Rows to keep, and stores to keep them in, for tests."""

from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.online.online import Limits
from offramp.runtime.online.store.served import Served
from offramp.runtime.online.store.store import Store

EXITS, CLASSES = 3, 5


def rows(ids: list[str], *, exits: int = EXITS, classes: int = CLASSES, left: int = 0, **other: Any) -> Served:
    """Rows that left at exit `left`; their numbers are those of their first id."""
    rng = np.random.default_rng(abs(hash(ids[0])) % 2**32)
    score = np.full((exits, len(ids)), np.nan, np.float32)
    score[: left + 1] = rng.normal(size=(left + 1, len(ids)))
    logits = [rng.normal(size=(len(ids), classes)).astype(np.float32) * 4 if j <= left else None for j in range(exits)]
    given: dict[str, Any] = {
        "request": ids,
        "row": np.zeros(len(ids), int),
        "time": 1e9,
        "version": 0,
        "point": "balanced",
        "exit": left,
        "abstained": False,
        "score": score,
        "logits": logits,
        "shadow": 0.5,
        "asked": 0.05,
    }
    return Served(**{**given, **other})


def opened(where: str | Path, **limits: Any) -> Store:
    """A store of the model "intents" whose rows stay for ever, unless it is said otherwise."""
    names = [f"class {k}" for k in range(CLASSES)]
    kept = Limits(**{"days": 1e6, **limits})
    return Store.open(where, model="intents", bundle="digest", exits=EXITS, classes=names, limits=kept)
