"""Recalibration online against drift, on CLINC150: frozen, ours, and an oracle that knows every label.

    python benchmarks/drift.py [--seeds 20] [--calm 200] [--records FILE]

Rows are drawn from MiniLM's outputs at its six exits on CLINC150's validation and test texts (7,500 rows), at an
operating point whose exits halve the rows. Then the stream changes: logits are halved (flatter) or multiplied by 2.5
(sharper), the 30 classes that the model errs on most come ten times as often (prior), or half of the texts have typos
and half are cut to two thirds (text; the model is run again on them). 5% of the rows are labelled, after a delay, and
run to the end. After 2,000 labels 20,000 fresh rows say what was mended: (frozen − ours)/(frozen − oracle), the oracle
being the same family fitted on the whole changed population. Beside it stands what the same family mends when it is
told when the change came, fits on all 2,000 labels at once, and asks no guard: 2,000 labels say no more.

Drawn with replacement from so many rows, 20,000 hold each several times; the excess leaves out pairs of the same row.
The model and its texts are in a folder that git doesn't have: without it `text` is left out, and the records of
the golden values serve.
"""

import argparse
import json
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import Pool
from pathlib import Path
from tempfile import gettempdir

import harness
import numpy as np
from offramp.runtime import metrics, scores, thresholds
from offramp.runtime.online import guard
from offramp.runtime.online.fitting.recalibrator import Recalibrator
from offramp.runtime.online.trials import Trials
from offramp.runtime.online.window import Memory, Window
from offramp.runtime.points import OperatingPoint

SHARED = Path(__file__).parents[2] / "shared"
FITTED = 3000  # rows that the version in force was fitted on
CALM, LABELS = 500, 2000  # labels before and after the change
RATE, DELAY = 0.05, 600  # share of labelled rows; rows that pass before a label comes
LOOK = 50  # labels between two looks
FRESH = 20_000
FAMILIES = ("rank_preserving", "cwmcs")
COVERAGE = 0.9
HARD = 30  # classes that the model errs on most, ten times as frequent after the change of prior


@dataclass(frozen=True)
class Population:
    """(J, N, C) float16 logits z − max z, (J, N) scores, (N,) labels, and how often each row comes."""

    logits: np.ndarray
    score: np.ndarray
    label: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, label: np.ndarray, share: np.ndarray | None = None) -> "Population":
        score = np.stack([scores.log_odds(z) for z in logits]).astype(np.float32)
        gaps = (logits - logits.max(axis=2, keepdims=True)).astype(np.float16)
        return cls(gaps, score, label, np.full(len(label), 1 / len(label)) if share is None else share)

    def draw(self, random: np.random.Generator, rows: int) -> np.ndarray:
        return random.choice(len(self.label), rows, p=self.share)


def window(population: Population, rows: np.ndarray, bars: tuple[float, ...], time: np.ndarray) -> Window:
    """Labelled rows, run to the end: shadow runs are for the rows whose labels are sought."""
    n = len(rows)
    score = population.score[:, rows]
    return Window(
        time=time,
        labelled=time + DELAY,
        version=np.ones(n, np.int64),
        point=np.full(n, "balanced"),
        exit=thresholds.leave_at(score, bars),
        abstained=np.zeros(n, bool),
        score=score,
        logits=population.logits[:, rows],
        label=population.label[rows],
        shadow=np.ones(n),
        asked=np.ones(n),
        key=np.zeros(n, np.int64),
    )


def joined(first: Window, second: Window) -> Window:
    wide = ("score", "logits")
    return Window(
        **{
            name: np.concatenate([getattr(first, name), getattr(second, name)], axis=1 if name in wide else 0)
            for name in vars(first)
            if name != "seq"  # rows of no store have none
        }
    )


# ---------------------------------------------------------------- what is measured


def excess(population: Population, rows: np.ndarray, confidence: np.ndarray, right: np.ndarray) -> float:
    """n·(ConfCE − n⁻²Σ(c − z)²) of rows drawn with replacement: pairs of one row with itself are no evidence.

    confidence, right: of the whole population, at the exit each row leaves at.
    """
    times = np.bincount(rows, minlength=len(population.label))
    gap = np.where(times > 0, (confidence - right) * times, 0.0)
    c = confidence[rows]
    bins = int(np.ceil(np.cbrt(len(rows))))
    edges = np.unique(np.quantile(c, np.arange(1, bins) / bins))
    sums = np.bincount(np.searchsorted(edges, confidence), gap)
    return float(((sums**2).sum() - (gap**2).sum()) / len(rows))


