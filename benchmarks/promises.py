"""Promises against populations whose truth is known: how often each is broken, and what it costs.

    python benchmarks/promises.py [--draws 1000] [--certifying 200 825 2750]
    python benchmarks/promises.py --parts clinc150 --records clinc150_records.npz

Abstention (`sgr`, risk 5%) and guaranteed exits (`planned` and `tested`), as the calibration job makes them: a draw has
proposing and certifying rows of one population (45 to 27.5), and the chosen thresholds are judged by the population
itself. A promise may be broken in a share delta of draws; above delta + 3 standard errors it isn't kept. Of real
rows (arrays val_logits, val_labels, test_logits, test_labels) it is counted what is answered over resplits.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from harness import bare_rows, save, table
from offramp.runtime import scores
from offramp.runtime.jobs.calibrating.choice import MARGIN, Choice
from offramp.runtime.jobs.calibrating.choose_points import Asked, choose_points
from offramp.runtime.jobs.calibrating.chooser import Chooser
from offramp.runtime.jobs.calibrating.guarantee import chosen, planned, tested
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Budget, Guarantee
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, Picked, outcome_of
from offramp.runtime.jobs.data.splits import split_labelled
from offramp.runtime.thresholds import Rule, judge, leave_at, risk_control, search, sgr, sgr_of_any

DELTA, RISK = 0.05, 0.05
CERTIFYING = (200, 825, 2750)
# Draws of certifying rows for one of proposing rows, of guaranteed exits.
CERTIFIED = 10
MANY = 200_000


# ---------------------------------------------------------------- abstention

Chance = Callable[[np.ndarray], np.ndarray]  # of being wrong, given the rank u in (0, 1) of a row's score

POPULATIONS: dict[str, tuple[Chance, int]] = {
    # chance of an error, distinct scores (0: all differ)
    "ordinary": (lambda u: 0.5 * (1 - u) ** 3, 0),
    "ties": (lambda u: 0.5 * (1 - u) ** 3, 12),
    "rare errors": (lambda u: 0.05 * (1 - u) ** 4, 0),
    "1% label noise": (lambda u: 0.01 + 0.99 * 0.16 * (1 - u) ** 4, 0),
    "inverted ranking": (lambda u: 0.1 * u**2, 0),
    "risk at the target": (lambda u: np.full_like(u, RISK + 0.002), 0),
    "all right": (lambda u: np.zeros_like(u), 0),
    "all wrong": (lambda u: np.ones_like(u), 0),
}


def drawn(rng: np.random.Generator, population: tuple[Chance, int], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and errors."""
    chance, levels = population
    u = rng.random(rows)
    wrong = rng.random(rows) < chance(u)
    return np.ceil(u * levels) / levels if levels else u, wrong


def true_risks(population: tuple[Chance, int]) -> tuple[np.ndarray, np.ndarray]:
    """Scores from high to low, and the risk of answering down to each."""
    u = (np.arange(MANY) + 0.5) / MANY
    chance, levels = population
    score = np.ceil(u * levels) / levels if levels else u
    return score[::-1], (np.cumsum(chance(u)[::-1]) / np.arange(1, MANY + 1))


def abstention_cell(name: str, certifying: int, draws: int) -> dict:
    population = POPULATIONS[name]
    rng = np.random.default_rng(certifying)
    score, risk = true_risks(population)
    last = np.append(score[1:] != score[:-1], True)  # ties are answered together
    best = float((np.flatnonzero(last & (risk <= RISK)) + 1).max(initial=0) / MANY)
    broken, answered, alone = [], [], []
    for _ in range(draws):
        proposing, certify = (drawn(rng, population, n) for n in (round(certifying * 45 / 27.5), certifying))
        found = sgr(*certify, RISK, DELTA, proposing=proposing)
        kept = int((score >= found.threshold).sum()) if found.feasible else 0
        broken.append(bool(kept and risk[kept - 1] > RISK + 1e-12))
        answered.append(kept / MANY)
        alone.append(sgr(*certify, RISK, DELTA).coverage)
    return {
        "population": name,
        "certifying": certifying,
        "broken": float(np.mean(broken)),
        "feasible": float(np.mean(np.array(answered) > 0)),
        "answered": float(np.mean(answered)),
        "feasible_alone": float(np.mean(np.array(alone) > 0)),
        "answered_alone": float(np.mean(alone)),
        "oracle": best,
    }


