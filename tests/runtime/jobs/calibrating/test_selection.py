"""Which calibrator serves an exit, and why."""

from dataclasses import replace

import numpy as np
import pytest
from made_records import made_up
from offramp.runtime import OperatingPoint, calibration, metrics, scores
from offramp.runtime.jobs.calibrating.comparison import compare_points
from offramp.runtime.jobs.calibrating.selection import (
    AUTO,
    FOLDS,
    Measured,
    Selector,
    decide,
    pooled,
    resolve,
)
from offramp.runtime.jobs.data.labelled_rows import labelled_rows
from offramp.runtime.jobs.data.opened import own_logits
from offramp.runtime.points import full


def selector(records, names, rows=None):
    labelled = labelled_rows(records)
    labelled = labelled if rows is None else labelled.take(rows)
    return Selector(labelled, np.arange(len(labelled)) % 3 > 0, names)


def drawn(rows, sharp=1.0, seed=0, classes=5):
    """Logits of which 1/sharp times are calibrated, and labels drawn from what those say."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((rows, classes)) * 2
    p = scores.softmax(z)
    y = (rng.random(rows)[:, None] > p.cumsum(axis=1)).sum(axis=1).clip(0, classes - 1)
    return (z * sharp).astype(np.float32), y


def true_ece(chosen, sharp):
    """ECE on rows whose probability of being right is known: no noise of labels in it."""
    z, _ = drawn(50_000, sharp, seed=99)
    confidence = chosen.confidence({"logits": z})
    known = scores.msr(z.astype(np.float64) / sharp)
    bins = np.ceil(confidence * 15).astype(int)
    return np.abs(np.bincount(bins, confidence - known)).sum() / len(z)


def test_calibrated_logits_are_left_nearly_alone():
    made = []
    for seed in range(6):
        chosen, tried = selector(own_logits(*with_one_exit(drawn(1500, seed=seed))).records, AUTO).choose(
            full(1).thresholds
        )
        assert {line.calibrator for line in tried} == set(AUTO)
        assert all(line.why for line in tried)
        made.append(chosen[0])
    assert "identity" in {one.name for one in made}
    fitted = [calibration.get("temperature").fit(*drawn(1500, seed=seed)) for seed in range(6)]
    assert np.mean([true_ece(one, 1.0) for one in made]) < 0.8 * np.mean([true_ece(one, 1.0) for one in fitted])


def with_one_exit(rows):
    z, y = rows
    return [z], y


def test_few_rows_of_somewhat_over_confident_logits_are_cooled():
    """Of the identity and the temperature the lower error stands: no proof is asked for that 700 rows can't give."""
    made = []
    for seed in range(6):
        records = own_logits(*with_one_exit(drawn(700, 1.25, seed=seed))).records
        made += selector(records, AUTO).choose(full(1).thresholds)[0]
    fitted = [calibration.get("temperature").fit(*drawn(700, 1.25, seed=seed)) for seed in range(6)]
    best = np.mean([true_ece(one, 1.25) for one in fitted])
    assert best < true_ece(calibration.get("identity").fit(*drawn(5)), 1.25) / 2
    assert np.mean([true_ece(one, 1.25) for one in made]) <= 1.3 * best


def test_over_confident_logits_are_cooled_and_the_simplest_of_equals_wins():
    chosen, tried = selector(made_up(rows=6000, sharp=3.0), ("identity", "temperature", "cwmcs")).choose(
        full(4).thresholds
    )
    assert [c.name for c in chosen[:3]] == ["identity"] * 3, "exits that are switched off need none"
    assert chosen[3].name == "temperature"
    assert chosen[3].temperature_ == pytest.approx(3.0, rel=0.25)
    assert chosen[3].hedged
    line = next(line for line in tried if line.calibrator == "cwmcs")
    assert line.why == "not significantly better than temperature" or not line.eligible


def test_what_may_change_the_answer_is_tried_and_not_chosen():
    _, tried = selector(made_up(rows=3000, sharp=3.0), ("identity", "vector")).choose(full(4).thresholds)
    line = next(line for line in tried if line.calibrator == "vector")
    assert not line.eligible
    assert "may change the answer" in line.why


class Shuffled(calibration.Calibrator):
    """True about the mean, useless about the row."""

    name = "shuffled"
    preserves_argmax = True
    needs = frozenset({"score"})
    rate_: float

    def _fit(self, z, y, aux, w):
        self.rate_ = float(np.clip((z.argmax(axis=1) == y).mean(), 0.01, 0.99))

    def _score(self, given):
        noise = np.sin(1e4 * given.score.astype(np.float64))
        return np.log(self.rate_ / (1 - self.rate_)) + 1e-3 * noise

    def _apply(self, z, aux):
        return calibration.at_confidence(z, self.score({"logits": z}))


def test_a_score_that_tells_worse_who_should_leave_is_not_eligible():
    calibration.register(Shuffled)
    try:
        bars = (2.0, 2.0, 2.0, -np.inf)
        _, tried = selector(made_up(rows=4000, sharp=2.0), ("identity", "shuffled")).choose(bars)
    finally:
        calibration.unregister("shuffled")
    line = next(line for line in tried if line.calibrator == "shuffled" and line.exits == (0,))
    assert line.eefp < line.eefp_raw
    assert line.eefp_upper < 0
    assert not line.eligible


