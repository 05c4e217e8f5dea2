"""Which calibrator serves an exit. The proposing rows take turns in folds, so that each is judged by a calibrator
that hasn't seen it; where there are many logits, `fit` fits and `select` judges. The one chosen is fitted on both.

The choice is by the corrected confidence error ConfCE^corr, which nobody can lower by reporting other than what is
believed, and where that can't tell by the NLL of the label being right, which is truthful too and sees what averages
out in a bin. A hedged temperature stands, which is little where rows are in doubt of it, and the identity if neither
error is lower for the temperature: a test in favour of the identity would only tell how few the rows are (of 300 rows
1.15 times too sharp it kept an ECE of .0463 where the temperature's was .0106). Another serves if it is better than
what stands beyond chance. LinCE^cw must not be inferior and the early-exit failure prediction (EEFP) of the score not
significantly lower. ECE is shown and decides nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from offramp.runtime import calibration, metrics, scores
from offramp.runtime.arrays import Array, Bools, Floats, Ints, group_sums
from offramp.runtime.calibration import Calibrator
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.labelled_rows import LabelledRows
from offramp.runtime.metrics.bins import default_bins, quantile_sizes, stable_order
from offramp.runtime.metrics.resampling import draw_counts
from offramp.runtime.points import open_exits
from offramp.runtime.thresholds import leave_at

# Simplest first: a draw goes to the earlier. The first five need no logits at serving time, only the score.
AUTO = (
    "identity",
    "rank_preserving_power",
    "platt",
    "beta",
    "rank_preserving_isotonic",
    "temperature",
    "ensemble_temperature",
    "cwmcs",
)
ROUTED = "ar_condcal"
"""Joins AUTO when the audit of the model's routing says yes."""

# Fewer rows that reach an exit than this (of fit and select together) aren't enough to calibrate on.
LEAST_ROWS = 200
# No more rows and logits than this are used a fit: errors of what is fitted shrink below any that shows.
MOST_ROWS, MOST_VALUES = 20_000, 10_000_000
# One of these stands, by what is lower; the others have more to fit, and need to be better beyond chance.
SIMPLEST = ("identity", "temperature")
# LinCE^cw is inferior if it's this much higher than without calibration, as a share of it, and significantly higher.
# That the upper bound of the rise stays below can't be asked for: of 1,000 calibrated rows it refused the fitted
# temperature 4 times in 5, as a change of one standard error moves the rise by 2/bins.
MARGIN = 0.10
# Up to this many logits rows take turns in so many folds; with more a third of them judges well enough.
FOLDED_VALUES, FOLDS = 2_000_000, 5
# Standard errors within which two calibrators are a draw: 95%, one-sided. Of k that are tried one is better than what
# stands beyond chance at 1 − 5%/k.
DRAW, CHANCE = 1.645, 0.05
REPLICATES = 400
GROUPS = 64


@dataclass(frozen=True)
class Tried:
    """How one calibrator did at one group of exits, on held-out rows that reach them.

    confce_corr: n·ConfCE^corr; difference: its distance to the best eligible, with standard_error (bootstrap).
    lince_cw: n·LinCE^cw, lince_upper: upper 95% bound of its rise over the identity's, as a share of that.
    eefp: of the calibrated score against the raw one's, eefp_upper: upper 97.5% bound of the difference.
    nll: of the label being right or wrong.
    """

    exits: tuple[int, ...]
    calibrator: str
    rows: int
    confce_corr: float
    difference: float
    standard_error: float
    lince_cw: float
    lince_upper: float
    eefp: float
    eefp_raw: float
    eefp_upper: float
    ece: float
    nll: float
    eligible: bool
    chosen: bool
    why: str