def measured(population: Population, rows: np.ndarray, point: OperatingPoint) -> tuple[float, float]:
    """n·excess and selective risk at 90% coverage, on fresh rows pooled over the exits they leave at."""
    every = np.arange(len(population.label))
    whole = window(population, every, point.thresholds, every.astype(float))
    odds, right = whole.log_odds(point), whole.correct
    risk = metrics.risk_at_coverage(odds[rows], ~right[rows], COVERAGE)
    return excess(population, rows, scores.sigmoid(odds), right), risk


def stream(
    before: Population, after: Population, family: str, seed: int, *, calm: int = CALM, labels: int = LABELS
) -> dict[str, object]:
    """One stream of one family: acceptances, and the figures of frozen, ours and oracle over time and at the end."""
    random = np.random.default_rng(seed)
    first = before.draw(random, FITTED)
    bars = thresholds.thresholds_for_shares(before.score[:, first], thresholds.geometric_shares(6, np.log(0.5)))
    recalibrator = Recalibrator(family)
    plain = Recalibrator(family, Memory(rows=10**9, half_life=np.inf, adaptive=False))
    start = OperatingPoint(bars)
    fitted = plain.refit(window(before, first, bars, np.arange(-FITTED, 0.0)), start)
    frozen = start if fitted is None else fitted.point
    everything = after.draw(random, 60_000)
    found = plain.refit(window(after, everything, bars, np.arange(60_000.0)), frozen)
    oracle = frozen if found is None else found.point
    step = 1 / RATE
    changed = window(after, after.draw(random, labels), bars, step * np.arange(calm, calm + labels))
    found = plain.refit(changed, frozen)
    unguarded = frozen if found is None else found.point
    served = joined(window(before, before.draw(random, calm), bars, step * np.arange(calm)), changed)
    fresh = after.draw(random, FRESH)
    trials = Trials(recalibrator, frozen, fitted_until=-1.0)
    history, accepted, late = [], [], int(DELAY / step)
    refused: list[str] = []
    first_figures = now = measured(after, fresh, frozen)
    for end in range(LOOK, calm + labels + 1, LOOK):
        come = max(0, end - late)
        seen = trials.look(served.take(np.arange(come)))
        refused += [one.decision.reason for one in seen if one.decision.verdict == "refuse"]
        good = [one for one in seen if one.decision.verdict == "accept"]
        if good:
            best = max(good, key=lambda one: one.refit.after)
            accepted.append({"labels": end, "reason": best.decision.reason})
            now = measured(after, fresh, trials.promote(best.trial.number))
        history.append((end, *now))
    return {
        "seed": seed,
        "accepted": accepted,
        "refused": refused,
        "waiting": [one.decision.reason for one in trials.on_trial],
        "frozen": first_figures,
        "ours": now,
        "oracle": measured(after, fresh, oracle),
        "unguarded": measured(after, fresh, unguarded),
        "history": history,
    }


# ---------------------------------------------------------------- populations


def golden() -> tuple[np.ndarray, np.ndarray]:
    held = np.load(SHARED / "golden" / "clinc150_records.npz")
    logits = np.concatenate([held["val_logits"], held["test_logits"]], axis=1)
    return logits, np.concatenate([held["val_labels"], held["test_labels"]])


def spoilt(text: str, random: np.random.Generator) -> str:
    """A tenth of the letters swapped, dropped, doubled or replaced."""
    out = []
    letters = list(text)
    i = 0
    while i < len(letters):
        kind = random.random()
        if kind < 0.025 and i + 1 < len(letters):
            out += [letters[i + 1], letters[i]]
            i += 1
        elif kind < 0.05:
            pass
        elif kind < 0.075:
            out += [letters[i]] * 2
        elif kind < 0.1:
            out.append(chr(ord("a") + int(random.integers(26))))
        else:
            out.append(letters[i])
        i += 1
    return "".join(out)


