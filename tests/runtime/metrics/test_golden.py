"""Every golden value within its tolerance; skipped where the shared files are absent."""

import json
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import calibration, metrics, scores, thresholds

SHARED = Path(__file__).parents[4] / "shared"
VALUES = SHARED / "golden" / "values.json"
TOY = SHARED / "golden" / "toy.json"

pytestmark = pytest.mark.skipif(not VALUES.is_file(), reason="no golden values beside the repository")


def load(path):
    return json.loads(path.read_text()) if path.is_file() else []


@pytest.fixture(scope="session")
def data():
    clinc = np.load(SHARED / "golden" / "clinc150_records.npz")
    wrn = np.load(SHARED / "golden" / "wrn_cifar10.npz")
    ar = np.load(SHARED / "models" / "ar_vit_cifar10" / "records.npz")
    return {
        "clinc150_test": (clinc["test_logits"], clinc["test_labels"]),
        "clinc150_val": (clinc["val_logits"], clinc["val_labels"]),
        "wrn_cifar10": (wrn["predictions"], wrn["ground_truth"]),
        "ar_vit_cifar10": (ar["logits"], ar["labels"], ar["routing"]),
    }


def ranking(name, score, error, args):
    if name == "aurc_fd_shifts":
        return metrics.aurc(score, error, convention="fd-shifts")
    if name == "sgr_coverage":
        return thresholds.sgr(score, error, **args).coverage
    return getattr(metrics, name)(score, error)


def early_exit(name, logits, labels, args):
    score = np.stack([scores.log_odds(z) for z in logits])
    correct = np.stack([scores.top_label(z) == labels for z in logits])
    if name == "eefp":
        return metrics.eefp(score, correct)
    return metrics.eef1(score, correct, [args["threshold"]] * (len(logits) - 1))


def routing(entry, logits, labels, entropies):
    name, args = entry["name"], entry["args"]
    z = logits[entry["exit"]].astype(np.float64)
    profile = metrics.profile(entropies)
    p = scores.softmax(z)
    correct = z.argmax(1) == labels
    if name == "worst_tertile_ece":
        return metrics.worst_tertile_ece(p[5000:], labels[5000:], getattr(profile, args["feature"])[5000:])
    if name.startswith("matched_gap"):
        gap = metrics.matched_gap(p.max(1), correct, profile.r_agg)
        return getattr(gap, name.removeprefix("matched_gap_"))
    kind = "ar_condcal" if name == "ar_condcal_target" else "nw_confidence"
    fitted = calibration.get(kind).fit(z[:5000], labels[:5000], aux={"routing": entropies[:, :5000]})
    row = slice(args["row"], args["row"] + 1)
    return fitted.target({"logits": z[row], "routing": entropies[:, row]})[0]


RANKING = {"auroc_f", "ap_f", "ap_f_err", "aurc", "aurc_fd_shifts", "augrc", "e_aurc", "sgr_coverage"}


def ours(entry, data):
    name, exit_, args = entry["name"], entry["exit"], entry["args"]
    if entry["data"] == "ar_vit_cifar10":
        return routing(entry, *data[entry["data"]])
    values, labels = data[entry["data"]]
    if name in ("eefp", "eef1"):
        return early_exit(name, values, labels, args)[exit_]
    if name == "temperature":
        return calibration.get("temperature").fit(values[exit_], labels).temperature_
    if name == "rank_preserving_power_alpha":
        return calibration.get("rank_preserving_power").fit(values[exit_], labels).alpha_
    logits = None if exit_ is None else values[exit_].astype(np.float64)
    p = values if logits is None else scores.softmax(logits)
    if name in RANKING:
        score = p.max(1) if logits is None else scores.log_odds(values[exit_])
        return ranking(name, score, p.argmax(1) != labels, args)
    return getattr(metrics, name.removesuffix("_netcal_left_closed"))(p, labels, **args)


@pytest.mark.parametrize(
    "entry",
    load(VALUES),
    ids=lambda e: f"{e['data']}-{e['exit']}-{e['name']}-{'-'.join(map(str, e['args'].values()))}",
)
def test_value(entry, data):
    value = ours(entry, data)
    if entry["value"] is None:
        assert np.isnan(value)
    else:
        assert value == pytest.approx(entry["value"], abs=entry["tolerance"], rel=0)


@pytest.mark.parametrize("case", load(TOY), ids=lambda case: case["name"])
def test_toy(case):
    name = case["name"]
    if name == "isotonic":
        fitted = calibration.isotonic_regression(np.array(case["x"], float), np.array(case["y"], float))
        np.testing.assert_allclose(fitted(np.array(case["x"], float)), case["value"])
    elif name == "max_softmax":
        for t, expected in zip(case["temperature"], case["value"], strict=True):
            confidence = scores.msr(np.array(case["logits"]) / t)
            np.testing.assert_allclose(confidence, expected, atol=case["tolerance"])
    elif name == "ranking_swap":
        warm, cold = (scores.log_odds(np.array(case["logits"]), None, 1 / t) for t in case["temperature"])
        assert warm[0] > warm[1]
        assert cold[0] < cold[1]
    elif name == "sgr":
        found = thresholds.sgr(case["scores"], case["error"], case["risk"], case["delta"])
        assert not found.feasible
        assert found.threshold == float("inf")
        assert not thresholds.sgr(case["scores"], case["error"], case["risk"], case["delta"], "binary").feasible
    else:
        extra = {key: case[key] for key in ("bins", "convention") if key in case}
        outcome = case["correct"] if name == "ece" else [1 - right for right in case["correct"]]
        value = getattr(metrics, name)(case["confidence"], outcome, **extra)
        expected = float("nan") if case["value"] is None else case["value"]
        assert value == pytest.approx(expected, abs=1e-12, nan_ok=True)
