"""Metrics and calibrators against the libraries people use: seconds, peak memory, and the value itself.

    python benchmarks/methods.py [--rows 50000] [--classes 1000] [--seconds 20]

Each run has a process of its own, one after another, so that one library's memory isn't another's. Rivals
that aren't installed are named as absent. Install them beside torch without letting pip replace it:
    pip install --no-deps netcal relplot torchmetrics torch-uncertainty lightning-utilities deprecation …
"""

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], Any]
BINS = 15


def make_data(folder: Path, rows: int, classes: int) -> None:
    """Over-confident float32 logits whose best temperature is about 2, and their softmax."""
    random = np.random.default_rng(0)
    logits = random.normal(0, 1.0, (rows, classes)).astype(np.float32)
    labels = random.integers(0, classes, rows)
    # The label is lifted by about what it takes to be the largest of `classes`, so that two in three are
    # right.
    logits[np.arange(rows), labels] += random.normal(np.sqrt(2 * np.log(classes)) + 1.5, 1.5, rows).astype(np.float32)
    logits *= 6
    np.save(folder / "logits.npy", logits)
    np.save(folder / "labels.npy", labels)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.save(folder / "probabilities.npy", powers / powers.sum(axis=1, keepdims=True))


class Data:
    """What a run reads; loaded as it asks, so that peak memory counts only what it needs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.y = np.load(folder / "labels.npy")

    @property
    def p(self) -> np.ndarray:
        return np.load(self._folder / "probabilities.npy")

    @property
    def z(self) -> np.ndarray:
        return np.load(self._folder / "logits.npy")


def offramp(method: str, data: Data) -> Run:
    from offramp.runtime import calibration, metrics

    if method == "temperature.fit":
        z = data.z
        return lambda: calibration.get("temperature").fit(z, data.y).temperature_
    p, y = data.p, data.y
    if method == "aurc":
        rows = np.arange(len(p))

        def run() -> float:
            top = p.argmax(axis=1)
            return metrics.aurc(p[rows, top], top != y)

        return run
    options = {"bins": BINS} if method in ("ece", "classwise_ece") else {}
    return lambda: getattr(metrics, method)(p, y, **options)


def netcal(method: str, data: Data) -> Run:
    y = data.y
    if method == "ece":
        from netcal.metrics import ECE

        p = data.p
        return lambda: ECE(BINS).measure(p, y)
    if method == "confce_corr":
        from netcal.metrics import ACE

        p = data.p
        return lambda: ACE(BINS).measure(p, y)
    if method == "temperature.fit":
        from netcal.scaling import TemperatureScaling

        p = data.p

        def run() -> float:
            # Its weight multiplies log-probabilities: 1/T.
            fitted = TemperatureScaling()
            fitted.fit(p, y)
            return 1.0 / float(np.ravel(fitted.weights)[0])

        return run
    raise LookupError(method)


def torchmetrics(method: str, data: Data) -> Run:
    import torch
    from torchmetrics.functional.classification import multiclass_calibration_error

    if method != "ece":
        raise LookupError(method)
    p, y = torch.from_numpy(data.p), torch.from_numpy(data.y)
    return lambda: float(multiclass_calibration_error(p, y, num_classes=p.shape[1], n_bins=BINS))


def torch_uncertainty(method: str, data: Data) -> Run:
    import torch

    _skip_inits("torch_uncertainty", "torch_uncertainty.metrics", "torch_uncertainty.metrics.classification")
    from torch_uncertainty.metrics.classification import calibration, risk_coverage

    classes = data.p.shape[1]
    makers = {
        "ece": lambda: calibration.CalibrationError(task="multiclass", num_bins=BINS, num_classes=classes),
        "classwise_ece": lambda: calibration.ClasswiseCalibrationError(num_bins=BINS, num_classes=classes),
        "aurc": risk_coverage.AURC,
        "smooth_ece": calibration.SmoothCalibrationError,
    }
    if method not in makers:
        raise LookupError(method)
    p, y = torch.from_numpy(data.p), torch.from_numpy(data.y)

    def run() -> float:
        metric = makers[method]()
        metric.update(p, y)
        return float(metric.compute())

    return run


def _skip_inits(*packages: str) -> None:
    """Import submodules without their packages' __init__, which wants torchvision and a trainer."""
    found = importlib.util.find_spec(packages[0])
    if found is None or not found.submodule_search_locations:
        raise ImportError(packages[0])
    root = Path(found.submodule_search_locations[0])
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


