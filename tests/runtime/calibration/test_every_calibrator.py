"""What holds for every calibrator that is registered."""

import json
import subprocess
import sys

import numpy as np
import pytest
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.calibration.cwmcs import UNGUARDED
from offramp.runtime.errors import InputError

NAMES = [name for name in calibration.names() if not name.startswith("test_")]
VARIANTS = [
    *((name, {}) for name in NAMES),
    ("cwmcs", {"mode": "class", "by": "true", "objective": "ece", "clip_outliers": True, **UNGUARDED}),
    ("cwmcs", {"base": "ece", "normalize": "minmax"}),
    ("histogram_binning", {"strategy": "equal_mass", "bins": 7}),
    ("ar_condcal", {"multiple": 0.5}),
    ("powered", {"first": "temperature"}),
]
every = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v))


def draw(seed, rows=300, classes=4, sharpness=2.0):
    """Over-confident logits, labels from their tempered softmax, and routing entropies."""
    random = np.random.default_rng(seed)
    z = random.normal(0, 2, (rows, classes))
    cumulated = scores.softmax(z).cumsum(axis=1)
    y = (random.random((rows, 1)) > cumulated[:, :-1]).sum(axis=1)
    return z * sharpness, y, {"routing": random.random((5, rows))}


@pytest.fixture(scope="module")
def fitted():
    z, y, aux = draw(0)
    return {(name, str(options)): calibration.get(name, **options).fit(z, y, aux=aux) for name, options in VARIANTS}


@every
def test_it_reads_back_exactly_from_json(name, options, fitted):
    one = fitted[name, str(options)]
    again = calibration.from_dict(json.loads(json.dumps(one.to_dict())))
    z, _, aux = draw(1)
    assert type(again) is type(one)
    assert again.to_dict() == one.to_dict()
    np.testing.assert_array_equal(again.apply(z, aux), one.apply(z, aux))
    np.testing.assert_array_equal(again.score({"logits": z, **aux}), one.score({"logits": z, **aux}))


@every
def test_it_gives_probabilities(name, options, fitted):
    z, _, aux = draw(2)
    for dtype in (np.float32, np.float64):
        p = fitted[name, str(options)].apply(z.astype(dtype), aux)
        assert p.shape == z.shape
        assert p.dtype == dtype
        assert (p >= 0).all()
        np.testing.assert_allclose(p.sum(axis=1), 1.0, atol=1e-5)


@every
def test_its_confidence_is_that_of_its_vector(name, options, fitted):
    one = fitted[name, str(options)]
    z, _, aux = draw(3)
    p, confidence = one.apply(z, aux), one.confidence({"logits": z, **aux})
    # The vector's confidence stays within [1/C + 1e-6, 1 − 1e-6]; kernels serve from a grid, within 1e-3.
    near = 1e-3 if isinstance(one, calibration.KernelCalibrator) else 1e-9
    np.testing.assert_allclose(p.max(axis=1), np.clip(confidence, 0.25 + 1e-6, 1), atol=near + 1e-6)
    assert ((confidence >= 0) & (confidence <= 1)).all()
    np.testing.assert_array_equal(confidence, scores.sigmoid(one.score({"logits": z, **aux})))


@every
def test_what_it_says_it_needs_is_all_it_needs(name, options, fitted):
    one = fitted[name, str(options)]
    assert one.needs <= {"score", "label", "entropy", "logits", "routing"}
    z, _, aux = draw(4)
    known = {
        "logits": z,
        "score": scores.log_odds(z),
        "label": scores.top_label(z),
        "entropy": scores.entropy(z),
        **aux,
    }
    only = {key: known[key] for key in one.needs}
    np.testing.assert_allclose(one.score(only), one.score({"logits": z, **aux}), rtol=1e-9, atol=1e-9)
    for missing in one.needs:
        with pytest.raises(InputError, match=missing):
            one.score({key: value for key, value in only.items() if key != missing})