def test_deep_exits_that_few_rows_reach_share_a_calibrator():
    left = np.repeat([0, 1, 2, 3], [500, 100, 90, 60])
    assert pooled(left, [0, 1, 2, 3]) == [[0], [1], [2, 3]]
    assert pooled(left, [0, 3]) == [[0, 3]]
    assert pooled(left[:100], [0, 1, 2, 3]) == [[0, 1, 2, 3]]


def test_names_are_resolved_simplest_first():
    assert resolve("auto", False) == AUTO
    assert resolve("auto", True)[-1] == "ar_condcal"
    assert resolve("none", False) == ("identity",)
    assert resolve(["cwmcs", "temperature"], False) == ("identity", "temperature", "cwmcs")


def measured(confce, loss, rise=0.0, eefp_upper=0.0, spread=0.1):
    """A calibrator on 400 rows as the judge would have measured it; LinCE^cw is 1 + rise of each group."""
    rng = np.random.default_rng(0)
    return Measured(
        confce=confce,
        confce_draws=confce + spread * rng.standard_normal(400) * confce,
        losses=loss + 0.1 * loss * np.sin(np.arange(400)),
        lince_gram=np.eye(64) * (1 + rise),
        rows=400,
        classes=2,
        eefp=0.8,
        eefp_raw=0.8,
        eefp_upper=eefp_upper,
        ece=0.0,
        preserves_argmax=True,
    )


@pytest.mark.parametrize(
    ("confce", "loss", "wins"),
    [(0.9, 0.6, "temperature"), (1.1, 0.4, "temperature"), (1.1, 0.6, "identity"), (1.0, 0.5, "identity")],
)
def test_the_temperature_stands_if_it_lowers_one_truthful_error(confce, loss, wins):
    tried = {"identity": measured(1.0, 0.5), "temperature": measured(confce, loss)}
    assert decide((0,), tried)[0] == wins


def test_another_serves_only_beyond_chance_and_ece_decides_nothing():
    stands = {"identity": measured(3.0, 0.9), "temperature": measured(1.0, 0.5)}
    assert decide((0,), stands | {"beta": measured(0.5, 0.5)})[0] == "beta"
    noisy = replace(measured(0.5, 0.5), confce_draws=np.random.default_rng(1).normal(0.5, 1.0, 400))
    assert decide((0,), stands | {"beta": noisy})[0] == "temperature"
    assert decide((0,), stands | {"beta": replace(noisy, losses=measured(1.0, 0.4).losses)})[0] == "beta"
    praised = {name: replace(m, ece=0.5) for name, m in stands.items()} | {"beta": noisy}
    assert decide((0,), praised)[0] == "temperature"


@pytest.mark.parametrize(
    ("rise", "eefp_upper", "wins"), [(0.05, 0.0, "beta"), (0.9, 0.0, "identity"), (0.0, -0.01, "identity")]
)
def test_who_harms_the_classes_or_the_order_significantly_is_refused(rise, eefp_upper, wins):
    tried = {"identity": measured(3.0, 0.9), "beta": measured(0.5, 0.3, rise, eefp_upper)}
    winner, lines = decide((0,), tried)
    assert winner == wins
    assert lines[1].eligible == (wins == "beta")


def turns(rows, seed):
    """Rows in the order in which they are judged: fold by fold."""
    fold = np.random.default_rng(seed).permutation(rows) % FOLDS
    return np.argsort(fold, kind="stable")


def test_ties_are_broken_at_random_and_alike_where_calibrators_are_chosen_and_compared():
    rows, rng = 3000, np.random.default_rng(0)
    sure = rng.integers(1, 4, rows)
    right = np.sort(rng.random(rows) < 0.6)
    z = np.zeros((rows, 3), np.float32)
    z[:, 0] = sure
    records = own_logits([z], np.where(right, 0, 1)).records
    chooser = selector(records, ("identity", "platt"))
    (plain,) = (line for line in chooser.choose(full(1).thresholds)[1] if line.calibrator == "identity")
    judged = labelled_rows(records).take(turns(rows, chooser.seed))
    warm = calibration.get("temperature").fit(z, judged.label[0][0] + np.zeros(rows, int))
    old, new = OperatingPoint((-np.inf,), calibrators=(warm,)), OperatingPoint((-np.inf,))
    compared = compare_points({"p": old}, {"p": new}, judged, seed=chooser.seed)
    (line,) = (line for line in compared if line.figure == "n·ConfCE^corr")
    confidence = scores.sigmoid(judged.score[0])
    want = len(judged) * metrics.confce_corr(confidence, judged.correct[0], seed=chooser.seed)
    assert line.new == pytest.approx(want)
    assert plain.confce_corr == pytest.approx(want)
    sorted_by_outcome = metrics.confce_corr(scores.sigmoid(labelled_rows(records).score[0]), right)
    assert want < rows * sorted_by_outcome / 3, "outcomes decided the ties"
