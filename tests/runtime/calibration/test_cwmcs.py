from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.calibration.cwmcs import GAMMAS, UNGUARDED, normalised
from offramp.runtime.errors import InputError

SHARED = Path(__file__).parents[4] / "shared"
PUBLISHED = {"mode": "class", "by": "true", "objective": "ece", "clip_outliers": True, **UNGUARDED}


def draw(seed, rows=800, classes=5, sharpness=None):
    """Logits with another sharpness for each predicted class."""
    random = np.random.default_rng(seed)
    z = random.normal(0, 2, (rows, classes))
    cumulated = scores.softmax(z).cumsum(axis=1)
    y = (random.random((rows, 1)) > cumulated[:, :-1]).sum(axis=1)
    own = np.linspace(0.6, 3, classes) if sharpness is None else np.full(classes, sharpness)
    return z * own[z.argmax(1)][:, None], y


def slow_losses(one, z, y):
    """The objective at each γ, straight from the definition."""
    out = []
    for gamma in GAMMAS:
        t = one.temperature_ * (1 + gamma * one.scores_)
        if (t <= 0).any():
            out.append(np.inf)
            continue
        moved = z / t if one.mode == "class" else z / t[z.argmax(1)][:, None]
        p = scores.softmax(moved)
        out.append(metrics.ece(p, y) if one.objective == "ece" else metrics.nll(p, y))
    return np.array(out)


@pytest.mark.parametrize("mode", ["class", "predicted"])
@pytest.mark.parametrize("objective", ["ece", "nll"])
@pytest.mark.parametrize("by", ["true", "predicted"])
def test_gamma_is_the_best_of_its_grid(mode, objective, by):
    z, y = draw(0, 250, 4)
    one = calibration.get("cwmcs", mode=mode, objective=objective, by=by, **UNGUARDED).fit(z, y)
    losses = slow_losses(one, z, y)
    assert losses[np.searchsorted(GAMMAS, one.gamma_)] == pytest.approx(losses.min(), abs=2e-5)
    np.testing.assert_allclose(one.temperatures_, one.temperature_ * (1 + one.gamma_ * one.scores_))
    assert (one.temperatures_ > 0).all()


def test_class_scores_are_measured_after_the_common_temperature():
    z, y = draw(1)
    for by in ("true", "predicted"):
        one = calibration.get("cwmcs", by=by, **UNGUARDED).fit(z, y)
        expected = metrics.cw_mcs(scores.softmax(z / one.temperature_), y, by=by)
        np.testing.assert_allclose(one.scores_, expected / expected.max())


def test_hotter_where_over_confident():
    z, y = draw(2, 5000)
    one = calibration.get("cwmcs").fit(z, y)
    assert one.gamma_ > 0
    assert (np.diff(one.temperatures_) > 0).all()
    common = calibration.get("temperature").fit(z, y)
    assert metrics.nll(one.apply(z), y) < metrics.nll(common.apply(z), y)


def test_class_mode_moves_an_argmax_and_predicted_mode_never_does():
    z = np.array([[2.0, 1.9], [0.0, 1.0]])
    moving = calibration.get("cwmcs", **PUBLISHED).fit(*draw(3, 300, 2))
    moving.temperatures_ = np.array([2.0, 1.0])  # class 0 over-confident, so twice as hot
    assert moving.apply(z).argmax(1).tolist() == [1, 1]
    staying = calibration.get("cwmcs").fit(*draw(3, 300, 2))
    staying.temperatures_ = np.array([2.0, 1.0])
    assert staying.apply(z).argmax(1).tolist() == [0, 1]
    assert staying.preserves_argmax
    assert not moving.preserves_argmax


def test_the_published_form_moves_argmaxes_when_fitted():
    z, y = draw(4, 3000)
    one = calibration.get("cwmcs", **PUBLISHED).fit(z, y)
    assert one.gamma_ != 0
    assert (one.apply(z).argmax(1) != z.argmax(1)).any()


def test_by_true_class_a_calibrated_model_looks_miscalibrated_and_by_predicted_it_does_not():
    random = np.random.default_rng(5)
    prior = np.log([0.5, 0.25, 0.13, 0.08, 0.04])
    z = random.normal(0, 1.2, (200_000, 5)) + prior
    cumulated = scores.softmax(z).cumsum(axis=1)
    y = (random.random((len(z), 1)) > cumulated[:, :-1]).sum(axis=1)
    p = scores.softmax(z)
    by_true, by_predicted = metrics.cw_mcs(p, y), metrics.cw_mcs(p, y, by="predicted")
    assert by_true[0] < -0.05
    assert by_true[-1] > 0.2
    assert np.abs(by_predicted[:3]).max() < 0.011
    t = p.argmax(1) == y
    for k in range(5):
        assert by_true[k] == pytest.approx(p.max(1)[y == k].mean() - t[y == k].mean())


