"""What was seen of a batch, as tests compare it."""

import numpy as np


def told_apart(reached):
    """The exits that ran, shallow to deep: (exit, rows that it ran for, their scores, their logits)."""
    seen = reached.apart()
    ran = [np.flatnonzero(~np.isnan(score)) for score in seen.score]
    return [(j, ran[j], seen.score[j][ran[j]], z[ran[j]]) for j, z in enumerate(seen.logits) if z is not None]