@every
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_if_it_says_that_it_keeps_the_argmax_it_does(name, options, classes):
    for seed in range(3):
        z, y, aux = draw(seed, 200, classes, 3.0)
        one = calibration.get(name, **options).fit(z, y, aux=aux)
        new, _, new_aux = draw(seed + 100, 500, classes, 3.0)
        if one.preserves_argmax:
            np.testing.assert_array_equal(one.apply(new, new_aux).argmax(1), new.argmax(1))


@every
def test_if_it_says_that_it_keeps_the_ranking_it_does(name, options):
    for seed in range(5):
        z, y, aux = draw(seed, 200, 5, 3.0)
        one = calibration.get(name, **options).fit(z, y, aux=aux)
        new, _, new_aux = draw(seed + 100, 2000, 5, 3.0)
        new[::50] = new[0]
        raw, calibrated = scores.log_odds(new), one.score({"logits": new, **new_aux})
        same = (np.argsort(raw, kind="stable") == np.argsort(calibrated, kind="stable")).all()
        assert same or not one.preserves_ranking


def test_declarations_are_not_needlessly_modest():
    """Each calibrator that doesn't promise the ranking, or the argmax, really breaks it somewhere."""
    breaks_ranking, breaks_argmax = set(), set()
    for name, options in VARIANTS:
        for seed in range(4):
            z, y, aux = draw(seed, 150, 4, 0.5 + seed)
            one = calibration.get(name, **options).fit(z, y, aux=aux)
            raw, calibrated = scores.log_odds(z), one.score({"logits": z, **aux})
            if (np.argsort(raw, kind="stable") != np.argsort(calibrated, kind="stable")).any():
                breaks_ranking.add(name)
            if (one.apply(z, aux).argmax(1) != z.argmax(1)).any():
                breaks_argmax.add(name)
    keeps = {name for name in NAMES if calibration.kind(name).preserves_ranking}
    assert keeps == {"identity", "rank_preserving_power", "rank_preserving_isotonic"}
    # Both keep the order unless the fitted slope is 0 or negative, which good data doesn't give.
    assert set(NAMES) - keeps - breaks_ranking <= {"platt", "beta"}
    assert breaks_argmax == {"vector", "classwise_temperature", "cwmcs"}


@every
def test_unlabelled_rows_and_rows_of_no_weight_take_no_part(name, options):
    z, y, aux = draw(5)
    part = np.arange(len(z)) % 3 != 0
    less = calibration.get(name, **options).fit(z[part], y[part], aux={"routing": aux["routing"][:, part]})
    unlabelled = calibration.get(name, **options).fit(z, np.where(part, y, -1), aux=aux)
    unweighted = calibration.get(name, **options).fit(z, y, aux=aux, weights=part.astype(float))
    for other in (unlabelled, unweighted):
        np.testing.assert_allclose(
            other.score({"logits": z, **aux}), less.score({"logits": z, **aux}), rtol=1e-6, atol=1e-6
        )


@every
@pytest.mark.parametrize("outcome", ["all right", "all wrong", "one row", "two classes", "one class", "all tied"])
def test_it_survives_the_corners(name, options, outcome):
    z, y, aux = draw(6, 60)
    if outcome == "all right":
        y = z.argmax(1)
    elif outcome == "all wrong":
        y = z.argmin(1)
    elif outcome == "one row":
        z, y, aux = z[:1], y[:1], {"routing": aux["routing"][:, :1]}
    elif outcome == "two classes":
        z, y = z[:, :2], np.minimum(y, 1)
    elif outcome == "one class":
        z, y = z[:, :1], np.zeros_like(y)
    elif outcome == "all tied":
        z = np.zeros_like(z)
    one = calibration.get(name, **options).fit(z, y, aux=aux)
    given = {"logits": z, **aux}
    assert np.isfinite(one.score(given)).all()
    assert np.isfinite(one.apply(z, aux)).all()
    assert json.loads(json.dumps(one.to_dict(), allow_nan=False))
    none = {"logits": z[:0], "routing": aux["routing"][:, :0]}
    assert one.score(none).shape == (0,)
    assert one.apply(z[:0], none).shape == (0, z.shape[1])


