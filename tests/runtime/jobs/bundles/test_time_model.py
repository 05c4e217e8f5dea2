"""Expected time is one formula, whether its times were measured or given."""

import math

import numpy as np
import pytest
from made_records import made_up
from offramp.runtime import InputError, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.bundles.timing import Timings
from offramp.runtime.thresholds import leave_at

RULES = [(2.0, 1.0, -math.inf), (math.inf, 1.0, -math.inf), (0.5, math.inf, -math.inf), (math.inf, math.inf, -math.inf)]


@pytest.fixture(scope="module")
def manifest():
    return read_bundle(sample.BUNDLE).manifest


def measured(manifest, head):
    """A millisecond a block, and a head's time on top of each graph; batches take as long as their rows one by one."""
    graphs = {block.file: 1e-3 * (1 + head) for block in manifest.blocks}
    graphs |= {s.file: 1e-3 * (s.last - s.first + 1 + head) for s in manifest.segments}
    return TimeModel.measured(manifest, Timings((1, 32), {file: (t, 32 * t) for file, t in graphs.items()}))


@pytest.mark.parametrize("thresholds", RULES)
def test_given_times_and_measured_ones_say_the_same_where_heads_are_free(manifest, thresholds):
    score = made_up(rows=500, exits=3).score
    model, given = measured(manifest, 0.0), TimeModel.given([1, 2, 3], 3)
    assert model.exit_ms == pytest.approx(given.exit_ms) == (1, 2, 3)
    want = float((leave_at(score, thresholds) + 1).mean())
    assert given.ms(score, thresholds) == pytest.approx(want)
    for rows in (1, 32):
        assert model.ms(score, thresholds, rows) == pytest.approx(rows * want)


def test_a_closed_exits_head_is_not_paid_for_where_times_are_measured(manifest):
    score = np.zeros((3, 10))
    model = measured(manifest, 0.5)
    assert model.exit_ms == pytest.approx((1.5, 3.0, 4.5))
    open_, closed = ((bar, bar, -math.inf) for bar in (9.0, math.inf))
    assert model.ms(score, open_) == pytest.approx(4.5)
    assert model.ms(score, closed) == pytest.approx(3.5)
    assert TimeModel.given([1.5, 3.0, 4.5], 3).ms(score, closed) == pytest.approx(4.5)


@pytest.mark.parametrize("times", [[1, 2], [3, 2, 4], [1, 2, math.nan], [-1, 2, 3]])
def test_given_times_that_are_none_are_refused(times):
    with pytest.raises(InputError, match="times: expected 3 cumulative milliseconds, one an exit, never falling"):
        TimeModel.given(times, 3)
