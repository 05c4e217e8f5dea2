"""What a row takes at an operating point, in milliseconds and as a share of the full model's."""

from offramp.runtime import metrics
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.data.expected import Interval, Line, known
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.points import OperatingPoint, full


def time_spent(rows: LabelledRows, point: OperatingPoint, times: TimeModel | None) -> Line:
    """{"ms", "ms_low", "ms_high", "ms_fraction", …} of one of these rows by itself; nothing without times or rows.

    Intervals are of which rows come, 95%: the times themselves are taken as they were measured.
    """
    if times is None or not len(rows):
        return {}
    opened = times.leaving(point.exits)
    ends = [opened[j] for j in point.exits]
    spent = times.spent(rows.score, point.thresholds)
    mean, interval = float(spent.mean()), known(metrics.bounded_mean_interval(spent, min(ends), max(ends)))
    whole = times.leaving(full(rows.exits).exits)[-1]
    return {
        "ms": mean,
        **_ends("ms", interval, 1.0),
        "ms_fraction": mean / whole if whole else None,
        **_ends("ms_fraction", interval if whole else None, whole),
    }


def _ends(figure: str, interval: Interval | None, unit: float) -> Line:
    low, high = interval or (None, None)
    return {
        f"{figure}_low": None if low is None else low / unit,
        f"{figure}_high": None if high is None else high / unit,
    }