def relplot(method: str, data: Data) -> Run:
    import relplot.metrics as rp

    p, y = data.p, data.y
    if method == "ece":
        return lambda: rp.binnedECE(*rp.multiclass_logits_to_confidences(p, y, probs=True), nbins=BINS)
    if method == "smooth_ece":
        return lambda: rp.smECE(*rp.multiclass_logits_to_confidences(p, y, probs=True))
    raise LookupError(method)


def scikit_learn(method: str, data: Data) -> Run:
    from sklearn.calibration import _TemperatureScaling

    if method != "temperature.fit":
        raise LookupError(method)
    z = data.z
    return lambda: 1.0 / float(_TemperatureScaling().fit(z, data.y).beta_)


def fd_shifts(method: str, data: Data) -> Run:
    if method != "aurc":
        raise LookupError(method)
    from fd_shifts.analysis.rc_stats import RiskCoverageStats

    p, y = data.p, data.y
    return lambda: RiskCoverageStats(confids=p.max(axis=1), residuals=(p.argmax(axis=1) != y).astype(float)).aurc


LIBRARIES = {
    "offramp": offramp,
    "netcal": netcal,
    "torchmetrics": torchmetrics,
    "torch-uncertainty": torch_uncertainty,
    "relplot": relplot,
    "scikit-learn": scikit_learn,
    "fd-shifts": fd_shifts,
}
METHODS = ("ece", "classwise_ece", "aurc", "smooth_ece", "confce_corr", "temperature.fit")
# Nobody else has it: the nearest that a rival does with the same data stands in, and is said to.
STAND_IN = {"confce_corr": {"netcal": "ACE stands in"}}


def work(folder: Path, library: str, method: str, seconds: float) -> dict[str, Any]:
    """In a process of its own: warm up on the real data once, then as many runs as fit, 3 at least."""
    try:
        run = LIBRARIES[library](method, Data(folder))
    except LookupError:
        return {"absent": "has no such method"}
    except ImportError as error:
        return {"absent": f"not installed ({error.name or error})"}
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    value = run()
    first = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 15):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if sum(times) > 4 * seconds:
            break
    return {
        "value": float(value),
        "seconds": float(np.median(times)),
        "fastest": min(times),
        "first": first,
        "runs": len(times),
        # Growth of the process's peak while it ran, beside the input that it held already.
        "extra_bytes": (peak - held) * 1024,
    }


def one_pass(folder: Path) -> float:
    """Seconds to read every probability once on one core."""
    p = Data(folder).p
    p.max(axis=1)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        p.max(axis=1)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def optimum(folder: Path) -> float:
    """The best temperature in float64, by scipy, from all rows in blocks."""
    from scipy.optimize import minimize_scalar

    data = Data(folder)
    z, y = data.z, data.y

    def loss(beta: float) -> float:
        total = 0.0
        for start in range(0, len(z), 2000):
            block = z[start : start + 2000].astype(np.float64) * beta
            largest = block.max(axis=1)
            own = block[np.arange(len(block)), y[start : start + 2000]]
            total += float((np.log(np.exp(block - largest[:, None]).sum(axis=1)) + largest - own).sum())
        return total / len(z)

    found = minimize_scalar(loss, bounds=(0.01, 5.0), method="bounded", options={"xatol": 1e-10})
    return 1.0 / float(found.x)


