"""Windows of rows that some cascade might have served, for tests of offramp.runtime.online."""

import numpy as np
from offramp.runtime import scores
from offramp.runtime.online.window import Window
from offramp.runtime.thresholds import leave_at


def served(
    logits,
    label,
    thresholds,
    *,
    first=0.0,
    abstained=None,
    labelled=1.0,
    shadow=1.0,
    asked=None,
    key=None,
    point="balanced",
    version=1,
    seed=0,
):
    """Rows one second apart, with these (J, n, C) logits of all exits, answered by a cascade with these thresholds.

    labelled: share of rows whose label comes, a minute after the answer. shadow: with which probability the exits that
    weren't needed are run, too.
    """
    random = np.random.default_rng(seed)
    exits, n, _ = logits.shape
    score = np.stack([scores.log_odds(z) for z in logits]).astype(np.float32)
    gaps = (logits - logits.max(axis=2, keepdims=True)).astype(np.float16)
    left = leave_at(score, thresholds)
    ran = np.arange(exits)[:, None] <= left
    ran |= random.random(n) < shadow
    known = random.random(n) < labelled
    time = first + np.arange(n, dtype=np.float64)
    return Window(
        time=time,
        labelled=np.where(known, time + 60, np.nan),
        version=np.full(n, version),
        point=np.full(n, point),
        exit=left,
        abstained=np.zeros(n, bool) if abstained is None else abstained,
        score=np.where(ran, score, np.nan).astype(np.float32),
        logits=np.where(ran[:, :, None], gaps, np.nan).astype(np.float16),
        label=np.where(known, label, -1),
        shadow=np.where(left == exits - 1, 1.0, shadow),
        asked=np.full(n, np.nan) if asked is None else asked,
        key=np.zeros(n, np.int64) if key is None else key,
    )


def made_up(n=2000, exits=3, classes=5, sharp=1.0, seed=0):
    """(J, n, C) logits and (n,) labels drawn from their softmax at the last exit; calibrated there at sharp = 1."""
    random = np.random.default_rng(seed)
    base = random.normal(0, 2.0, (n, classes))
    label = (random.gumbel(size=(n, classes)) + base).argmax(axis=1)
    shallow = [base + random.normal(0, 2.0 - 2.0 * j / max(1, exits - 1), (n, classes)) for j in range(exits)]
    return (sharp * np.stack(shallow)).astype(np.float32), label
