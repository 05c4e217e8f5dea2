"""How often 95% intervals hold the truth, from known populations: at least 93% in each cell.

`pytest -m slow -s tests/runtime/metrics/test_interval_coverage.py` runs every cell with 1,000 draws or more and
prints the table; by default a few cells run.
"""

import numpy as np
import pytest
from offramp.runtime import metrics
from offramp.runtime.scores import sigmoid

LEAST = 0.93
ROWS = (50, 300, 1000, 3000)

# Expected rows a sample, of those that only the full model has right and those that only the exits have.
DIFFERENCES = {
    "none": (0, 0),
    "rare": (0.2, 0),
    "rare both ways": (1, 1),
    "3.9 lost": (3.9, 0),
    "5 lost": (5, 0),
    "10 lost, 2 won": (10, 2),
    "20 each": (20, 20),
}
# Of exits at 0.2, 0.6 and 1 of the FLOPs, the rows that leave at the last two: a share, or a number a sample.
LEAVING = {
    "all at the first": (0, 0),
    "all but 0.2 rows": (0, 0.2),
    "all but 1 and 1": (1, 1),
    "all but 3.8": (0, 3.8),
    "spread": (0.3, 0.2),
    "half at each end": (0, 0.5),
    "all at the last": (0, 1.0),
    "all but 0.2 at the last": (0, -0.2),
}
SHARES = {"none": 0, "0.18 rows": 0.18, "1 row": 1, "3.8 rows": 3.8, "12 rows": 12, "half": -0.5}


def counts(given, n):
    """Chances a row, of numbers of rows a sample."""
    return np.array(given, np.float64) / n


def report(figure, cell, n, cover, draws, width):
    print(f"{figure:<10} {cell:<26} n={n:<5} cover={cover:.4f} draws={draws} width={width:.5f}")
    assert cover >= LEAST, (figure, cell, n)


def every_sample(samples, interval, truth):
    """Coverage and mean width over samples of counts, each distinct one judged once."""
    distinct, times = np.unique(samples, axis=0, return_counts=True)
    ends = np.array([interval(*one) for one in distinct.tolist()])
    inside = (ends[:, 0] <= truth + 1e-9) & (truth - 1e-9 <= ends[:, 1])
    return np.average(inside, weights=times), np.average(ends[:, 1] - ends[:, 0], weights=times)


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("cell", DIFFERENCES)
def test_the_drop(cell, n):
    lost, won = counts(DIFFERENCES[cell], n)
    samples = np.random.default_rng(n).multinomial(n, [lost, won, 1 - lost - won], 20_000)
    low, high = metrics.paired_difference_interval(samples[:, 0], samples[:, 1], n)
    cover = ((low <= lost - won + 1e-9) & (lost - won - 1e-9 <= high)).mean()
    report("drop", cell, n, cover, 20_000, (high - low).mean())


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("cell", SHARES)
def test_accuracy_coverage_and_risk(cell, n):
    given = SHARES[cell]
    truth = -given if given < 0 else given / n
    hits = np.random.default_rng(n).binomial(n, truth, 20_000)
    for side, share, seen in (("", truth, hits), (" missing", 1 - truth, n - hits)):
        found = every_sample(seen[:, None], lambda k: metrics.share_interval(k, n), share)
        report("share", cell + side, n, found[0], 20_000, found[1])


def mean_of_exits(cell, n, draws):
    second, last = LEAVING[cell]
    if cell in ("spread", "half at each end", "all at the last"):
        p = np.array([1 - second - last, second, last])
    elif last < 0:
        p = np.array([-last / n, 0, 1 + last / n])
    else:
        p = np.array([1 - (second + last) / n, second / n, last / n])
    cost = np.array([0.2, 0.6, 1.0])
    samples = np.random.default_rng(n).multinomial(n, p, draws)

    def interval(*leaving):
        return metrics.bounded_mean_interval(np.repeat(cost, leaving), 0.2, 1.0, draws=2000)

    found = every_sample(samples, interval, float(p @ cost))
    report("FLOPs", cell, n, found[0], draws, found[1])


