"""The calibration job: from labelled records to named operating points, each with what it promises and why.

Rows are split into fit, select, certify and test (see `splits`). Exit rules come from fit and select (see
`targets`), each exit's calibrator too (see `selection`), promises from certify alone, figures from test alone.
Each promise holds by itself with its own delta; it isn't a statement about all of them at once.
"""

import datetime
import hashlib
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime import arrays
from offramp.runtime.arrays import Ints
from offramp.runtime.bundle import Manifest, read_bundle
from offramp.runtime.calibration_file import Calibration, encode_calibration
from offramp.runtime.errors import BundleError, InputError, OfframpError
from offramp.runtime.jobs.auditing.audit import audit_records
from offramp.runtime.jobs.bundles.time_model import TimeModel, measure
from offramp.runtime.jobs.calibrating.choose_points import Line, Progress, choose_points
from offramp.runtime.jobs.calibrating.comparison import LEAST_ROWS, Compared, compare_points, refusals
from offramp.runtime.jobs.calibrating.history import History, Keys
from offramp.runtime.jobs.calibrating.selection import ROUTED, resolve
from offramp.runtime.jobs.calibrating.shift import held, shifted
from offramp.runtime.jobs.calibrating.targets import DEFAULT, AbstainRisk, Chooser, MaxMs, Target
from offramp.runtime.jobs.data.expected import flat
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, check_labels, labelled_rows, row_keys
from offramp.runtime.jobs.data.opened import Openable, OpenedRecords, open_records
from offramp.runtime.jobs.data.splits import Split, split_rows
from offramp.runtime.points import OperatingPoint


class CalibrationRefused(OfframpError):
    """The new calibration is significantly worse than the one in force, so nothing was replaced."""

    def __init__(self, message: str, result: "Calibrated") -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Calibrated:
    """What the job found. The tables are lists of flat dicts, one a line: `pandas.DataFrame(result.points)`.

    calibration: the new one. points: figures on test rows. promises: each against what test rows showed.
    tried: calibrators, by point and exits. compared: against the calibration in force. shifts,
    shift_promises: on other data. unmet: targets that can't be kept, with the closest that can. notes: what
    is odd about the data. refused: why it mustn't replace the one in force. times: (J,) cumulative
    milliseconds, where measured. files: report.html and metrics.json. written: the folder in history/, None
    after a dry run.
    """

    calibration: Calibration
    evidence: LabelledRows
    split: Split
    points: list[Line]
    promises: list[Line]
    tried: list[Line]
    compared: list[Line]
    shifts: list[Line]
    shift_promises: list[Line]
    unmet: list[str]
    notes: list[str]
    refused: list[str]
    provenance: Mapping[str, Any]
    chooser: Chooser
    classes: tuple[str, ...] | None = None
    times: tuple[float, ...] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    written: Path | None = None

    @property
    def test(self) -> LabelledRows:
        return self.evidence.take(self.split.test)


