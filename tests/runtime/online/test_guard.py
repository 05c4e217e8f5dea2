from dataclasses import replace

import numpy as np
import pytest
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.errors import InputError
from offramp.runtime.online import guard
from offramp.runtime.online.betting import STAKES
from offramp.runtime.points import OperatingPoint
from served_rows import made_up, served

BARS = (1.5, 1.5, -np.inf)


def fitted(name, logits, label, left):
    return OperatingPoint(BARS, calibrators=calibration.fit_exits(name, logits, label, left))


@pytest.fixture(scope="module")
def incumbent():
    logits, label = made_up(5000, seed=1)
    return fitted("rank_preserving_power", logits, label, served(logits, label, BARS).exit)


def on_trial(incumbent, name, sharp, *, rows=4000, fit=1000, seed=2, **options):
    """A candidate fitted on the first rows of a stream whose logits are sharper than the incumbent's were."""
    logits, label = made_up(rows, sharp=sharp, seed=seed)
    window = served(logits, label, BARS, **options)
    candidate = fitted(name, logits[:, :fit], label[:fit], window.exit[:fit])
    trial = guard.open_trial(window.take(np.arange(fit)), incumbent, candidate, after=window.time[fit - 1])
    return trial, window, candidate


def test_a_candidate_for_a_drift_is_accepted_with_its_numbers(incumbent):
    trial, window, candidate = on_trial(incumbent, "rank_preserving_power", 1.6)
    found = guard.judge(trial, window, incumbent, candidate)
    assert found.verdict == "accept"
    assert found.rows == 3000
    assert found.e_value >= found.needed == pytest.approx(np.pi**2 / 6 / 0.05)
    assert found.change < 0
    assert "nearer" in found.reason
    assert found.after == 999
    assert found.until == 3999


def test_the_old_one_comes_back_by_the_same_test(incumbent):
    _, window, candidate = on_trial(incumbent, "rank_preserving_power", 1.6)
    calm = served(*made_up(4000, seed=5), BARS, first=10_000)
    back = guard.open_trial(calm.take(np.arange(500)), candidate, incumbent, after=window.time[-1], number=2)
    found = guard.judge(back, calm, candidate, incumbent)
    assert found.verdict == "accept"
    assert (
        guard.judge(
            guard.open_trial(calm, incumbent, candidate, after=window.time[-1]), calm, incumbent, candidate
        ).verdict
        == "refuse"
    )


def test_the_numbers_are_those_of_a_plain_reckoning(incumbent):
    trial, window, candidate = on_trial(incumbent, "rank_preserving_power", 1.3, labelled=0.5)
    found = guard.judge(trial, window, incumbent, candidate)
    rows = [i for i in range(1000, 4000) if window.label[i] >= 0]
    assert found.rows == len(rows)
    old, new, right, number = [], [], [], []
    for i in rows:
        j = window.exit[i]
        given = {"score": window.score[j, i : i + 1]}
        old.append(incumbent.calibrators[j].confidence(given)[0])
        new.append(candidate.calibrators[j].confidence(given)[0])
        right.append(float(window.logits[j, i].argmax() == window.label[i]))
        number.append(sum(incumbent.calibrators[j].score(given)[0] > edge for edge in trial.edges))
    assert found.confce_incumbent == pytest.approx(metrics.lince(old, right, groups=number))
    assert found.confce_candidate == pytest.approx(metrics.lince(new, right, groups=number))
    wealth = np.ones(len(STAKES))
    for c, c_new, t, b in zip(old, new, right, number, strict=True):
        wealth *= 1 - STAKES * trial.shift[b] * (c + c_new - 2 * t) / (2 * abs(trial.shift).max())
    assert found.e_value == pytest.approx(wealth.mean())
    shift = np.zeros(len(trial.edges) + 1)
    for i in range(1000):
        j = window.exit[i]
        old, new = (
            point.calibrators[j].score({"score": window.score[j, i : i + 1]}) for point in (incumbent, candidate)
        )
        shift[sum(old[0] > edge for edge in trial.edges)] += (scores.sigmoid(new) - scores.sigmoid(old))[0]
    assert trial.shift == pytest.approx(shift / 1000)