def serving(rows: int = 10_000) -> dict[str, float]:
    """AR-CondCal's serving form with 10,000 fitted rows: µs a row in one batch and one by one, error against
    the exact sum."""
    from offramp.runtime import calibration, scores

    random = np.random.default_rng(0)
    z = random.normal(0, 2, (2 * rows, 10))
    y = np.where(random.random(2 * rows) < scores.msr(z) ** 1.5, z.argmax(axis=1), 0)
    routing = random.beta(4, 3, (11, 2 * rows))
    one = calibration.get("ar_condcal").fit(z[:rows], y[:rows], aux={"routing": routing[:, :rows]})
    given = {"score": scores.log_odds(z[rows:]), "routing": routing[:, rows:]}
    single = {"score": given["score"][:1], "routing": given["routing"][:, :1]}
    start = time.perf_counter()
    one.score(given)
    laid = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(20):
        one.score(given)
    batch = (time.perf_counter() - start) / 20 / rows
    start = time.perf_counter()
    for _ in range(1000):
        one.score(single)
    alone = (time.perf_counter() - start) / 1000
    error = float(np.abs(one.confidence(given) - one.target(given)).max())
    return {
        "microseconds_a_row": batch * 1e6,
        "microseconds_alone": alone * 1e6,
        "seconds_to_lay_the_grid": laid,
        "largest_error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the runs of one library's method")
    parser.add_argument("--work", nargs=3, metavar=("FOLDER", "LIBRARY", "METHOD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        folder, library, method = options.work
        print(json.dumps(work(Path(folder), library, method, options.seconds)))
        return
    from harness import save, table

    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder, options.rows, options.classes)
        for method in METHODS:
            results[method] = {}
            for library in LIBRARIES:
                arguments = [__file__, "--seconds", str(options.seconds), "--work", name, library, method]
                done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
                if done.returncode:
                    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
                    results[method][library] = {"absent": f"failed: {last[0][:100]}"}
                else:
                    results[method][library] = json.loads(done.stdout.splitlines()[-1])
        best = optimum(folder)
        scan = one_pass(folder)
    size = options.rows * options.classes * 4
    rows = [("method", "library", "seconds", "ours is faster by", "peak beside logits", "value")]
    misses: list[str] = []
    excused: list[str] = []
    for method, found in results.items():
        ours = found["offramp"]
        for library, one in found.items():
            if "absent" in one:
                continue
            factor = one["seconds"] / ours["seconds"]
            peak = 1 + one["extra_bytes"] / size
            note = STAND_IN.get(method, {}).get(library, "")
            shown = "" if library == "offramp" else f"{factor:.1f}x {note}"
            rows.append((method, library, f"{one['seconds']:.4f}", shown, f"{peak:.2f}x", f"{one['value']:.6g}"))
            if library == "offramp" or note or factor >= 5:
                continue
            if method == "temperature.fit" and abs(one["value"] - best) > 1e-2 * best:
                excused.append(f"{method}: {factor:.1f}x of {library}, which doesn't fit at all")
            elif factor >= 1 and one["seconds"] <= 8 * scan:
                passes = one["seconds"] / scan
                excused.append(f"{method}: {factor:.1f}x of {library}, which takes {passes:.1f} passes over memory")
            else:
                misses.append(f"{method}: {factor:.1f}x of {library}, not 5x")
        if 1 + ours["extra_bytes"] / size > 1.3:
            misses.append(f"{method}: peak memory {1 + ours['extra_bytes'] / size:.2f}x the logits, not 1.3x")
    print(f"{options.rows} x {options.classes} float32\n" + table(rows))
    for library, one in results["temperature.fit"].items():
        if "absent" not in one:
            print(f"temperature by {library}: off the optimum {best:.6f} by {abs(one['value'] - best):.2g}")
    absent = {
        f"{library} {one['absent']}" for found in results.values() for library, one in found.items() if "absent" in one
    }
    print("Left out: " + "; ".join(sorted(one for one in absent if "no such method" not in one)))
    served = serving()
    print(
        f"ar_condcal serving, 10,000 fitted rows: {served['microseconds_a_row']:.2f} µs a row in a batch, "
        f"{served['microseconds_alone']:.0f} µs alone, within {served['largest_error']:.1e} of exact"
    )
    print(f"One pass over the data (a row maximum): {scan:.4f} s")
    print("Under 5x, and why: " + ("; ".join(excused) or "none"))
    print("Misses: " + ("; ".join(misses) or "none"))
    print(
        save(
            "methods",
            {
                "rows": options.rows,
                "classes": options.classes,
                "optimum": best,
                "scan": scan,
                "methods": results,
                "serving": served,
            },
        )
    )


if __name__ == "__main__":
    main()