@dataclass
class Selector:
    """Chooses calibrators for the exits of operating points, remembering what it did for the same rows."""

    propose: LabelledRows
    is_fit: Bools  # which of the proposing rows are of the fit part
    names: Sequence[str] = AUTO
    seed: int = 0
    _known: dict[str, tuple[Calibrator, list[Tried]]] = field(default_factory=dict)

    def choose(self, thresholds: Sequence[float]) -> tuple[tuple[Calibrator, ...], list[Tried]]:
        """One calibrator an exit under these thresholds, and the record of what was tried."""
        left = leave_at(self.propose.score, np.asarray(thresholds))
        exits = self.propose.exits
        chosen: list[Calibrator] = [calibration.get("identity") for _ in range(exits)]
        tried: list[Tried] = []
        for group in pooled(left, open_exits(thresholds)):
            rows = [np.flatnonzero(left >= j) for j in group]
            if sum(map(len, rows)) < LEAST_ROWS or (len(self.names) == 1 and self.names[0] == "identity"):
                continue
            best, lines = self._group(tuple(group), rows)
            tried += lines
            for j in group:
                chosen[j] = best
        return tuple(chosen), tried

    def _group(self, group: tuple[int, ...], rows: list[Ints]) -> tuple[Calibrator, list[Tried]]:
        key = hashlib.sha256(repr(group).encode() + b"".join(r.tobytes() for r in rows)).hexdigest()
        if key not in self._known:
            self._known[key] = self._compete(group, rows)
        return self._known[key]

    def _compete(self, group: tuple[int, ...], rows: list[Ints]) -> tuple[Calibrator, list[Tried]]:
        names = [name for name in self.names if "routing" not in calibration.kind(name).needs or len(group) == 1]
        judged, turn, answers = self._held_out(group, rows, names)
        if not answers:
            return calibration.get("identity"), []
        z, y, _ = self._data(group, judged)
        judge = _Judge(z, y, self._leave_here(group, judged), np.concatenate(judged), turn, self.seed)
        del z
        measured = {name: judge.measure(*answers.pop(name), _safe(name)) for name in names}
        winner, lines = decide(group, measured)
        if winner == "identity":
            return calibration.get("identity"), lines
        z, y, aux = self._data(group, _limited(rows, self.propose.classes, np.random.default_rng(self.seed)))
        return fresh(winner).fit(z, y, aux=aux), lines

    def _held_out(
        self, group: tuple[int, ...], rows: list[Ints], names: Sequence[str]
    ) -> tuple[list[Ints], Ints, dict[str, tuple[Floats, Array]]]:
        """Rows to judge on, the turn each had, and each calibrator's (log-odds, probabilities) there, fitted
        without them."""
        rng = np.random.default_rng(self.seed)
        classes = self.propose.classes
        some = _limited(rows, classes, rng)
        if sum(map(len, some)) * classes <= FOLDED_VALUES:
            fold = rng.permutation(len(self.propose)) % FOLDS
            turns = [([r[fold[r] != k] for r in some], [r[fold[r] == k] for r in some]) for k in range(FOLDS)]
        else:
            fitting = _limited([r[self.is_fit[r]] for r in rows], classes, rng)
            turns = [(fitting, _limited([r[~self.is_fit[r]] for r in rows], classes, rng))]
        turns = [(fitting, judging) for fitting, judging in turns if sum(map(len, fitting)) and sum(map(len, judging))]
        made: dict[str, list[tuple[Floats, Array]]] = {name: [] for name in names}
        for fitting, judging in turns:
            z, y, aux = self._data(group, fitting)
            fitted = {name: fresh(name).fit(z, y, aux=aux) for name in names}
            z, y, aux = self._data(group, judging)
            for name, one in fitted.items():
                made[name].append((one.score({**aux, "logits": z}), one.apply(z, aux)))
        if not turns:
            return [], np.zeros(0, np.int64), {}
        # By exit, then by turn, as `_data` puts rows that are given an exit at a time.
        judged = [np.concatenate([judging[k] for _, judging in turns]) for k in range(len(group))]
        pieces = [np.cumsum([0, *(len(r) for r in judging)]) for _, judging in turns]

        def joined(values: list[Array]) -> Array:
            return np.concatenate(
                [v[ends[k] : ends[k + 1]] for k in range(len(group)) for v, ends in zip(values, pieces, strict=True)]
            )

        turn = joined([np.full(ends[-1], t) for t, ends in enumerate(pieces)])
        return (
            judged,
            turn,
            {
                name: (joined([odds for odds, _ in parts]), joined([p for _, p in parts]))
                for name, parts in made.items()
            },
        )

    def _data(self, group: tuple[int, ...], rows: list[Ints]) -> tuple[Array, Ints, dict[str, Array]]:
        p = self.propose
        z = np.concatenate([p.logits[j][r] for j, r in zip(group, rows, strict=True)])
        aux = p.aux(group[0], rows[0]) if len(group) == 1 else {}
        return z, np.concatenate([p.truth[r] for r in rows]), aux

    def _leave_here(self, group: tuple[int, ...], rows: list[Ints]) -> Bools:
        target = metrics.leave_here(self.propose.correct)
        return np.concatenate([target[j, r] for j, r in zip(group, rows, strict=True)])