def test_a_temperature_that_mends_confidence_but_ranks_worse_is_refused_and_says_so(incumbent):
    trial, window, candidate = on_trial(incumbent, "temperature", 1.5)
    found = guard.judge(trial, window, incumbent, candidate)
    later = window.after(trial.after)
    old, new = (scores.sigmoid(later.log_odds(point)) for point in (incumbent, candidate))
    assert metrics.ece(new, later.correct) < metrics.ece(old, later.correct)
    assert found.e_value > found.needed
    assert found.verdict == "refuse"
    assert "ranks rows worse: EEFP of exit 1 changes by -0.0" in found.reason
    assert [one.exits for one in found.ranking] == [(0, 1), (0,), (1,)]
    assert found.ranking[2].upper < -guard.MARGIN
    complete = later.take(later.complete)
    every = np.arange(len(complete))
    right = np.array([z.argmax(axis=1) == complete.label for z in complete.logits])
    values = [
        metrics.eefp(np.stack([complete.log_odds_at(j, p.calibrators[j], every) for j in range(3)]), right)
        for p in (candidate, incumbent)
    ]
    assert [one.change for one in found.ranking[1:]] == pytest.approx((values[0] - values[1])[:2])


def test_an_order_that_could_not_be_seen_is_not_accepted(incumbent):
    trial, window, candidate = on_trial(incumbent, "temperature", 2.5, shadow=0.01, labelled=0.08)
    found = guard.judge(trial, window, incumbent, candidate)
    assert found.verdict == "wait"
    assert "30 needed" in found.reason


def test_what_changes_nothing_or_may_change_labels_is_turned_away(incumbent):
    _, window, _ = on_trial(incumbent, "rank_preserving_power", 1.0)
    same = guard.judge(guard.open_trial(window, incumbent, incumbent, after=0.0), window, incumbent, incumbent)
    assert same.verdict == "refuse"
    vector = OperatingPoint(BARS, calibrators=tuple(calibration.get("vector") for _ in BARS))
    with pytest.raises(InputError, match="vector can change a row's label"):
        guard.open_trial(window, incumbent, vector, after=0.0)
    with pytest.raises(InputError, match="exits"):
        guard.open_trial(window, incumbent, OperatingPoint((0.0, -np.inf)), after=0.0)
    with pytest.raises(InputError, match="after"):
        guard.open_trial(window, incumbent, incumbent, after=np.nan)
    with pytest.raises(InputError, match="answered"):
        guard.open_trial(replace(window, abstained=np.ones(4000, bool)), incumbent, incumbent, after=0.0)


def test_one_key_among_several_decides_nothing_alone(incumbent):
    """A client whose labels are all wrong would have the candidate thrown out."""
    trial, window, candidate = on_trial(incumbent, "rank_preserving_power", 1.6)
    random = np.random.default_rng(0)
    liar = random.random(4000) < 0.6
    key = np.where(liar, 7, random.integers(0, 3, 4000))
    lied = replace(window, key=key, label=np.where(liar, (window.served + 1) % 5, window.label))
    free = guard.judge(trial, lied, incumbent, candidate)
    held = guard.judge(trial, lied, incumbent, candidate, share=0.25)
    assert free.left_out == 0
    assert held.left_out > 0
    assert held.rows + held.left_out == free.rows
    among = (lied.key[1000:] == 7).sum() - held.left_out
    assert among <= 0.25 * free.rows + 50


def at_the_edge(random, incumbent, candidate, window):
    """The window with labels under which the candidate is exactly as good: right with probability (c + c′)/2."""
    middle = sum(scores.sigmoid(window.log_odds(point)) for point in (incumbent, candidate)) / 2
    right = random.random(len(window)) < middle
    other = (window.served + 1) % window.classes
    return replace(window, label=np.where(right, window.served, other))


def false_acceptances(incumbent, streams, rows, looks, alpha):
    trial, window, candidate = on_trial(incumbent, "rank_preserving_power", 1.6, rows=1000 + rows)
    trial = replace(trial, alpha=alpha * np.pi**2 / 6)  # all of alpha for this one candidate
    random = np.random.default_rng(0)
    found = 0
    for _ in range(streams):
        made = at_the_edge(random, incumbent, candidate, window)
        ends = np.linspace(1000 + rows / looks, 1000 + rows, looks).astype(int)
        found += any(
            guard.judge(trial, made.take(np.arange(end)), incumbent, candidate).verdict == "accept" for end in ends
        )
    return found / streams


def test_a_candidate_no_better_is_seldom_accepted_however_often_it_is_looked_at(incumbent):
    assert false_acceptances(incumbent, 100, 300, 6, 0.1) <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 100)


@pytest.mark.slow
def test_a_candidate_no_better_is_seldom_accepted_at_length(incumbent):
    assert false_acceptances(incumbent, 1000, 2000, 40, 0.05) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1000)