# ---------------------------------------------------------------- guaranteed exits

COST = np.array([0.25, 0.5, 0.75, 1.0])


def net_like(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Deeper exits know more: accuracies about .78, .86, .90, .92."""
    hard = rng.normal(size=n)
    odds = np.array([2.0, 3.0, 3.8, 4.2])[:, None] - 2 * hard + 1.6 * rng.normal(size=(4, n))
    return odds + 0.5 * rng.normal(size=(4, n)), rng.random((4, n)) < 1 / (1 + np.exp(-odds))


def overthinking(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The last exit is wrong on rows that early ones have right, and the other way round."""
    hard = rng.normal(size=n)
    odds = np.array([2.6, 3.2, 3.2, 2.6])[:, None] - 1.5 * hard + 0.3 * rng.normal(size=(4, n))
    right = rng.random((4, n)) < 1 / (1 + np.exp(-odds))
    right[3] &= rng.random(n) > 0.03
    return odds + 0.5 * rng.normal(size=(4, n)), right


def rare_losses(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Exits agree but for a few rows, which only the last has right; the score hardly knows which."""
    score = rng.normal(2, 2, (4, n)) + np.array([0, 1, 2, 3])[:, None]
    right = np.broadcast_to(rng.random(n) < 0.92, (4, n)).copy()
    fails = rng.random(n)
    for j, (base, slope) in enumerate(((0.005, 0.06), (0.003, 0.03), (0.001, 0.01))):
        right[j] &= fails > base + slope / (1 + np.exp(1.5 * score[j]))
    return score, right


CASCADES = {"net-like": (net_like, 0.02), "overthinking": (overthinking, 0.01), "rare losses": (rare_losses, 0.01)}


def rows_of(score: np.ndarray, right: np.ndarray) -> LabelledRows:
    return bare_rows(score, right, 1000 * COST)


def safest_first(rules: list[Rule], epsilon: float) -> list[Rule]:
    """The sequence of before: 12 rules of one family, from the costliest."""
    saving = [rule for rule in rules if rule.cost < 1]
    if not saving:
        return []
    safe = [rule for rule in saving if rule.lost + MARGIN * rule.margin <= epsilon]
    family = min(safe or saving, key=lambda rule: rule.cost if safe else rule.lost).family
    line = sorted((rule for rule in saving if rule.family == family), key=lambda rule: -rule.cost)
    first = max((k for k, rule in enumerate(line) if rule.lost <= epsilon / 5), default=0)
    last = max((k for k, rule in enumerate(line) if rule.lost <= 1.5 * epsilon), default=0)
    picked = np.linspace(first, max(last, first), 11).round().astype(np.int64)
    return [line[k] for k in np.unique(np.append(0, picked))]


RIVALS = {
    "binomial": {"bound": "binomial"},
    "signed WSR": {"bound": "wsr", "loss": "signed"},
    "plug-in": {"bound": "plug_in", "loss": "signed"},
}


def guarantee_cell(name: str, certifying: int, draws: int) -> dict:
    population, epsilon = CASCADES[name]
    rng = np.random.default_rng(certifying)
    fresh = rows_of(*population(rng, MANY // 4))
    cost = fresh.flops.astype(np.float64)
    large = rows_of(*population(rng, 20_000))
    oracle = 1.0
    for rule in sorted(search(large.score, large.correct, large.flops), key=lambda rule: rule.cost):
        true = judge("", rule.thresholds, fresh.score, fresh.correct, cost)
        if true.drop <= epsilon:
            oracle = true.cost
            break
    figures: dict[str, list[tuple[float, bool]]] = {kind: [] for kind in (*RIVALS, "offramp")}
    tests: dict[str, int] = {}
    target = Guarantee(epsilon, DELTA)
    for _ in range(math.ceil(draws / CERTIFIED)):
        proposing = rows_of(*population(rng, round(certifying * 45 / 27.5)))
        rules = search(proposing.score, proposing.correct, proposing.flops)
        sequence = [rule.thresholds for rule in safest_first(rules, epsilon)]
        plan = planned(rules, certifying, target, proposing)
        method = f"{plan.test.bound} on {plan.test.loss}"
        tests[method] = tests.get(method, 0) + 1
        for _ in range(CERTIFIED):
            certify = rows_of(*population(rng, certifying))
            for kind, options in RIVALS.items():
                answer = risk_control(
                    certify.score,
                    certify.correct,
                    certify.flops,
                    sequence,
                    epsilon,
                    DELTA,
                    proposing=(proposing.score, proposing.correct),
                    **options,
                )
                figures[kind].append(_true(answer.thresholds, fresh, cost, epsilon))
            answer = tested(plan, certify, target, proposing)
            figures["offramp"].append(_true(answer.thresholds, fresh, cost, epsilon))
    return {
        "population": name,
        "epsilon": epsilon,
        "certifying": certifying,
        "cost": {kind: float(np.mean([c for c, _ in found])) for kind, found in figures.items()},
        "saves": float(np.mean([c < 1 for c, _ in figures["offramp"]])),
        "broken": {kind: float(np.mean([b for _, b in found])) for kind, found in figures.items()},
        "oracle": oracle,
        "tests": tests,
    }


def _true(bars: tuple[float, ...], fresh: LabelledRows, cost: np.ndarray, epsilon: float) -> tuple[float, bool]:
    if all(bar == math.inf for bar in bars[:-1]):
        return 1.0, False
    true = judge("", bars, fresh.score, fresh.correct, cost)
    # A rule at the border of what is allowed isn't told from one beyond by this many rows.
    return true.cost, true.drop > epsilon + 2 * true.margin


# ---------------------------------------------------------------- both at once


def exits_like(chance: Chance, levels: int) -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
    """Four exits whose last errs as in POPULATIONS; early ones err more, their scores are noisier."""

    def population(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        u = rng.random(n)
        wrong = rng.random(n) < chance(u)
        score, right = np.empty((4, n)), np.empty((4, n), bool)
        for j, (noise, more) in enumerate(((0.25, 0.12), (0.15, 0.06), (0.08, 0.02), (0.0, 0.0))):
            v = np.clip(u + noise * rng.normal(size=n), 1e-9, 1)
            score[j] = np.ceil(v * levels) / levels if levels else v
            hard = (rng.random(n) < more * (1 - v)) & (chance(u) < 1)
            right[j] = ~wrong & ~hard
        return score, right

    return population


TOGETHER = {name: exits_like(*POPULATIONS[name]) for name in POPULATIONS} | {
    name: population for name, (population, _) in CASCADES.items()
}


def together_cell(name: str, certifying: int, draws: int) -> dict:
    """Budget, guarantee and abstention as the job promises them at once: each by itself may be broken in delta."""
    population, epsilon = TOGETHER[name], 0.01
    rng = np.random.default_rng(certifying)
    fresh = rows_of(*population(rng, MANY // 2))
    budget, guarantee = Budget(0.5), Guarantee(epsilon, DELTA)
    risk = AbstainRisk(RISK, DELTA)
    kept: dict[str, dict[str, list[float]]] = {}
    for _ in range(draws):
        proposing, certify = (rows_of(*population(rng, n)) for n in (round(certifying * 45 / 27.5), certifying))
        chooser = Chooser.of(proposing, certify, abstain=risk)
        plan = planned(chooser.rules, certifying, guarantee, proposing, risk)
        choices = {
            "full": Choice(chooser.full.thresholds, {}),
            "budget": chooser.choose(budget),
            "guarantee": chosen(plan, tested(plan, certify, guarantee, proposing), chooser.full, certifying),
        }
        for point, choice in choices.items():
            rivals = choice.rivals or (choice.thresholds,)
            place = rivals.index(choice.thresholds)
            here, before = (
                tuple(map(np.stack, zip(*(_at(rows, bars) for bars in rivals), strict=True)))
                for rows in (certify, proposing)
            )
            found = sgr_of_any(*here, place, RISK, DELTA * choice.share, proposing=before)
            score, wrong = _at(fresh, choice.thresholds)
            answered = (score >= found.threshold) & found.feasible
            lines = kept.setdefault(point, {})
            lines.setdefault("feasible", []).append(float(found.feasible))
            lines.setdefault("answered", []).append(float(answered.mean()))
            error = float(wrong[answered].mean()) if answered.any() else 0.0
            noise = math.sqrt(RISK * (1 - RISK) / max(int(answered.sum()), 1))
            lines.setdefault("risk broken", []).append(float(error > RISK + 2 * noise))
            cost, drop_broken = _true(choice.thresholds, fresh, fresh.flops.astype(np.float64), epsilon)
            lines.setdefault("cost", []).append(cost)
            if point == "guarantee":
                lines.setdefault("drop broken", []).append(float(drop_broken))
            if point == "budget":
                lines.setdefault("over budget", []).append(float(choice.unmet is None and cost > 0.5))
    return {
        "population": name,
        "certifying": certifying,
        "points": {point: {key: float(np.mean(v)) for key, v in lines.items()} for point, lines in kept.items()},
    }


def _at(rows: LabelledRows, bars: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(N,) score at the exit where each row leaves, and whether it is wrong there."""
    left, every = leave_at(rows.score, bars), np.arange(len(rows))
    return rows.score[left, every].astype(np.float64), ~rows.correct[left, every]


# ---------------------------------------------------------------- real rows


def clinc(path: Path, rows: int, resplits: int, calibrators: tuple[str, ...]) -> dict:
    """MiniLM on CLINC150, risk 2%: share of fresh rows answered at `full` and at a 1% guarantee, over resplits."""
    arrays = np.load(path)
    logits = np.concatenate([arrays["val_logits"], arrays["test_logits"]], axis=1)
    truth = np.concatenate([arrays["val_labels"], arrays["test_labels"]])
    found: dict[str, list[float]] = {}
    wrong: dict[str, list[float]] = {}
    for seed in range(resplits):
        order = np.random.default_rng(seed).permutation(len(truth))
        here, fresh = (_real(logits, truth, part) for part in (order[:rows], order[rows:]))
        asked = Asked((Guarantee(0.01, DELTA),), (AbstainRisk(0.02, DELTA),), calibrators, seed)
        for name, point in choose_points(split_labelled(here, seed), asked).points.items():
            outcome = outcome_of(fresh, point)
            feasible = point.provenance["abstention"]["feasible"]
            kept = ~outcome.abstain & feasible
            found.setdefault(name, []).append(float(kept.mean()))
            wrong.setdefault(name, []).append(float((outcome.label != fresh.truth)[kept].mean()) if kept.any() else 0.0)
            found.setdefault(f"{name} cost", []).append(float(outcome.flops.mean() / fresh.full_flops))
    return {
        "rows": rows,
        "resplits": resplits,
        **{f"answered {name}": float(np.mean(values)) for name, values in found.items() if "cost" not in name},
        **{name: float(np.mean(values)) for name, values in found.items() if "cost" in name},
        **{f"fresh risk {name}": float(np.mean(values)) for name, values in wrong.items()},
        **{f"fresh risk above 2% {name}": float(np.mean(np.array(v) > 0.02)) for name, v in wrong.items()},
    }


def _real(logits: np.ndarray, truth: np.ndarray, rows: np.ndarray) -> LabelledRows:
    everything = np.arange(len(rows))
    z = logits[:, rows]
    return LabelledRows(
        logits=tuple(Picked(one, everything) for one in z),
        score=np.stack([scores.log_odds(one).astype(np.float32) for one in z]),
        label=z.argmax(axis=2).astype(np.int64),
        flops=np.repeat(100 * np.arange(1, len(z) + 1)[:, None], len(rows), axis=1),
        truth=truth[rows],
        rows=everything,
        classes=z.shape[2],
    )


def every(cell: Callable[[str, int, int], dict], names: Iterable[str], args: argparse.Namespace) -> list[dict]:
    with ProcessPoolExecutor(args.jobs) as pool:
        todo = [(name, n, args.draws) for name in names for n in args.certifying]
        return list(pool.map(cell, *zip(*todo, strict=True)))


def abstaining(args: argparse.Namespace) -> list[dict]:
    cells = every(abstention_cell, POPULATIONS, args)
    figures = ("broken", "feasible", "answered", "feasible_alone", "answered_alone", "oracle")
    head = ("abstention 5%", "certifying", "broken", "feasible", "answered", "alone: feasible", "answered", "oracle")
    lines = [
        (cell["population"], str(cell["certifying"]), *(f"{cell[figure]:.3f}" for figure in figures)) for cell in cells
    ]
    print(table([head, *lines]), flush=True)
    return cells


def guaranteeing(args: argparse.Namespace) -> list[dict]:
    cells = every(guarantee_cell, CASCADES, args)
    kinds = (*RIVALS, "offramp")
    head = ("guarantee, mean cost", "certifying", *kinds, "oracle", "saves", *(f"broken: {kind}" for kind in kinds))
    lines = [
        (
            f"{cell['population']} {cell['epsilon']:.0%}",
            str(cell["certifying"]),
            *(f"{cell['cost'][kind]:.3f}" for kind in kinds),
            f"{cell['oracle']:.3f}",
            f"{cell['saves']:.3f}",
            *(f"{cell['broken'][kind]:.3f}" for kind in kinds),
        )
        for cell in cells
    ]
    print(table([head, *lines]), flush=True)
    return cells


def together(args: argparse.Namespace) -> list[dict]:
    cells = every(together_cell, TOGETHER, args)
    figures = ("feasible", "answered", "cost", "risk broken", "drop broken", "over budget")
    lines = [
        (cell["population"], str(cell["certifying"]), point, *(f"{at[f]:.3f}" if f in at else "" for f in figures))
        for cell in cells
        for point, at in cell["points"].items()
    ]
    print(table([("together", "certifying", "point", *figures), *lines]), flush=True)
    return cells


def resplitting(args: argparse.Namespace) -> dict:
    if args.records is None:
        raise SystemExit("--records: give clinc150_records.npz.")
    found = clinc(args.records, 3000, args.resplits, tuple(args.calibrators))
    print("\n".join(f"{key}: {value:.4g}" for key, value in found.items()))
    return found


PARTS = {"abstention": abstaining, "guarantee": guaranteeing, "together": together, "clinc150": resplitting}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["abstention", "guarantee", "together"])
    parser.add_argument("--draws", type=int, default=1000, help="a cell")
    parser.add_argument("--certifying", type=int, nargs="+", default=CERTIFYING, metavar="ROWS")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--records", type=Path, help="clinc150_records.npz, for the part clinc150")
    parser.add_argument("--calibrators", nargs="+", default=["identity"], help="of --records")
    parser.add_argument("--resplits", type=int, default=40, help="of --records")
    args = parser.parse_args()
    allowed = DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / args.draws)
    for part in args.parts:
        found = PARTS[part](args)
        if part != "clinc150":
            print(f"a promise may be broken in {allowed:.3f} of draws: delta + 3 standard errors")
        about = {"draws": args.draws, "delta": DELTA, "allowed": allowed, "found": found}
        print(save(f"promises-{part}", about))


if __name__ == "__main__":
    main()
