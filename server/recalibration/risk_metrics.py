"""What is known of risk and drift, as Prometheus reads it; there only where the server learns from labels."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from offramp.runtime.online.gauges import COVERAGES, Gauges
from offramp.runtime.online.learning import Learning
from offramp.runtime.online.store.labelling import Outcome
from offramp.runtime.online.watch import ANSWERS, LABELS, SHADOW_RUNS
from offramp.server.metrics import Metrics
from prometheus_client import Counter, Gauge

VERDICTS = ("trial", "accept", "refuse", "seek")
_OF_POINT = (
    ("coverage", "Share of the window's rows that weren't abstained"),
    ("selective_risk", "Share wrong of the labelled, answered rows of the window"),
    ("selective_risk_bound", "Upper 95% limit of the answered rows' risk since the calibration began, at any time"),
    ("aurc", "Area under the risk-coverage curve of the window's labelled rows"),
    ("labelled_rows", "Rows of the window whose label is known"),
)
_OF_EXIT = (
    ("confce_corr", "Confidence calibration error of an exit, corrected for its bias"),
    ("ece", "Expected calibration error of an exit, 15 bins"),
    ("eefp", "Early-exit failure prediction of an exit, on rows with all exits known"),
)


class RiskMetrics:
    """The figures of a server that learns. Gauges are the leader's; an engine that follows shows none."""

    def __init__(self, metrics: Metrics, method: str, exits: int) -> None:
        """method: that candidates are fitted by."""
        self._of_model, self._registry = metrics.of_model, metrics.registry
        self._exits = range(exits)
        feedback = self._counter("feedback_total", "Labels that came, by what became of them", "outcome")
        self._feedback = {one: feedback.labels(**self._of_model, outcome=one) for one in Outcome}
        verdicts = self._counter("recalibrations_total", "Candidates, by what became of them", "method", "outcome")
        self._verdicts = {one: verdicts.labels(**self._of_model, method=method, outcome=one) for one in VERDICTS}
        self._kept = self._counter("kept_rows_total", "Answered rows that were kept").labels(**self._of_model)
        self._dropped = self._counter("dropped_rows_total", "Answered rows that couldn't be kept").labels(
            **self._of_model
        )
        self._shadow = self._counter("shadow_rows_total", "Rows run to the end after they were answered").labels(
            **self._of_model
        )
        self._version = self._gauge("calibration_version", "In force; 0 is the bundle's own").labels(**self._of_model)
        self._failing = self._gauge("store_failing", "1 while nothing is kept or learnt").labels(**self._of_model)
        self._failing.set(0)
        self._by_point = {name: self._gauge(name, text, "operating_point") for name, text in _OF_POINT}
        self._promise = self._gauge(
            "promised_risk", "The selective risk that an operating point promises", "operating_point"
        )
        self._at_coverage = self._gauge(
            "risk_at_coverage", "Risk of the surest rows, by their share", "operating_point", "coverage"
        )
        self._by_exit = {name: self._gauge(name, text, "operating_point", "exit") for name, text in _OF_EXIT}
        self._alarm = self._gauge("drift_alarm", "1 once what is watched has left its limits", "operating_point", "of")
        self._told = (0, 0, 0)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"offramp_{name}", text, (*self._of_model, *labels), registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        # Of several worker processes the one that told last is the leader.
        mode: Any = "livemostrecent"
        labels = (*self._of_model, *labels)
        return Gauge(f"offramp_{name}", text, labels, registry=self._registry, multiprocess_mode=mode)

    def labelled(self, outcomes: Iterable[Outcome]) -> None:
        """Labels came, and this became of them."""
        for outcome in outcomes:
            self._feedback[outcome].inc()

    def decided(self, kinds: Iterable[str]) -> None:
        """Candidates met these ends."""
        for kind in kinds:
            self._verdicts[kind].inc()

    def kept(self, learning: Learning, completed: int, *, failing: bool) -> None:
        """What has come of served rows up to now. completed: rows run to the end. failing: now."""
        now = (learning.kept, learning.dropped, completed)
        for counter, before, after in zip((self._kept, self._dropped, self._shadow), self._told, now, strict=True):
            counter.inc(after - before)
        self._told = now
        self._version.set(learning.version)
        self._failing.set(failing)

    def show(self, point: str, gauges: Gauges, promise: float | None, alarms: Sequence[str]) -> None:
        """The figures of an operating point. promise: the risk it promises. alarms: what has left its limits."""
        of_point = {**self._of_model, "operating_point": point}
        values = {**vars(gauges), "labelled_rows": gauges.labelled}
        for name, gauge in self._by_point.items():
            gauge.labels(**of_point).set(values[name])
        self._promise.labels(**of_point).set(math.nan if promise is None else promise)
        for coverage in COVERAGES:
            risk = gauges.risk_at_coverage[coverage]
            self._at_coverage.labels(**of_point, coverage=f"{coverage:g}").set(risk)
        for name, by_exit in self._by_exit.items():
            for j in self._exits:
                by_exit.labels(**of_point, exit=str(j)).set(values[name][j])
        for what in (*ANSWERS, *LABELS, *SHADOW_RUNS):
            self._alarm.labels(**of_point, of=what).set(what in alarms)

    def hide(self) -> None:
        """Another engine leads: its figures are the ones that count."""
        for gauge in (*self._by_point.values(), self._promise, self._at_coverage, *self._by_exit.values(), self._alarm):
            gauge.clear()
