"""How sure the promises are: all of them together, what they take for granted, and whether the test rows gainsay it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from offramp.runtime import metrics
from offramp.runtime.jobs.data.expected import Line
from offramp.runtime.jobs.data.splits import SplitRows
from offramp.runtime.jobs.data.unlike import contingency

# The chance that certify and test rows drawn alike are called unlike, over all tests together.
LEVEL = 0.05

ASSUMED = (
    "Every promise takes for granted that rows to come are drawn like the certify rows, each independently of the "
    "others (i.i.d.). Another source, other classes or another time of the year may break that, and then the promise: "
    "--shift shows how far."
)


def joint(promises: Sequence[Line], looks: int = 1) -> dict[str, Any]:
    """All promises at once: {"promises", "delta_sum", "looks", "together", "sentence"}.

    together: they all hold with at least this probability, 1 − Σδ (the union bound, whatever they have in common),
    None where that says nothing. looks: at the same rows, each of which may have been the one that was kept.
    """
    total = sum(float(line["delta"] or 0.0) for line in promises) * looks
    together = max(0.0, 1 - total) or None
    count = len(promises)
    if not count:
        sentence = "Nothing is promised here: no target was certified."
    elif count == 1 and looks == 1:
        sentence = f"There is one promise, which holds with probability {1 - total:.4g} at least."
    else:
        each = (
            f"each of the {count} promises holds by itself with probability 1 − δ at least"
            if count > 1
            else "the one promise holds with probability 1 − δ at least"
        )
        after = f", after {looks} looks at these rows," if looks > 1 else ""
        least = (
            f"with probability {together:.4g} at least (1 − Σδ)"
            if together is not None
            else f"need not: their δ add up to {total:.3g}, so nothing follows for all at once"
        )
        said = f"{each}; all together{after} {'they hold ' if together is not None else 'they '}{least}."
        sentence = said[0].upper() + said[1:]
    return {"promises": count, "delta_sum": total, "looks": looks, "together": together, "sentence": sentence}


def certify_against_test(promises: Sequence[Line], counts: Sequence[Line], rows: SplitRows) -> dict[str, Any]:
    """Do the certify rows look like the test rows? {"tests": lines, "level", "differs", "sentence"}.

    Fisher's exact test on the errors among the answered and on the rows lost to leaving early, a promise each, and
    chi-square on the labels; p-values by Holm. What was chosen on the certify rows is a little better there, so a
    difference may be that as well.
    """
    on_test = {line["point"]: line for line in counts}
    tests = [_labels(rows)]
    for line in promises:
        other = on_test[line["point"]]
        if line["promise"] == "accuracy drop":
            tests.append(_exact(line["point"], "rows lost to leaving early", line, other, "lost", "rows", "lost"))
        else:
            what = "errors among the answered"
            tests.append(_exact(line["point"], what, line, other, "errors", "answered", "errors_answered"))
    adjusted = metrics.holm([np.nan if test["p_value"] is None else test["p_value"] for test in tests])
    for test, p in zip(tests, adjusted.tolist(), strict=True):
        test["p_holm"] = None if np.isnan(p) else p
    differs = [test for test in tests if test["p_holm"] is not None and test["p_holm"] <= LEVEL]
    known = sum(test["p_holm"] is not None for test in tests)
    if not known:
        sentence = "There are too few rows to compare the certify rows with the test rows."
    elif differs:
        named = "; ".join(
            f"{test['figure']}{' of ' + test['point'] if test['point'] else ''} (p = {test['p_holm']:.2g})"
            for test in differs
        )
        sentence = f"The test rows differ from the certify rows beyond chance, so promises may not hold: {named}."
    else:
        sentence = (
            f"The test rows show no sign against it: {_plural(known, 'comparison')} with the certify rows (labels, "
            f"errors among the answered, rows lost), none different at {LEVEL:.0%} (Holm). That is no proof."
        )
    return {"tests": tests, "level": LEVEL, "differs": bool(differs), "sentence": sentence}


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _labels(rows: SplitRows) -> Line:
    from scipy import stats

    p_value = None
    certify, test = rows.certify.truth, rows.test.truth
    if len(certify) and len(test):
        values = np.unique(np.concatenate([certify, test]), return_inverse=True)[1]
        table = contingency(values, np.repeat([0, 1], [len(certify), len(test)]))
        if table.shape[1] > 1:
            p_value = float(stats.chi2_contingency(table, correction=True).pvalue)
    return _line(None, "labels", (None, len(certify)), (None, len(test)), p_value)


def _exact(
    point: str, figure: str, certify: Mapping[str, Any], test: Mapping[str, Any], hit: str, of: str, seen: str
) -> Line:
    from scipy import stats

    k, m, errors, n = certify.get(hit), certify.get(of), test[seen], test[of]
    p_value = None
    if k is not None and m and n:
        p_value = float(stats.fisher_exact([[k, m - k], [errors, n - errors]]).pvalue)
    return _line(point, figure, (k, m), (errors, n), p_value)


def _line(
    point: str | None,
    figure: str,
    certify: tuple[int | None, int | None],
    test: tuple[int | None, int | None],
    p_value: float | None,
) -> Line:
    return {
        "point": point,
        "figure": figure,
        "certify": certify[0],
        "certify_rows": certify[1],
        "test": test[0],
        "test_rows": test[1],
        "p_value": p_value,
    }