@every
def test_infinite_logits_are_defined(name, options, fitted):
    one = fitted[name, str(options)]
    z, y, aux = draw(7, 50)
    z[0, 0], z[1, 1], z[2, :2], z[3] = np.inf, -np.inf, np.inf, -np.inf
    given = {"logits": z, **aux}
    assert np.isfinite(one.score(given)).all()
    p = one.apply(z, aux)
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-6)
    again = calibration.get(name, **options).fit(z, y, aux=aux)
    assert np.isfinite(again.score(given)).all()


@every
def test_a_class_never_seen_is_no_obstacle(name, options):
    z, y, aux = draw(8, 200, 6)
    one = calibration.get(name, **options).fit(z, np.where(y == 5, 0, y), aux=aux)
    assert np.isfinite(one.apply(z, aux)).all()


@every
def test_a_row_with_nan_is_refused_in_a_fit_and_nan_when_served(name, options, fitted):
    z, y, aux = draw(9, 40)
    broken = z.copy()
    broken[[4, 11], 2] = np.nan
    with pytest.raises(InputError, match="NaN in rows 4, 11"):
        calibration.get(name, **options).fit(broken, y, aux=aux)
    one = fitted[name, str(options)]
    with pytest.raises(InputError, match="NaN in rows 4, 11"):
        one.apply(broken, aux)
    known = {"logits": broken, "score": scores.log_odds(broken), "label": scores.top_label(broken), **aux}
    known["entropy"] = scores.entropy(broken)
    served = one.score({key: known[key] for key in one.needs | {"score"}})
    assert np.flatnonzero(np.isnan(served)).tolist() == [4, 11]


@every
def test_use_before_a_fit_or_with_other_classes_is_refused(name, options, fitted):
    fresh = calibration.get(name, **options)
    if name != "identity":
        with pytest.raises(InputError, match="call fit"):
            fresh.apply(np.zeros((2, 4)))
        with pytest.raises(InputError, match="call fit"):
            fresh.score({"logits": np.zeros((2, 4))})
    with pytest.raises(InputError, match="4 classes"):
        fitted[name, str(options)].apply(np.zeros((2, 7)), {"routing": np.zeros((5, 2))})
    with pytest.raises(InputError, match="at least one labelled row"):
        fresh.fit(np.zeros((2, 4)), [-1, -1])
    with pytest.raises(InputError, match="one-hot"):
        fresh.fit(np.zeros((2, 4)), np.eye(4)[:2])


@every
def test_a_graph_that_does_the_work_gives_the_same_score(name, options, fitted):
    one = fitted[name, str(options)]
    inputs = one.graph_inputs(4)
    if inputs is None:
        return
    z, _, aux = draw(10)
    moved = z * inputs["scale"] + inputs["bias"]
    score = scores.log_odds(moved, None, inputs["inv_temperature"])
    np.testing.assert_allclose(score, one.score({"logits": z, **aux}), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("identity", "vector", "classwise_temperature")])
def test_it_mends_over_confidence(name):
    z, y, aux = draw(11, 3000)
    new, truth, new_aux = draw(12, 3000)
    p = calibration.get(name).fit(z, y, aux=aux).apply(new, new_aux)
    assert metrics.confce_corr(p, truth) < metrics.confce_corr(scores.softmax(new), truth)
    # The power is pinned at 1/C and 1, so it can't follow every shape.
    share = 0.8 if name == "rank_preserving_power" else 0.5
    assert metrics.ece(p, truth) < metrics.ece(scores.softmax(new), truth) * share