@pytest.mark.parametrize("cell", ["all at the first", "all but 0.2 rows", "all but 3.8", "all at the last"])
def test_flops_of_points_that_nearly_all_rows_leave_at_one_exit(cell):
    mean_of_exits(cell, 300, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("cell", LEAVING)
def test_flops(cell, n):
    mean_of_exits(cell, n, 2000)


# ---------------------------------------------------------------- scores

# (log-odds as reported, chance of being right) of rows whose true log-odds are x.
POPULATIONS = {
    "calibrated": lambda x: (x, sigmoid(x)),
    "over-confident": lambda x: (2 * x, sigmoid(x)),
    "slightly so": lambda x: (1.1 * x, sigmoid(x)),
    "ties": lambda x: (np.round(x), sigmoid(np.round(x))),
    "four values": lambda x: (np.round(x / 2) * 2, sigmoid(np.round(x / 2) * 2)),
    "inverted ranking": lambda x: (x, sigmoid(-x)),
    "rare errors": lambda x: (x + 5, sigmoid(x + 5)),
    "rare, unranked errors": lambda x: (x + 5, np.full(x.shape, 0.995)),
    "1% label noise": lambda x: (4 + 2 * x, 0.99 * sigmoid(4 + 2 * x)),
    "separable": lambda x: (x, (x > -0.5).astype(float)),
    "separable but for 1%": lambda x: (x, 0.99 * (x > -0.5)),
    "all right": lambda x: (x, np.ones(x.shape)),
    "all right, and sure": lambda x: (x + 12, np.ones(x.shape)),
    "all wrong": lambda x: (x, np.zeros(x.shape)),
}
# The others rank rows as one of these does.
RANKED = [name for name in POPULATIONS if name not in ("over-confident", "slightly so", "all right, and sure")]
CALIBRATED = ("calibrated", "ties", "four values", "rare errors")


def rows_of(population, n, random):
    score, chance = POPULATIONS[population](random.normal(1.5, 1.5, n))
    return score, random.random(n) < chance


def binned_truth(population):
    """The population's ECE: the chance of being right instead of what happened to a million rows."""
    if population in CALIBRATED:
        return 0.0
    score, chance = POPULATIONS[population](np.random.default_rng(99).normal(1.5, 1.5, 2_000_000))
    bins = np.minimum((sigmoid(score) * 15).astype(int), 14)
    return float(np.abs(np.bincount(bins, sigmoid(score) - chance)).sum() / len(score))


def ece_covers(population, n, draws):
    truth, hits, width = binned_truth(population), 0, 0.0
    random = np.random.default_rng(n)
    for k in range(draws):
        score, right = rows_of(population, n, random)
        low, high = metrics.ece_interval(sigmoid(score), right, draws=1000, seed=k)
        hits += low <= truth + 1e-5 and truth - 1e-5 <= high
        width += high - low
    report("ECE", population, n, hits / draws, draws, width / draws)


@pytest.mark.parametrize("population", ["calibrated", "all right, and sure", "rare errors"])
def test_ece_of_calibrated_models(population):
    ece_covers(population, 300, 300)


@pytest.mark.slow
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("population", POPULATIONS)
def test_ece(population, n):
    ece_covers(population, n, 1000)


def rankings_cover(population, n, draws):
    score, right = rows_of(population, 1_000_000 if draws >= 1000 else 300_000, np.random.default_rng(98))
    truth = [measure(score, ~right) for measure in (metrics.auroc_f, metrics.aurc, metrics.augrc)]
    random = np.random.default_rng(n)
    ends = np.empty((draws, 3, 2))
    for k in range(draws):
        score, right = rows_of(population, n, random)
        found = metrics.ranking_intervals(score, ~right, draws=250, seed=k)
        ends[k] = found.auroc_f, found.aurc, found.augrc
    for name, true, both in zip(("AUROC_f", "AURC", "AUGRC"), truth, ends.swapaxes(0, 1), strict=True):
        known = both[~np.isnan(both[:, 0])]
        if np.isnan(true) or not len(known):
            continue
        inside = (known[:, 0] <= true + 1e-5) & (true - 1e-5 <= known[:, 1])
        report(name, population, n, inside.mean(), len(known), (known[:, 1] - known[:, 0]).mean())


@pytest.mark.parametrize("population", ["ties", "rare, unranked errors"])
def test_ranking_measures_on_few_rows(population):
    rankings_cover(population, 50, 200)


@pytest.mark.slow
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("population", RANKED)
def test_ranking_measures(population, n):
    rankings_cover(population, n, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("n", ROWS)
def test_eefp_of_two_exits(n):
    """`leave_here` joins what two exits got right: the interval is that of any binary target."""

    def drawn(rows, random):
        x = random.normal(1.5, 1.5, rows)
        right = np.stack([random.random(rows) < sigmoid(x), random.random(rows) < sigmoid(x + 1)])
        return x, metrics.leave_here(right)[0]

    truth = metrics.auroc(*drawn(2_000_000, np.random.default_rng(97)))
    random = np.random.default_rng(n)
    found = np.array([metrics.auroc_interval(*drawn(n, random), draws=400, seed=k) for k in range(1000)])
    found = found[~np.isnan(found[:, 0])]
    report("EEFP", "two exits", n, ((found[:, 0] <= truth) & (truth <= found[:, 1])).mean(), len(found), 0.0)
