"""Is one part of the rows unlike the others, beyond chance?"""

import numpy as np
from offramp.runtime import metrics
from offramp.runtime.arrays import Ints
from offramp.runtime.jobs.data.splits import SHARES, SplitRows

# The chance that parts drawn alike are called unlike, over all tests together.
LEVEL = 0.01
# Chi-square's law is near enough from this many expected rows on; rarer classes are taken together.
LEAST_EXPECTED = 5
# Of so many rows the exact law of a difference in scores is computed; its limit is wrong for few.
EXACT = 500


def unlike(rows: SplitRows) -> list[str]:
    """Parts that differ from the rest in labels, in accuracy or in scores, in words; none where only chance shows.

    Each part against all others: chi-square on its labels, chi-square on the last exit's right and wrong answers, and
    Kolmogorov and Smirnov's test on each exit's scores; Holm over all of them, at 1%.
    """
    from scipy import stats

    labelled, names, p_values = rows.labelled, [], []
    law = "exact" if len(labelled) <= EXACT else "asymp"
    for part in SHARES:
        inside = np.zeros(len(labelled), bool)
        inside[getattr(rows.split, part)] = True
        if not inside.any() or inside.all():
            continue
        for what, values in (("labels", labelled.truth), ("accuracy of the last exit", labelled.correct[-1])):
            table = contingency(np.unique(values, return_inverse=True)[1], inside.astype(np.int64))
            names.append((part, what))
            p_values.append(stats.chi2_contingency(table, correction=True).pvalue if table.shape[1] > 1 else np.nan)
        for j, score in enumerate(labelled.score):
            names.append((part, f"scores of exit {j}"))
            p_values.append(stats.ks_2samp(score[inside], score[~inside], method=law).pvalue)
    adjusted = metrics.holm(p_values)
    found: dict[str, list[tuple[str, float]]] = {}
    for (part, what), p in zip(names, adjusted.tolist(), strict=True):
        if p <= LEVEL:
            found.setdefault(part, []).append((what, p))
    return [
        f"the {part} part differs from the others beyond chance in its {', '.join(what for what, _ in tests)} (p = "
        f"{min(p for _, p in tests):.2g}, Holm over {len(names)} tests): what comes from it may not hold for the rest."
        for part, tests in found.items()
    ]


def contingency(values: Ints, inside: Ints) -> Ints:
    """(2, K) counts outside (0) and inside (1) a part; values too rare to be tested by themselves are one."""
    counts = np.stack([np.bincount(values[inside == side], minlength=values.max() + 1) for side in (0, 1)])
    expected = counts.sum(axis=0) * counts.sum(axis=1).min() / counts.sum()
    rare = expected < LEAST_EXPECTED
    together = np.hstack([counts[:, ~rare], counts[:, rare].sum(axis=1, keepdims=True)])
    return together[:, together.sum(axis=0) > 0]