def calibrate(
    bundle: str | Path | None,
    records: Openable,
    *,
    targets: Sequence[Target] = DEFAULT,
    abstain: Sequence[AbstainRisk] = (AbstainRisk(0.05),),
    calibrators: str | Sequence[str] = "auto",
    seed: int = 0,
    times: Sequence[float] | TimeModel | None = None,
    shifts: Mapping[str, Openable] | None = None,
    subgroup: tuple[str, ArrayLike] | None = None,
    out: str | Path | None = None,
    dry_run: bool = False,
    force: bool = False,
    report: bool = True,
    command: str = "",
    progress: Progress | None = None,
) -> Calibrated:
    """Calibrate a bundle (or, with `out`, logits of no bundle) and put the result in force.

    targets, abstain: as in `choose_points`. times: (J,) milliseconds of leaving at each exit, or a `TimeModel`;
    measured where `MaxMs` needs them and there is a bundle. calibrators: "auto", "none", or names; `ar_condcal` needs
    a yes from the audit. shifts: name -> records of shifted or out-of-scope data. subgroup: a name and one
    value a row of the records, for tables by group. force: replace a better calibration, too. report: also
    write report.html and metrics.json beside the calibration kept in history/. command: for the report.

    The same records, options and seed give the same calibration, its date apart. Raises InputError for data
    that can't be calibrated on, CalibrationRefused (with the result) when the one in force is better.
    """
    arrays.seed(seed)
    home, classes = _home(bundle, out)
    opened = open_records(records, home.manifest)
    everything = labelled_rows(opened.records)
    _groups(subgroup, len(everything))
    labelled = np.flatnonzero(everything.truth >= 0)
    evidence = everything.take(labelled)
    notes = [*opened.notes, *check_labels(evidence)]
    if len(labelled) < len(everything):
        notes.append(
            f"{len(everything) - len(labelled)} of {len(everything)} rows are labelled −1 (unknown or out of scope): "
            "they decide nothing, and are reported as the shift 'unlabelled'."
        )
    split = split_rows(evidence.truth, seed)
    yes, verdict = _audited(opened, evidence.rows[split.propose], calibrators)
    if verdict:
        notes.append(verdict)
    chosen = resolve(calibrators, yes)
    model = _time_model(times, evidence.exits)
    if model is None and home.manifest is not None and any(isinstance(t, MaxMs) for t in targets):
        model = measure(home.path, opened.records)
    points, tried, unmet, chooser = choose_points(
        evidence,
        split,
        targets=targets,
        abstain=abstain,
        calibrators=chosen,
        times=model,
        seed=seed,
        progress=progress,
    )
    keys = row_keys(evidence)
    provenance = {
        "records": dict(opened.described),
        "rows": len(everything),
        "labelled": len(labelled),
        "split": split.sizes(),
        "seed": seed,
        "fingerprint": hashlib.sha256(keys.tobytes()).hexdigest(),
        "calibrators": list(chosen),
        "versions": versions_of(),
        "command": command,
    }
    test = evidence.take(split.test)
    made_from = np.delete(keys, split.test)
    moved, moved_promises = _shifts(shifts or {}, opened, everything, test, points, home.manifest, made_from, notes)
    # Nobody may put another one in force between this look at the one in force and `publish`.
    with nullcontext() if dry_run else home.locked():
        current = _current(home, notes)
        version = home.next_version(current)
        notes += _lost(current, points)
        made = Calibration(points, version, provenance=provenance, manifest=home.digest)
        compared, refused = _judge(home, current, points, test, keys[split.test], notes, seed)
        result = Calibrated(
            calibration=made,
            evidence=evidence,
            split=split,
            points=[{"point": name, **flat(point.expected)} for name, point in points.items()],
            promises=[
                {"point": name, **promise}
                for name, point in points.items()
                for promise in held(point, flat(point.expected))
            ],
            tried=tried,
            compared=[asdict(one) for one in compared],
            shifts=moved,
            shift_promises=moved_promises,
            unmet=unmet,
            notes=notes,
            refused=refused,
            provenance=provenance,
            chooser=chooser,
            classes=classes,
            times=None if model is None else model.exit_ms,
        )
        if report:
            result = replace(result, files=_report(result, subgroup, labelled))
        if refused and not force and not dry_run:
            more = f"; and {len(refused) - 1} more" if len(refused) > 1 else ""
            raise CalibrationRefused(f"the calibration in force is better, so it stays: {refused[0]}{more}.", result)
        if dry_run:
            return result
        document = encode_calibration(
            made,
            home.digest,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            producer=f"offramp {metadata.version('offramp')}",
        )
        written = home.publish(document, version, result.files, made_from)
        return replace(result, written=written)


def _home(bundle: str | Path | None, out: str | Path | None) -> tuple[History, tuple[str, ...] | None]:
    if bundle is not None:
        opened = read_bundle(bundle)
        return History(opened.path, opened.manifest), tuple(opened.manifest.classes)
    if out is None:
        raise InputError("out: without a bundle, name a folder for the calibration.")
    return History(Path(out)), None


def _audited(opened: OpenedRecords, rows: Ints, calibrators: str | Sequence[str]) -> tuple[bool, str]:
    """Whether the audit of the model's routing says yes, with its verdict; test and certify are kept out."""
    asked = (calibrators,) if isinstance(calibrators, str) else calibrators
    if opened.records.routing is None or not {"auto", ROUTED} & set(asked):
        return False, ""
    found = audit_records(opened, rows=rows[:_MOST_AUDITED])
    return found.yes, f"audit of the routing: {found.verdict}"


# The audit's time grows with the square of the rows.
_MOST_AUDITED = 5000


def _time_model(times: Sequence[float] | TimeModel | None, exits: int) -> TimeModel | None:
    return times if times is None or isinstance(times, TimeModel) else TimeModel.given(times, exits)


def _current(home: History, notes: list[str]) -> Calibration | None:
    """The calibration in force; one that can't be read is replaced, which is what its error asks for."""
    try:
        return home.current()
    except BundleError as error:
        notes.append(f"the calibration in force can't be read, so nothing was compared with it: {error}")
        return None