def test_names_and_options_are_checked():
    assert set(NAMES) == {
        *("identity", "temperature", "vector", "classwise_temperature", "ensemble_temperature"),
        *("parametric_temperature", "histogram_binning", "bbq", "isotonic", "beta", "platt"),
        *("sb_ece_temperature", "logit_norm", "rcmmc", "nw_confidence", "nw_confidence_entropy", "ar_condcal"),
        *("cwmcs", "rank_preserving_power", "rank_preserving_isotonic", "powered"),
    }
    with pytest.raises(InputError, match="expected one of"):
        calibration.get("nonsense")
    with pytest.raises(InputError, match="cwmcs"):
        calibration.get("cwmcs", colour="red")
    for name, options, word in (
        ("cwmcs", {"mode": "other"}, "mode"),
        ("histogram_binning", {"strategy": "other"}, "strategy"),
        ("histogram_binning", {"bins": 0}, "bins"),
        ("bbq", {"strength": 0.0}, "strength"),
        ("ar_condcal", {"multiple": 0.0}, "multiple"),
        ("vector", {"ridge": -1.0}, "ridge"),
        ("sb_ece_temperature", {"power": 0.0}, "power"),
    ):
        with pytest.raises(InputError, match=word):
            calibration.get(name, **options)


def test_a_file_of_another_name_or_version_is_refused(fitted):
    data = fitted["temperature", "{}"].to_dict()
    with pytest.raises(InputError, match="expected one of"):
        calibration.from_dict({**data, "name": "nonsense"})
    with pytest.raises(InputError, match="version 1, got 2"):
        calibration.from_dict({**data, "version": 2})
    with pytest.raises(InputError, match='name "temperature"'):
        calibration.Temperature.from_dict({**data, "name": "platt"})


def test_a_user_can_register_their_own():
    @calibration.register
    class Halved(calibration.TopOne):
        name = "test_halved"

        def _fit_pairs(self, given, correct, w):
            self.base_ = float(correct.mean())

        def _score(self, given):
            return given.score / 2

    z, y, _ = draw(13)
    one = calibration.get("test_halved").fit(z, y)
    np.testing.assert_allclose(one.score({"logits": z}), scores.log_odds(z) / 2)
    np.testing.assert_array_equal(one.apply(z).argmax(1), z.argmax(1))
    assert calibration.from_dict(one.to_dict()).base_ == one.base_
    with pytest.raises(InputError, match="class attribute `name`"):
        calibration.register(type("Nameless", (calibration.TopOne,), {}))


@every
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_row_alone_has_what_it_has_in_a_batch(name, options, dtype, fitted):
    one = fitted[name, str(options)]
    z, _, aux = draw(14, 1000, 4, 8.0)  # many rows near certainty
    z = z.astype(dtype)
    together, probabilities = one.score({"logits": z, **aux}), one.apply(z, aux)
    for i in range(0, len(z), 7):
        alone = {"routing": aux["routing"][:, i : i + 1]}
        assert one.score({"logits": z[i : i + 1], **alone})[0] == together[i]
        np.testing.assert_array_equal(one.apply(z[i : i + 1], alone)[0], probabilities[i])


@every
def test_equal_numbers_give_equal_parameters_in_every_precision(name, options):
    z, y, aux = draw(15, 1200, 5, 2.0)
    z = z.astype(np.float16)
    wide = calibration.get(name, **options).fit(z.astype(np.float64), y, aux=aux)
    for dtype in (np.float16, np.float32):
        one = calibration.get(name, **options).fit(z.astype(dtype), y, aux=aux)
        assert vars(one).keys() == vars(wide).keys()
        for key in wide.to_dict()["fitted"]:
            mine, theirs = (getattr(each, f"{key}_") for each in (one, wide))
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=key)


def test_importing_any_of_it_loads_no_scipy_matplotlib_or_torch():
    code = (
        "import sys\n"
        "from offramp.runtime import calibration, metrics, plots, scores, simulate, thresholds\n"
        "from offramp.runtime.jobs.auditing import evidence as audit\n"
        "import numpy as np\n"
        "z = np.random.default_rng(0).normal(size=(40, 3))\n"
        "c = calibration.get('temperature').fit(z, z.argmin(1))\n"
        "c.score({'logits': z}), metrics.ece(c.apply(z), z.argmin(1))\n"
        "print(sorted({'scipy', 'matplotlib', 'torch', 'onnx', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
