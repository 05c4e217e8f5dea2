from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime.errors import InputError
from offramp.runtime.online.alarms import Alarms
from offramp.runtime.online.watch import ANSWERS, LABELS, SHADOW_RUNS, Watch
from offramp.runtime.online.window import Window
from served_rows import made_up, served

BARS = (2.0, 2.0, -np.inf)


def stored(rows, seed, *, sharp=1.0, version=1, first=0.0, wrong=0.0, **options):
    """Rows as a store will have them in the end, and when each was run to its end (NaN: it wasn't)."""
    random = np.random.default_rng(seed)
    logits, label = made_up(rows, sharp=sharp, seed=seed)
    label = np.where(random.random(rows) < wrong, (label + 1) % 5, label)
    window = served(logits, label, BARS, version=version, first=first, seed=seed, **options)
    late = np.where(window.label >= 0, window.time + random.exponential(200.0, rows), np.nan)
    ran = np.where(window.complete, window.time + random.exponential(5.0, rows), np.nan)
    return replace(window, labelled=late, seq=np.arange(rows) + int(first)), ran


def seen_at(rows, ran, time, limit):
    """The newest rows as a store has them at a time: without what comes later."""
    window = rows.take((rows.time <= time) & (np.cumsum((rows.time <= time)[::-1])[::-1] <= limit))
    ran = ran[np.isin(rows.seq, window.seq)]
    labelled, run = window.labelled <= time, (ran <= time) | (window.exit == window.exits - 1)
    keep = (np.arange(window.exits)[:, None] <= window.exit) | run
    return replace(
        window,
        labelled=np.where(labelled, window.labelled, np.nan),
        label=np.where(labelled, window.label, -1),
        score=np.where(keep, window.score, np.nan),
        logits=np.where(keep[:, :, None], window.logits, np.float16("nan")),
    )


class Once:
    """What a watch should do, row by row: each is remembered by its number, and nothing is forgotten."""

    def __init__(self, version, reference, late, risk):
        self.version, self.risk = version, risk
        self.least = {ANSWERS: reference, LABELS: late, SHADOW_RUNS: late}
        self.had = {kind: set() for kind in self.least}
        self.first = {kind: [] for kind in self.least}  # one row each
        self.alarms = {}
        self.gone = (-1.0, -1)

    def counts(self, kind, window, i):
        if kind == LABELS:
            return window.label[i] >= 0 and not window.abstained[i]
        return kind == ANSWERS or (window.exit[i] < 2 and not np.isnan(window.score[:, i]).any())

    def look(self, window):
        self.gone = max(self.gone, (window.time[0], window.seq[0]))
        found = []
        for kind, least in self.least.items():
            if kind != ANSWERS and ANSWERS not in self.alarms:
                break
            if kind == LABELS and self.risk is not None and kind not in self.alarms:
                self.alarms[kind] = Alarms.of(window, risk=self.risk, only=kind)
            new = []
            for i in np.argsort(window.labelled, kind="stable") if kind == LABELS else range(len(window)):
                name = int(window.seq[i])
                if name in self.had[kind] or (window.time[i], name) < self.gone or not self.counts(kind, window, i):
                    continue
                self.had[kind].add(name)
                if kind in self.alarms:
                    new.append(i)
                    continue
                self.first[kind].append(window.take([i]))
                if len(self.first[kind]) == least:
                    self.alarms[kind] = Alarms.of(reduce(Window.then, self.first[kind]), only=kind)
            if new:
                found += self.alarms[kind].update(window, np.array(new))
        return found


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 120), min_size=3, max_size=8),
    st.integers(60, 300),
    st.sampled_from([None, 0.05, 0.4]),
)
@settings(max_examples=25, deadline=None)
def test_windows_overlap_and_every_row_counts_once(seed, steps, limit, risk):
    rows, ran = stored(sum(steps), seed, wrong=0.5, labelled=0.7, shadow=0.5)
    watch, once = Watch(1, reference=40, late=15, risk=risk), Once(1, 40, 15, risk)
    standing = {}
    for time in np.cumsum(steps) - 1.0:
        window = seen_at(rows, ran, time, limit)
        expected = once.look(window)
        found = watch.look(window)
        assert found == [one for one in expected if one.what not in standing]
        standing.update((one.what, one) for one in found)
    assert watch.standing == standing
    assert set(watch.watched) == {what for kind in once.alarms for what in kind}


def look_often(watch, rows, ran, *, every, limit):
    return [
        one
        for time in np.arange(rows.time[0], rows.time[-1], every)
        for one in watch.look(seen_at(rows, ran, time, limit))
    ]


def test_drift_is_raised_once_and_stands_without_a_label():
    calm, ran = stored(3000, 1, labelled=0.0, shadow=1.0)
    watch = Watch(1, reference=1000, late=1000)
    assert look_often(watch, calm, ran, every=500, limit=2000) == []
    assert watch.watched == (*ANSWERS, *SHADOW_RUNS)
    drifted, ran = stored(6000, 2, sharp=2.0, labelled=0.0, shadow=1.0, first=3000.0)
    raised = [one.what for one in look_often(watch, drifted, ran, every=500, limit=2000)]
    assert set(raised) == set(watch.standing) == {"exit", "score", "agreement"}
    assert len(raised) == 3


def test_a_broken_promise_is_told_by_labels_that_come_late():
    rows, ran = stored(3000, 1, wrong=0.3, labelled=0.5)
    watch = Watch(1, reference=500, risk=0.05)
    for time in (400.0, 800.0, 2900.0):
        watch.look(seen_at(rows, ran, time, 5000))
    assert set(watch.standing) == {"risk"}
    assert watch.standing["risk"].high == 0.05
    usual = Watch(1, reference=500)
    assert look_often(usual, rows, ran, every=300, limit=5000) == []
    assert "risk" in usual.watched


def test_rows_of_other_versions_and_windows_without_rows_change_nothing():
    rows, _ = stored(1000, 1, version=2)
    watch = Watch(1, reference=10)
    assert watch.look(rows.take(np.zeros(1000, bool))) == []
    assert watch.look(rows) == []
    assert watch.watched == ()


def test_mistakes_are_named():
    rows, _ = stored(10, 1)
    with pytest.raises(InputError, match="rows of a store"):
        Watch(1).look(replace(rows, seq=None))
    with pytest.raises(InputError, match="reference and late"):
        Watch(1, late=0)
    with pytest.raises(InputError, match="alpha"):
        Watch(1, alpha=2.0)


@pytest.mark.slow
def test_false_alarms_are_rare_over_a_life_with_late_labels():
    streams, found = 300, 0
    for k in range(streams):
        rows, ran = stored(8000, k, labelled=0.2, shadow=0.1)
        watch = Watch(1, reference=1000, late=200, alpha=0.1)
        found += bool(look_often(watch, rows, ran, every=250, limit=3000))
    assert found / streams <= 0.1 + 3 * np.sqrt(0.09 / streams)