def _lost(current: Calibration | None, points: Mapping[str, OperatingPoint]) -> list[str]:
    """Operating points of the calibration in force that its users could no longer name."""
    lost = [name for name in current.points if name not in points] if current is not None else []
    if current is None or not lost:
        return []
    named = ", ".join(map(repr, lost))
    return [
        f"version {current.version}, in force, has operating points that this calibration lacks: {named}. "
        "Ask for them again to keep them."
    ]


def _judge(
    home: History,
    current: Calibration | None,
    points: Mapping[str, OperatingPoint],
    test: LabelledRows,
    keys: Keys,
    notes: list[str],
    seed: int,
) -> tuple[list[Compared], list[str]]:
    """Compare with the calibration in force, on test rows that made neither."""
    if current is None or not current.version:
        return [], []
    if len(next(iter(current.points.values())).thresholds) != test.exits:
        return [], []
    used = home.used(current.version)
    untouched = test
    if used is None:
        notes.append(
            f"history/ doesn't say which rows made version {current.version}: the comparison takes all test rows, "
            "some of which may have."
        )
    else:
        untouched = test.take(np.flatnonzero(~np.isin(keys, used)))
    if len(untouched) < LEAST_ROWS:
        notes.append(
            f"not compared with version {current.version}: neither was made from {len(untouched)} of the test rows, "
            f"expected at least {LEAST_ROWS}."
        )
        return [], []
    compared = compare_points(current.points, points, untouched, seed=seed)
    return compared, refusals(compared)


def _shifts(
    shifts: Mapping[str, Openable],
    opened: OpenedRecords,
    everything: LabelledRows,
    test: LabelledRows,
    points: Mapping[str, OperatingPoint],
    manifest: Manifest | None,
    made_from: Keys,
    notes: list[str],
) -> tuple[list[Line], list[Line]]:
    """Figures and promises on other data, and a note on rows there that the calibration was made from."""
    moved: dict[str, LabelledRows] = {}
    unknown = np.flatnonzero(everything.truth < 0)
    if len(unknown):
        moved["unlabelled"] = everything.take(unknown)
    for name, given in shifts.items():
        other = open_records(given, manifest).records
        if other.truth is None:  # nothing in scope is known, so nothing is
            other = replace(other, truth=np.full(len(other), -1))
        if other.routing_seen is None:
            other = replace(other, routing_seen=opened.records.routing_seen)
        moved[name] = labelled_rows(other)
        if moved[name].exits != test.exits or moved[name].classes != test.classes:
            raise InputError(
                f"shift {name!r}: {moved[name].exits} exits and {moved[name].classes} classes, the records have "
                f"{test.exits} and {test.classes}."
            )
        seen = int(np.isin(row_keys(moved[name]), made_from).sum())
        if seen:
            notes.append(
                f"shift {name!r}: {seen} of its {len(moved[name])} rows were calibrated on, so its figures are better "
                "than new rows would give."
            )
    lines: list[Line] = []
    promises: list[Line] = []
    for name, rows in moved.items():
        some, kept = shifted(name, points, test, rows)
        lines, promises = lines + some, promises + kept
    return lines, promises


def _groups(subgroup: tuple[str, ArrayLike] | None, rows: int) -> NDArray[Any] | None:
    if subgroup is None:
        return None
    values = np.asarray(subgroup[1])
    if values.shape != (rows,) or values.dtype.kind not in "biufSU":
        raise InputError(
            f"subgroup {subgroup[0]!r}: expected one value a row, {rows} of them, got {values.dtype} {values.shape}."
        )
    return values.astype(str)


def _report(result: Calibrated, subgroup: tuple[str, ArrayLike] | None, labelled: Ints) -> dict[str, bytes]:
    from offramp.runtime.jobs.calibrating.report import METRICS, REPORT, metrics_of, to_json
    from offramp.runtime.jobs.calibrating.report_page import page

    groups = None
    if subgroup is not None:
        values = _groups(subgroup, int(result.provenance["rows"]))
        assert values is not None
        groups = (subgroup[0], values[labelled][result.split.test])
    found = metrics_of(result, groups)
    return {METRICS: to_json(found), REPORT: page(result, found).encode()}


def versions_of() -> dict[str, str]:
    """What took part, for the report: a result is only the same with the same."""
    found = {"python": platform.python_version()}
    for name in ("offramp", "numpy", "scipy", "onnxruntime"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
