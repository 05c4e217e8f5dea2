"""Chosen points against simpler rules on fresh rows: is any beaten by a single exit, or by a rule with fewer exits?

    python benchmarks/points.py [--draws 40] [--proposing 450 1350]
    python benchmarks/points.py --records arvit=records.npz

A draw proposes from some rows of a population (or of given records), and judges on many others. A point is beaten where
a rule with fewer exits costs at least 2% less and is more accurate by two paired standard errors, or is as accurate
within one and costs 10% less. The rivals are everybody at each exit, and what proposing rows would have chosen if
only so many exits could be open. Records are an .npz with scores (J, N), correct (J, N) and flops (J,).
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import bare_rows, save, table
from offramp.runtime.jobs.calibrating.chooser import Chooser
from offramp.runtime.jobs.calibrating.targets import Budget, MaxDrop, Target, label_of
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.scores import log_odds
from offramp.runtime.thresholds import leave_at

TARGETS: tuple[Target, ...] = (Budget(0.5), Budget(0.3), MaxDrop(0.005), MaxDrop(0.02))
FRESH = 60_000
CLASSES = 10

# Strength and cumulative cost of each exit.
POPULATIONS = {
    "second exit as good as the last": ((1.7, 2.05, 2.08), (0.08, 0.204, 1.0)),
    "an exit that knows nothing": ((1.5, 0.0, 2.4, 2.6), (0.2, 0.4, 0.7, 1.0)),
    "an exit that costs 80%": ((1.2, 1.6, 2.6), (0.1, 0.8, 1.0)),
    "early exits know better": ((2.0, 2.4, 2.0, 1.8), (0.25, 0.5, 0.75, 1.0)),
    "six even exits": ((1.2, 1.6, 1.9, 2.1, 2.2, 2.25), tuple(np.arange(1, 7) / 6)),
}


def drawn(rng: np.random.Generator, strengths: tuple[float, ...], cost: tuple[float, ...], rows: int) -> LabelledRows:
    """Exits share four fifths of what makes a row hard."""
    truth = rng.integers(0, CLASSES, rows)
    common = rng.standard_normal((rows, CLASSES))
    logits = [
        2 * (s * np.eye(CLASSES)[truth] + 0.8 * common + 0.6 * rng.standard_normal((rows, CLASSES))) for s in strengths
    ]
    score = np.stack([log_odds(z.astype(np.float32)) for z in logits])
    return bare_rows(score, np.stack([z.argmax(axis=1) == truth for z in logits]), 1000 * np.array(cost))


def judged(rows: LabelledRows, bars: tuple[float, ...]) -> tuple[np.ndarray, float]:
    """(N,) whether each row is right, and the mean cost as a share of the full model's."""
    left, every = leave_at(rows.score, bars), np.arange(len(rows))
    return rows.correct[left, every].astype(float), float(rows.flops[left, every].mean() / rows.flops[-1].mean())


def simpler(chooser: Chooser, target: Target, exits: int) -> dict[str, tuple[float, ...]]:
    """Everybody at each exit, and the choice among rules with fewer exits."""
    early = len(chooser.full.thresholds) - 1
    inf = math.inf
    found = {f"everybody at {j}": (*(inf,) * j, *(-inf,) * (early + 1 - j)) for j in range(early)}
    for most in range(2, exits):
        rules = tuple(rule for rule in chooser.rules if len(rule.exits) <= most)
        found[f"{most} exits"] = replace(chooser, rules=rules).choose(target).thresholds
    return found


def beaten(fresh: LabelledRows, chosen: tuple[float, ...], rivals: dict[str, tuple[float, ...]]) -> list[str]:
    right, cost = judged(fresh, chosen)
    by = []
    for name, bars in rivals.items():
        other, spent = judged(fresh, bars)
        error = math.sqrt(((other - right) ** 2).sum() + 1) / len(right)
        better = (other - right).mean() / error
        if (spent <= 0.98 * cost and better > 2) or (spent <= 0.9 * cost and better > -1):
            by.append(name)
    return by


def cell(draw: Callable[[int], tuple[LabelledRows, LabelledRows]], draws: int) -> list[dict]:
    kept: dict[str, dict[str, list[float]]] = {}
    for seed in range(draws):
        proposing, fresh = draw(seed)
        chooser = Chooser.of(proposing, proposing.take(np.arange(0)))
        full = float(fresh.correct[-1].mean())
        for target in TARGETS:
            choice = chooser.choose(target)
            right, cost = judged(fresh, choice.thresholds)
            exits = sum(bar != math.inf for bar in choice.thresholds[: choice.thresholds.index(-math.inf) + 1])
            drop = full - float(right.mean())
            most = target.share if isinstance(target, Budget) else target.drop
            lines = kept.setdefault(label_of(target), {})
            for figure, value in {
                "cost": cost,
                "drop": drop,
                "exits": exits,
                "beyond": choice.unmet is None and (cost if isinstance(target, Budget) else drop) > most,
                "beaten": bool(beaten(fresh, choice.thresholds, simpler(chooser, target, exits))),
            }.items():
                lines.setdefault(figure, []).append(float(value))
    return [{"point": name, **{key: float(np.mean(v)) for key, v in lines.items()}} for name, lines in kept.items()]


def made_up(name: str, proposing: int) -> Callable[[int], tuple[LabelledRows, LabelledRows]]:
    fresh = drawn(np.random.default_rng(10**6), *POPULATIONS[name], FRESH)
    return lambda seed: (drawn(np.random.default_rng(seed), *POPULATIONS[name], proposing), fresh)


def recorded(path: Path, proposing: int) -> Callable[[int], tuple[LabelledRows, LabelledRows]]:
    arrays = np.load(path)
    rows = bare_rows(arrays["scores"], arrays["correct"].astype(bool), arrays["flops"])

    def draw(seed: int) -> tuple[LabelledRows, LabelledRows]:
        order = np.random.default_rng(seed).permutation(len(rows))
        return rows.take(order[:proposing]), rows.take(order[proposing:])

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40, help="a cell")
    parser.add_argument("--proposing", type=int, nargs="+", default=[450, 1350], metavar="ROWS")
    parser.add_argument("--records", nargs="+", default=[], metavar="NAME=NPZ", help="instead of what is made up")
    args = parser.parse_args()
    sources = dict.fromkeys(POPULATIONS, made_up) if not args.records else {}
    for given in args.records:
        name, _, path = given.partition("=")
        sources[name] = lambda _, rows, path=path: recorded(Path(path), rows)
    found = []
    for name, source in sources.items():
        for rows in args.proposing:
            found += [{"population": name, "proposing": rows, **line} for line in cell(source(name, rows), args.draws)]
    figures = ("cost", "drop", "exits", "beyond", "beaten")
    lines = [
        (one["population"], str(one["proposing"]), one["point"], *(f"{one[f]:.3f}" for f in figures)) for one in found
    ]
    print(table([("population", "proposing", "point", *figures), *lines]))
    print(save("points", {"draws": args.draws, "found": found}))


if __name__ == "__main__":
    main()
