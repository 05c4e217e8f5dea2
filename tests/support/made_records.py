"""Records of a made-up model, for tests."""

import numpy as np
from offramp.runtime import Records, scores


def made_up(rows=4000, exits=4, classes=5, seed=0, labels=True, sharp=1.0, gap=0.7):
    """Deeper exits are better. Calibrated at sharp = 1, over-confident above."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    gaps = gap * np.arange(1, exits + 1)
    logits = np.stack([g * (rng.standard_normal((rows, classes)) + g * np.eye(classes)[y]) for g in gaps])
    logits = (sharp * logits).astype(np.float32)
    return Records(
        logits=logits,
        score=np.stack([scores.log_odds(z) for z in logits]),
        label=logits.argmax(axis=2).astype(np.int64),
        flops=np.repeat(np.arange(1, exits + 1)[:, None] * 100, rows, axis=1),
        truth=y if labels else None,
    )
