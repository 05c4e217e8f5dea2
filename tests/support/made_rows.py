"""Labelled rows of a made-up model, for tests."""

import numpy as np
from offramp.runtime import scores
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, Picked


def labelled(logits, truth, flops=None):
    """Rows of (J, N, C) logits; flops (J,) cumulative, by default 100 a block."""
    exits, rows, classes = logits.shape
    cost = 100 * np.arange(1, exits + 1) if flops is None else np.asarray(flops)
    everything = np.arange(rows)
    return LabelledRows(
        logits=tuple(Picked(z, everything) for z in logits),
        score=np.stack([scores.log_odds(z).astype(np.float32) for z in logits]),
        label=logits.argmax(axis=2).astype(np.int64),
        flops=np.repeat(cost[:, None], rows, axis=1),
        truth=np.asarray(truth),
        rows=everything,
        classes=classes,
    )


def made_rows(rows=200, exits=4, classes=5, seed=0, sharp=1.0, gap=0.7, flops=None):
    """Deeper exits are better. Calibrated at sharp = 1, over-confident above."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, rows)
    gaps = gap * np.arange(1, exits + 1)
    logits = [g * (rng.standard_normal((rows, classes)) + g * np.eye(classes)[truth]) for g in gaps]
    return labelled((sharp * np.stack(logits)).astype(np.float32), truth, flops)