def spoilt_records(file: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """(6, 7500, 150) logits on texts with typos (even rows) or cut to two thirds (odd rows), and labels.

    Kept in a file: the model takes minutes. None without it.
    """
    if file.exists():
        held = np.load(file)
        return held["logits"], held["labels"]
    folder = SHARED / "models" / "minilm_clinc150"
    if not folder.exists():
        return None
    import importlib.util

    import torch
    from tokenizers import Tokenizer

    spec = importlib.util.spec_from_file_location("minilm", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, tokenizer = module.build(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    held = json.loads((SHARED / "data" / "clinc150" / "text.json").read_text())
    random = np.random.default_rng(0)
    texts, labels = [], []
    for part in ("val", "test"):
        labels.append(np.load(SHARED / "data" / "clinc150" / f"{part}.npz")["labels"])
        texts += held[part]
    changed = []
    for i, text in enumerate(texts):
        words = text.split()
        cut = " ".join(words[: max(1, -(-2 * len(words) // 3))])
        changed.append(spoilt(text, random) if i % 2 == 0 else cut)
    out = []
    with torch.inference_mode():
        for start in range(0, len(changed), 100):
            codes = [one.ids for one in tokenizer.encode_batch(changed[start : start + 100])]
            longest = max(map(len, codes))
            ids = np.zeros((len(codes), longest), np.int64)
            mask = np.zeros_like(ids)
            for row, code in enumerate(codes):
                ids[row, : len(code)], mask[row, : len(code)] = code, 1
            exits = model(torch.from_numpy(ids), torch.from_numpy(mask))
            out.append(np.stack([z.numpy() for z in exits]))
    logits, label = np.concatenate(out, axis=1), np.concatenate(labels)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, logits=logits, labels=label)
    return logits, label


@cache
def populations(file: Path) -> dict[str, tuple[Population, Population]]:
    """By drift: rows before and after the change."""
    logits, label = golden()
    before = Population.of(logits, label)
    wrong = np.bincount(label, logits[-1].argmax(axis=1) != label, minlength=150)
    often = np.where(np.argsort(np.argsort(-wrong, kind="stable")) < HARD, 10.0, 1.0)
    found = {
        "flatter": (before, Population.of(logits * np.float32(0.5), label)),
        "sharper": (before, Population.of(logits * np.float32(2.5), label)),
        "prior": (before, replace(before, share=often[label] / often[label].sum())),
    }
    if (spoiled := spoilt_records(file)) is not None:
        found["text"] = (before, Population.of(*spoiled))
    return found


# ---------------------------------------------------------------- runs


def one(job: tuple[Path, str, str, int]) -> dict[str, object]:
    file, drift, family, seed = job
    return stream(*populations(file)[drift], family, seed)


def calm(job: tuple[Path, str, int]) -> dict[str, object]:
    """A stream of 50,000 rows in which nothing changes: acceptances, and whether answers and cost moved."""
    file, family, seed = job
    before = populations(file)["prior"][0]
    found = stream(before, before, family, seed, calm=0, labels=2500)
    return {key: found[key] for key in ("seed", "accepted", "frozen", "ours")}


def mended(runs: list[dict[str, object]], figure: int) -> dict[str, object]:
    """(frozen − ours)/(frozen − oracle) of the means over streams, with a bootstrap interval over them."""
    values = np.array([[one[side][figure] for side in ("frozen", "ours", "oracle", "unguarded")] for one in runs])
    picks = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    means = np.concatenate([values.mean(axis=0)[None], values[picks].mean(axis=1)])
    with np.errstate(all="ignore"):
        ratio = (means[:, 0] - means[:, 1]) / (means[:, 0] - means[:, 2])
        low, high = np.nanquantile(ratio[1:], [0.025, 0.975])
        at_most = (means[0, 0] - means[0, 3]) / (means[0, 0] - means[0, 2])
    frozen, ours, oracle, _ = values.mean(axis=0)
    return {
        "frozen": frozen,
        "ours": ours,
        "oracle": oracle,
        "mended": ratio[0],
        "interval": [low, high],
        "unguarded": at_most,
    }


def temperature_by_ece(seeds: int) -> dict[str, object]:
    """Streams on which a temperature lowers ECE and ranks rows worse: what the guard says of it."""
    reasons, lower, verdicts = [], 0, []
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        n, classes = 6000, 5
        base = random.normal(0, 2.0, (n, classes))
        label = (random.gumbel(size=(n, classes)) + base).argmax(axis=1)
        noise = np.array([2.0, 1.0, 0.0])[:, None, None]
        logits = (base + noise * random.normal(0, 1.0, (3, n, classes))).astype(np.float32)
        bars = (1.5, 1.5, -np.inf)
        population, rows = Population.of(logits, label), np.arange(n)
        whole = window(population, rows, bars, rows.astype(float))
        start = OperatingPoint(bars)
        incumbent = Recalibrator().refit(whole.take(rows[:2000]), start).point
        sharper = Population.of((1.5 * logits).astype(np.float32), label)
        drifted = window(sharper, rows[2000:], bars, rows[2000:].astype(float))
        refit = Recalibrator("temperature").refit(drifted.take(rows[:1000]), incumbent)
        trial = guard.open_trial(drifted.take(rows[:1000]), incumbent, refit.point, after=refit.after)
        found = guard.judge(trial, drifted, incumbent, refit.point)
        later = drifted.after(refit.after)
        ece = [metrics.ece(scores.sigmoid(later.log_odds(p)), later.correct) for p in (incumbent, refit.point)]
        lower += ece[1] < ece[0]
        verdicts.append(found.verdict)
        reasons.append(found.reason)
    return {"streams": seeds, "ece_lower": lower, "accepted": verdicts.count("accept"), "reasons": reasons}


def picture(runs: dict[str, list[dict[str, object]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    drifts = sorted({name.split("/")[0] for name in runs})
    figure, axes = plt.subplots(2, len(drifts), figsize=(4.2 * len(drifts), 6), squeeze=False, sharex=True)
    for column, drift in enumerate(drifts):
        for family in FAMILIES:
            found = runs.get(f"{drift}/{family}")
            if not found:
                continue
            history = np.array([one["history"] for one in found], dtype=float).mean(axis=0)
            for row, name in enumerate(("n · excess of ConfCE", f"selective risk at {COVERAGE:.0%}")):
                ax = axes[row, column]
                (line,) = ax.plot(history[:, 0], history[:, 1 + row], label=f"ours, {family}")
                for side, style in (("frozen", ":"), ("oracle", "--")):
                    level = np.mean([one[side][row] for one in found])
                    ax.axhline(level, color=line.get_color(), linestyle=style, linewidth=1, label=f"{side}, {family}")
                ax.set_ylabel(name)
        axes[0, column].set_title(drift)
        axes[0, column].set_yscale("log")
        axes[1, column].set_xlabel("labels; the change comes at 500")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--calm", type=int, default=200)
    parser.add_argument("--records", type=Path, default=Path(gettempdir()) / "offramp-drift-records.npz")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    if given.seeds:
        drifting(given)
    if given.calm:
        unchanged(given)


def drifting(given: argparse.Namespace) -> None:
    """What was mended of each drift, and what the guard says of a temperature that ranks worse."""
    drifts = list(populations(given.records))
    jobs = [(given.records, d, f, s) for s in range(given.seeds) for d in drifts for f in FAMILIES]
    with Pool(given.processes) as pool:
        found = pool.map(one, jobs, chunksize=1)
    runs: dict[str, list[dict[str, object]]] = {}
    for (_, drift, family, _), each in zip(jobs, found, strict=True):
        runs.setdefault(f"{drift}/{family}", []).append(each)
    report(runs)


def report(runs: dict[str, list[dict[str, object]]]) -> None:
    """Print, write and draw the runs of each drift and family."""
    seeds = max(map(len, runs.values()))
    results: dict[str, object] = {"seeds": seeds, "labels": LABELS, "rate": RATE}
    rows = [("drift/family", "figure", "frozen", "ours", "oracle", "mended", "95%", "unguarded")]
    for name, each in runs.items():
        for figure, title in enumerate(("excess", "risk_at_coverage")):
            value = mended(each, figure)
            results[f"{name}/{title}"] = value
            low, high = value["interval"]
            sides = (f"{value[side]:.4f}" for side in ("frozen", "ours", "oracle"))
            rows.append(
                (name, title, *sides, f"{value['mended']:.3f}", f"[{low:.3f}, {high:.3f}]", f"{value['unguarded']:.3f}")
            )
        results[f"{name}/acceptances"] = [len(run["accepted"]) for run in each]
        results[f"{name}/first stream"] = {key: each[0][key] for key in ("accepted", "refused", "waiting")}
    print(harness.table(rows))
    results["temperature_by_ece"] = told = temperature_by_ece(seeds)
    print(f"a temperature that lowers ECE in {told['ece_lower']} of {told['streams']}: {told['accepted']} accepted")
    path = harness.save("drift", results)
    picture(runs, path.with_suffix(".png"))
    print(path)


def unchanged(given: argparse.Namespace) -> None:
    """How often anything is accepted where nothing changes, and whether answers and confidence moved."""
    jobs = [(given.records, f, s) for f in FAMILIES for s in range(given.calm)]
    with Pool(given.processes) as pool:
        found = pool.map(calm, jobs, chunksize=1)
    report_calm({f: [each for (_, name, _), each in zip(jobs, found, strict=True) if name == f] for f in FAMILIES})


def report_calm(runs: dict[str, list[dict[str, object]]]) -> None:
    """Print and write the runs of each family in which nothing changed."""
    results: dict[str, object] = {}
    for family, mine in runs.items():
        counts = np.array([len(each["accepted"]) for each in mine])
        figures = {side: np.mean([each[side] for each in mine], axis=0) for side in ("frozen", "ours")}
        two = float((counts >= 2).mean())
        results[family] = {"streams": len(mine), "acceptances": np.bincount(counts), "two_or_more": two, **figures}
        print(f"no drift, {family}: acceptances {np.bincount(counts).tolist()}, P(≥ 2) = {two:.3f}, {figures}")
    print(harness.save("drift-calm", results))


if __name__ == "__main__":
    main()