def test_normalisation_is_defined_where_nothing_is_positive():
    all_there = np.ones(3, bool)
    assert normalised(np.array([0.1, -0.4, 0.2]), all_there, "max", False).tolist() == [0.5, -2.0, 1.0]
    assert normalised(np.array([-0.1, -0.4, 0.0]), all_there, "max", False).tolist() == [-0.25, -1.0, 0.0]
    assert normalised(np.zeros(3), all_there, "max", False).tolist() == [0.0] * 3
    np.testing.assert_allclose(normalised(np.array([-1.0, 0.0, 3.0]), all_there, "minmax", False), [0, 0.25, 1])
    assert normalised(np.array([0.3, 0.3, 0.3]), all_there, "minmax", False).tolist() == [0.0] * 3
    assert normalised(np.array([1.0, 9.0, 2.0]), np.array([True, False, True]), "none", False).tolist() == [1, 0, 2]


def test_outliers_are_clipped_to_tukeys_fences():
    raw = np.array([0.0, 0.1, 0.2, 0.3, 10.0])
    q1, q3 = np.quantile(raw, [0.25, 0.75])
    clipped = normalised(raw, np.ones(5, bool), "none", True)
    assert clipped.max() == pytest.approx(q3 + 1.5 * (q3 - q1))
    assert clipped[:4].tolist() == raw[:4].tolist()


def test_an_absent_class_keeps_the_common_temperature():
    z, y = draw(6, 400, 6)
    kept = (y != 5) & (z.argmax(1) != 5)
    one = calibration.get("cwmcs", by="true").fit(z[kept], y[kept])
    assert one.scores_[5] == 0
    assert one.temperatures_[5] == one.temperature_


def test_far_negative_scores_restrict_gamma_so_that_temperatures_stay_positive():
    one = calibration.get("cwmcs", by="true", objective="ece", normalize="max", **UNGUARDED)
    z, y = draw(7, 500, 4, 0.2)
    one.fit(z, y)
    assert one.scores_.min() < -1 or one.scores_.max() == pytest.approx(1)
    assert (one.temperatures_ > 0).all()


def exits():
    """(name, logits, labels) of the shared records."""
    clinc = np.load(SHARED / "golden" / "clinc150_records.npz")
    y = np.concatenate([clinc["val_labels"], clinc["test_labels"]])
    z = np.concatenate([clinc["val_logits"], clinc["test_logits"]], axis=1)
    yield from ((f"clinc150-{j}", z[j], y) for j in range(6))
    wrn = np.load(SHARED / "golden" / "wrn_cifar10.npz")
    yield "wrn", np.log(np.maximum(wrn["predictions"], 1e-30)), wrn["ground_truth"].ravel()
    ar = np.load(SHARED / "models" / "ar_vit_cifar10" / "records.npz")
    yield from ((f"ar_vit-{j}", ar["logits"][j], ar["labels"]) for j in range(3))


@pytest.mark.skipif(not SHARED.is_dir(), reason="no records beside the repository")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rows", [500, 1000, 3000, 5000])
def test_on_no_real_exit_is_it_worse_than_nothing_beyond_noise(seed, rows):
    for name, z, y in exits():
        order = np.random.default_rng(seed).permutation(len(y))
        fit, test = order[:rows], order[rows:]
        p = calibration.get("cwmcs").fit(z[fit], y[fit]).apply(z[test].astype(float))
        plain = scores.softmax(z[test].astype(float))
        own = np.arange(len(test)), y[test]
        rise = np.log(np.maximum(plain[own], 1e-300)) - np.log(np.maximum(p[own], 1e-300))
        assert rise.mean() <= 2 * rise.std() / np.sqrt(len(rise)), name


def test_a_common_temperature_that_few_rows_leave_in_doubt_stays_at_1():
    moved = []
    for seed in range(40):
        z, y = draw(seed, 100, 4, 1.0)
        moved.append(calibration.get("cwmcs").fit(z, y).temperature_ != 1)
        assert calibration.get("cwmcs", sure=0).fit(z, y).temperature_ != 1
    assert sum(moved) <= 2
    z, y = draw(0, 2000, 4, 2.0)
    assert calibration.get("cwmcs").fit(z, y).temperature_ == calibration.get("temperature").fit(z, y).temperature_


def test_classes_of_few_rows_are_moved_little_and_a_handful_of_rows_not_at_all():
    z, y = draw(8, 4000, 5)
    rare = (z.argmax(1) != 4) | (np.arange(4000) % 40 == 0)
    kept = calibration.get("cwmcs").fit(z[rare], y[rare])
    free = calibration.get("cwmcs", **UNGUARDED).fit(z[rare], y[rare])
    assert 0 < np.abs(kept.scores_[4] / kept.scores_[3]) < 0.6 * np.abs(free.scores_[4] / free.scores_[3])
    assert calibration.get("cwmcs").fit(z[:9], y[:9]).gamma_ == 0


@pytest.mark.parametrize("floor", [0.25, 0.8])
def test_no_class_is_colder_than_the_floor(floor):
    z, y = draw(9, 3000, 4)
    one = calibration.get("cwmcs", floor=floor, normalize="none").fit(z, y)
    assert (one.temperatures_ >= floor * one.temperature_ - 1e-12).all()


@pytest.mark.parametrize("options", [{"shrinkage": -1}, {"folds": 0}, {"floor": 0.0}, {"floor": 1.0}, {"sure": -1}])
def test_guards_are_checked(options):
    with pytest.raises(InputError, match="cwmcs: expected shrinkage and sure"):
        calibration.get("cwmcs", **options)
