"""What `auto` serves against the identity and the temperature, where it is known how often a row is right.

    python benchmarks/auto.py [--rows 300 1000 3000] [--draws 100] [--only CLINC WRN] [--no-save]

Populations: made-up logits whose miscalibration is known, and recorded ones (the tests' records, where they lie beside
the repository) whose rows are right as often as 20 bins of their scores were. Each draw takes fresh rows and fresh
labels, chooses by `Selector`, and is judged on the whole population by P(right) itself: no noise of test labels.
Errors are true ones times 10,000: ECE in 15 bins, and CE = mean |confidence − P(right)|.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import save, table
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.jobs.calibrating.selection import AUTO, Selector
from offramp.runtime.jobs.data.labelled_rows import labelled_rows
from offramp.runtime.jobs.data.opened import own_logits
from offramp.runtime.points import full

SHARED = Path(__file__).parents[2] / "shared"
POPULATION = 20_000
JUDGED = 6_000


@dataclass(frozen=True)
class Population:
    """logits: (N, C) as the model gives them. right: (N,) P(right). other: (N, C) logits of which wrong labels are
    drawn. outcome: (N,) one draw of right or wrong, for the ranking."""

    name: str
    logits: np.ndarray
    right: np.ndarray
    other: np.ndarray

    def draw(self, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        at = rng.integers(0, len(self.logits), rows)
        label = self.logits[at].argmax(axis=1)
        wrong = np.flatnonzero(rng.random(rows) >= self.right[at])
        share = scores.softmax(self.other[at[wrong]].astype(np.float64))
        share[np.arange(len(wrong)), label[wrong]] = 0.0
        share = share.cumsum(axis=1)
        place = rng.random(len(wrong)) * share[:, -1]
        label[wrong] = (place[:, None] > share).sum(axis=1).clip(0, share.shape[1] - 1)
        return self.logits[at], label


def made_up(classes: int, lift: float, spread: float) -> Iterator[Population]:
    rng = np.random.default_rng(classes)
    true = rng.normal(0, 1, (POPULATION, classes))
    true[np.arange(POPULATION), rng.integers(0, classes, POPULATION)] += rng.normal(lift, spread, POPULATION)
    true *= 1.5
    top, right = true.argmax(axis=1), scores.msr(true)
    by_class = rng.permutation(np.linspace(0.6, 1.8, classes))[top][:, None]
    odds = np.log(right) - np.log1p(-right)
    bent = np.clip(right + 0.48 * np.sin(2 * odds) * right * (1 - right), 0.01, 0.999)
    for name, logits, p in (
        ("calibrated", true, right),
        ("over-confident 1.05", true * 1.05, right),
        ("over-confident 1.15", true * 1.15, right),
        ("over-confident 1.5", true * 1.5, right),
        ("over-confident 3", true * 3, right),
        ("under-confident 1.5", true / 1.5, right),
        ("by class 0.6 to 1.8", true * by_class, right),
        ("not monotone", true, bent),
    ):
        yield Population(f"{classes} classes, {name}", logits.astype(np.float32), p, true)


def recorded() -> Iterator[Population]:
    if not SHARED.is_dir():
        return
    clinc = np.load(SHARED / "golden" / "clinc150_records.npz")
    z = np.concatenate([clinc["val_logits"], clinc["test_logits"]], axis=1)
    y = np.concatenate([clinc["val_labels"], clinc["test_labels"]])
    ar = np.load(SHARED / "models" / "ar_vit_cifar10" / "records.npz")
    wrn = np.load(SHARED / "golden" / "wrn_cifar10.npz")
    exits = [(f"CLINC exit {j}", z[j], y) for j in range(len(z))]
    exits += [("WRN", np.log(np.maximum(wrn["predictions"], 1e-30)), wrn["ground_truth"].ravel())]
    exits += [(f"AR-ViT exit {j}", ar["logits"][j], ar["labels"]) for j in range(3)]
    for name, logits, label in exits:
        odds = scores.log_odds(logits.astype(np.float64)).clip(-20, 20)
        correct = scores.top_label(logits) == label
        parts = np.array_split(np.argsort(odds, kind="stable"), 20)
        # Platt's targets: no bin is certain.
        share = np.maximum.accumulate([(correct[part].sum() + 1) / (len(part) + 2) for part in parts])
        right = np.interp(odds, [odds[part].mean() for part in parts], share)
        yield Population(name, logits.astype(np.float32), right, logits)


def judge(one: calibration.Calibrator, where: Population) -> np.ndarray:
    """True ECE and CE, and the AUROC of telling right from wrong."""
    at = slice(None, None, max(1, len(where.logits) // JUDGED))
    z, right = where.logits[at], where.right[at]
    odds = one.score({"logits": z, "score": scores.log_odds(z)})
    confidence = scores.sigmoid(odds)
    bins = np.minimum(np.ceil(confidence * 15), 15).astype(int)
    ece = np.abs(np.bincount(bins, confidence - right)).sum() / len(z)
    outcome = np.random.default_rng(0).random(len(z)) < right
    return np.array([ece, np.abs(confidence - right).mean(), metrics.auroc(odds, outcome)])


def compete(where: Population, rows: int, draws: int) -> dict[str, object]:
    found, chosen = [], Counter[str]()
    for seed in range(draws):
        z, y = where.draw(rows, np.random.default_rng(seed))
        labelled = labelled_rows(own_logits([z], y).records)
        ((auto,), _) = Selector(labelled, np.arange(rows) % 3 > 0, AUTO, seed).choose(full(1).thresholds)
        chosen[auto.name] += 1
        three = (calibration.get("identity").fit(z, y), calibration.get("temperature").fit(z, y), auto)
        found.append([judge(one, where) for one in three])
    ece, ce, auroc = np.moveaxis(np.array(found), 2, 0)
    means = ece.mean(axis=0)
    better = int(means[:2].argmin())
    return {
        "population": where.name,
        "rows": rows,
        "draws": draws,
        "true_ece": dict(zip(("identity", "temperature", "auto"), means, strict=True)),
        "true_ce": dict(zip(("identity", "temperature", "auto"), ce.mean(axis=0), strict=True)),
        "ratio": means[2] / means[better] if means[better] > 1e-3 else None,
        "above_better": means[2] - means[better],
        "standard_error": float((ece[:, 2] - ece[:, better]).std() / np.sqrt(draws)),
        "auroc_gain": float((auroc[:, 2] - auroc[:, 0]).mean()),
        "chosen": dict(chosen.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=[""], help="populations whose name has one of these in it")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    lines = []
    started = time.perf_counter()
    shown = [
        ("population", "rows", "identity", "temperature", "auto", "ratio", "above", "±", "CE", "AUROC_f", "chosen")
    ]
    everything = [*made_up(10, 3.5, 1.5), *made_up(100, 5.0, 1.6), *recorded()]
    for rows in options.rows:
        for where in everything:
            if not any(part in where.name for part in options.only):
                continue
            line = compete(where, rows, options.draws)
            lines.append(line)
            ece, ce = line["true_ece"], line["true_ce"]
            ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
            moved = (f"{1e4 * line[key]:.1f}" for key in ("above_better", "standard_error"))
            names = ", ".join(f"{name} {count}" for name, count in line["chosen"].items())
            errors = (f"{1e4 * value:.0f}" for value in ece.values())
            tail = (f"{1e4 * ce['auto']:.0f}", f"{line['auroc_gain']:+.4f}", names)
            shown.append((where.name, str(rows), *errors, ratio, *moved, *tail))
            print("  ".join(shown[-1]), flush=True)
    print(table(shown))
    print(f"{time.perf_counter() - started:.0f} s")
    if not options.no_save:
        print(save("auto", lines))


if __name__ == "__main__":
    main()