def fresh(name: str) -> Calibrator:
    """An unfitted calibrator as it is served: a temperature is hedged."""
    return calibration.get(name, hedged=True) if name == "temperature" else calibration.get(name)


def _safe(name: str) -> bool:
    return calibration.get(name).preserves_argmax


def pooled(left: Ints, used: Sequence[int], least: int = LEAST_ROWS) -> list[list[int]]:
    """The exits in use, in groups that enough rows reach: deep ones that few reach share one calibrator."""
    counts = {j: int((left >= j).sum()) for j in used}
    enough = [j for j in used if counts[j] >= least]
    deep = [j for j in used if counts[j] < least]
    groups = [[j] for j in enough]
    if deep and groups and sum(counts[j] for j in deep) < least:
        groups[-1] += deep
    elif deep:
        groups.append(deep)
    return groups


def _limited(rows: list[Ints], classes: int, rng: np.random.Generator) -> list[Ints]:
    total, most = sum(map(len, rows)), min(MOST_ROWS, max(LEAST_ROWS, MOST_VALUES // classes))
    if total <= most:
        return rows
    return [np.sort(rng.choice(r, round(len(r) * most / total), replace=False)) for r in rows]


@dataclass(frozen=True)
class Measured:
    """A calibrator on the judging rows, with what it takes to compare two of them on the same resamples.

    confce_draws: (R,) n·ConfCE^corr on resamples. losses: NLL of the label being right or wrong, summed by distinct
    row: what two exits say of a row isn't independent. lince_gram: (G, G) Σ over classes and bins of the products of
    residual sums of G groups of rows; Σ of it is n²·C·LinCE^cw.
    """

    confce: float
    confce_draws: Floats
    lince_gram: Floats
    rows: int
    classes: int
    eefp: float
    eefp_raw: float
    eefp_upper: float
    ece: float
    losses: Floats
    preserves_argmax: bool

    def lince(self, weights: Floats | None = None) -> Floats:
        """n·LinCE^cw, on all rows or for (R, G) group weights."""
        w = np.ones((1, len(self.lince_gram))) if weights is None else weights
        mass = self.rows * self.classes
        return np.asarray(np.einsum("rg,gh,rh->r", w, self.lince_gram, w) / mass)


class _Judge:
    def __init__(self, z: Array, y: Ints, leave_here: Bools, rows: Ints, turn: Ints, seed: int) -> None:
        """rows: which row each entry is of; a row may be there once an exit, and is drawn as a whole.
        turn: in which turn it was held out; each had a calibrator of its own, so only there is order compared."""
        self._seed, self._y, self._leave_here, self._turn = seed, y, leave_here, turn
        self._raw, self._correct = scores.log_odds(z), scores.top_label(z) == y
        # Bins follow the stable order, and outcomes mustn't decide it where reports tie.
        self._shuffled = np.random.default_rng(seed).permutation(len(y))
        draws = np.random.default_rng(seed + 1)
        names, place = np.unique(rows, return_inverse=True)
        self._place = place
        n = len(names)
        counts = np.concatenate(list(draw_counts(n, REPLICATES, draws)))
        self._counts = counts[:, place]
        self._group = draws.permutation(n)[place] % min(GROUPS, n)

    def measure(self, odds: Floats, probabilities: Array, safe: bool) -> Measured:
        """odds, probabilities: of a calibrator on these rows. safe: whether it never changes an answer."""
        confidence = scores.sigmoid(odds)
        n = len(odds)
        wrong = ~self._correct
        eefp, eefp_raw, upper = self._eefp(odds)
        return Measured(
            confce=n * metrics.confce_corr(confidence, self._correct, seed=self._seed),
            confce_draws=metrics.confce_corr_resampled(confidence, self._correct, self._counts, seed=self._seed),
            lince_gram=self._gram(probabilities),
            rows=n,
            classes=probabilities.shape[1],
            eefp=eefp,
            eefp_raw=eefp_raw,
            eefp_upper=upper,
            ece=metrics.ece(confidence, self._correct),
            losses=group_sums(self._place, np.logaddexp(0.0, np.where(wrong, odds, -odds)), int(self._place.max()) + 1),
            preserves_argmax=safe,
        )

    def _gram(self, p: Array) -> Floats:
        """Residual sums by group of rows, class and bin, reduced to products of groups."""
        n, classes = p.shape
        bins, groups = default_bins(n), int(self._group.max()) + 1
        sizes = quantile_sizes(n, bins)
        number = np.repeat(np.arange(bins), sizes)
        gram = np.zeros((groups, groups))
        for k in range(classes):
            report = p[:, k]
            gap = report.astype(np.float64)
            gap[self._y == k] -= 1.0
            order = self._shuffled[stable_order(report[self._shuffled])]
            cell = self._group[order] * bins + number
            sums = np.bincount(cell, gap[order], minlength=groups * bins).reshape(groups, bins)
            gram += sums @ sums.T
        return gram

    def _eefp(self, odds: Floats) -> tuple[float, float, float]:
        """EEFP of the calibrated and of the raw score, and an upper bound of the difference: means over the
        turns. NaN at the last exit, where every row leaves."""
        own, raw, draws = [], [], []
        for t in np.unique(self._turn):
            at = self._turn == t
            score, before, target = odds[at], self._raw[at], self._leave_here[at]
            plain = metrics.auroc(before, target)
            if np.isnan(plain):
                continue
            raw.append(plain)
            own.append(metrics.auroc(score, target))
            same = np.array_equal(np.argsort(before, kind="stable"), np.argsort(score, kind="stable"))
            if same and own[-1] == plain:
                draws.append(np.zeros(REPLICATES))
            else:
                compared = metrics.compare(
                    metrics.auroc_f, [score], [before], ~target, replicates=REPLICATES, seed=self._seed
                )
                draws.append(np.nan_to_num(compared.replicates))
        if not raw:
            return float("nan"), float("nan"), float("nan")
        return float(np.mean(own)), float(np.mean(raw)), float(np.quantile(np.mean(draws, axis=0), 0.975))


def decide(group: tuple[int, ...], measured: dict[str, Measured]) -> tuple[str, list[Tried]]:
    """The winner's name, and a line for each calibrator saying why it won or didn't. Simplest first."""
    upper, reasons = _refused(measured)
    eligible = [name for name in measured if name not in reasons]
    best = min(eligible, key=lambda name: measured[name].confce)
    away = {name: _further(m, measured[best]) for name, m in measured.items()}
    winner, won = _winner({name: measured[name] for name in eligible})
    lines = []
    for name, m in measured.items():
        lines.append(
            Tried(
                exits=group,
                calibrator=name,
                rows=m.rows,
                confce_corr=m.confce,
                difference=away[name][0],
                standard_error=away[name][1],
                lince_cw=float(m.lince()[0]),
                lince_upper=upper[name],
                eefp=m.eefp,
                eefp_raw=m.eefp_raw,
                eefp_upper=m.eefp_upper,
                ece=m.ece,
                nll=float(m.losses.sum() / m.rows),
                eligible=name in eligible,
                chosen=name == winner,
                why=won if name == winner else reasons.get(name) or _lost(m, measured[winner], winner),
            )
        )
    return winner, lines


def _refused(measured: dict[str, Measured]) -> tuple[dict[str, float], dict[str, str]]:
    """By name: the upper bound of the rise of LinCE^cw, and what speaks against serving it, if something does."""
    plain = measured["identity"]
    rng = np.random.default_rng(0)
    groups = len(plain.lince_gram)
    weights = rng.multinomial(groups, np.full(groups, 1 / groups), size=REPLICATES).astype(np.float64)
    base, base_draws = float(plain.lince()[0]), plain.lince(weights)
    upper, reasons = {}, {}
    for name, m in measured.items():
        rise = (float(m.lince()[0]) - base) / base if base > 0 else 0.0
        # Resampled squares carry the noise twice: their spread is used, not their place.
        spread = float((m.lince(weights) - base_draws).std()) / base if name != "identity" and base > 0 else 0.0
        upper[name] = rise + DRAW * spread
        if not m.preserves_argmax:
            reasons[name] = "may change the answer itself, so it isn't served beside the gate"
        elif rise > MARGIN and rise > DRAW * spread:
            reasons[name] = f"LinCE^cw is {rise:.1%} higher than without, significantly and by more than {MARGIN:.0%}"
        elif m.eefp_upper < 0:
            reasons[name] = f"its score tells worse who should leave: EEFP {m.eefp:.4f} against {m.eefp_raw:.4f}"
    return upper, reasons


def _further(one: Measured, other: Measured) -> tuple[float, float]:
    """How much higher n·ConfCE^corr of one is, and the standard error of that."""
    return one.confce - other.confce, float((one.confce_draws - other.confce_draws).std())


def _costlier(one: Measured, other: Measured) -> tuple[float, float]:
    """How much higher the NLL of one is, summed over rows, and the standard error of that."""
    gap = one.losses - other.losses
    return float(gap.sum()), float(gap.std() * np.sqrt(len(gap)))


def _winner(eligible: dict[str, Measured]) -> tuple[str, str]:
    """What stands, unless others are better beyond chance: then the simplest that can't be told from the best of
    them. And why."""
    standing, why = _standing(eligible)
    others = [name for name in eligible if name not in SIMPLEST]
    beyond = NormalDist().inv_cdf(1 - CHANCE / max(len(others), 1))
    for figure, differ in (("n·ConfCE^corr", _further), ("NLL", _costlier)):
        gains = {name: differ(eligible[name], eligible[standing]) for name in others}
        better = {name: gain for name, (gain, error) in gains.items() if gain < -beyond * error}
        if better:
            best = min(better, key=lambda name: better[name])
            away = {name: differ(eligible[name], eligible[best]) for name in better}
            name = next(name for name, (gap, error) in away.items() if gap <= DRAW * error)
            alike = "" if name == best else f", and not told apart from that of {best}"
            return name, f"{figure} significantly lower than that of {standing}{alike}"
    return standing, f"{why}, and no other is significantly better"


def _standing(eligible: dict[str, Measured]) -> tuple[str, str]:
    """The hedged temperature, unless it lowers neither truthful error: then the identity. And why."""
    if "temperature" in eligible:
        warm, plain = eligible["temperature"], eligible["identity"]
        for figure, (gap, _) in (("n·ConfCE^corr", _further(warm, plain)), ("NLL", _costlier(warm, plain))):
            if gap < 0:
                return "temperature", f"{figure} lower than that of identity"
    return "identity", "no temperature lowers n·ConfCE^corr or NLL"


def _lost(m: Measured, winner: Measured, name: str) -> str:
    gap, error = _further(m, winner)
    if gap > DRAW * error:
        return f"n·ConfCE^corr {gap:.3g} above {name}'s, significantly"
    return f"not significantly better than {name}"


def resolve(names: Sequence[str] | str, routing: bool) -> tuple[str, ...]:
    """The calibrators meant by "auto", "none" or names, simplest first, identity among them.

    routing: whether the audit of the model's routing said yes; only then may `ar_condcal` be asked for.
    """
    asked = (names,) if isinstance(names, str) else tuple(names)
    found: list[str] = ["identity"]
    for name in asked:
        if name == "none":
            continue
        if name == "auto":
            found += [*AUTO, *([ROUTED] if routing else [])]
            continue
        if name == ROUTED and not routing:
            raise InputError(
                f"calibrator {ROUTED!r}: offered only for models whose routing the audit says yes to "
                "(`offramp audit bundle/ records/` gives the reasons)."
            )
        calibration.kind(name)
        found.append(name)
    order = {name: k for k, name in enumerate((*AUTO, ROUTED))}
    return tuple(sorted(dict.fromkeys(found), key=lambda name: order.get(name, len(order))))
