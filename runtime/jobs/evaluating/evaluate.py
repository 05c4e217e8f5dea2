"""The evaluate job: what a bundle's operating points do on labelled rows, against what was promised of them."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from offramp.runtime.bundle import Bundle, read_bundle
from offramp.runtime.calibration_file import Calibration, read_calibration
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.calibrating.about import about
from offramp.runtime.jobs.calibrating.history import History
from offramp.runtime.jobs.calibrating.promises import estimated, held
from offramp.runtime.jobs.calibrating.report.headline import headline
from offramp.runtime.jobs.data.expected import Line, expected, flat
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, labelled_rows, outcome_of, row_keys
from offramp.runtime.jobs.data.opened import Openable, OpenedRecords, open_records
from offramp.runtime.jobs.data.sources import open_data
from offramp.runtime.jobs.data.tables import LABELS
from offramp.runtime.jobs.evaluating.classes import by_class
from offramp.runtime.jobs.recording.record import Progress, record
from offramp.runtime.points import OperatingPoint
from offramp.runtime.predictions import Records
from offramp.runtime.records import INDEX

SCHEMA = "offramp-evaluation/1"
# Of what calibration measured, what can be compared with what is measured now.
FIGURES = ("accuracy", "flops_fraction", "coverage", "risk")
_NAMES = dict(zip(FIGURES, ("accuracy", "FLOPs", "coverage", "risk"), strict=True))


@dataclass(frozen=True)
class Evaluation:
    """Tables are lists of flat dicts, one a line: `pandas.DataFrame(found.points)`.

    about: model, date, machine, version of the calibration. source: "records" or "data"; how: in words, what was run.
    rows: with a label; unlabelled: rows without, which are in no figure but `unlabelled_abstained`. headline: the
    point to speak of first. points: a line a point, figures with 95% intervals and, as then_…, what calibration had
    measured. classes: a line a class and point. promises: those with a δ, as `held` has them; estimates: the other
    targets. notes: what is odd, in sentences.
    """

    about: Mapping[str, Any]
    source: str
    how: str
    rows: int
    unlabelled: int
    headline: str
    points: list[Line]
    classes: list[Line]
    promises: list[Line]
    estimates: list[Line]
    notes: list[str]

    @property
    def broken(self) -> list[Line]:
        """The promises that these rows show broken: all of the 95% interval is beyond what was promised."""
        return [line for line in self.promises if line["held"] is False]


def evaluate(
    bundle: str | Path,
    labelled: Openable,
    *,
    points: Sequence[str] = (),
    device: str = "cpu",
    threads: int | None = None,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Accuracy, drop, FLOPs, coverage and risk of operating points on labelled rows, in all and by class.

    labelled: what `record` takes, which is run once here through all exits, or records of this bundle, from which
        nothing is run. Either way each point is simulated from that with the rule that serves.
    points: names, all of the bundle's by default. progress: called with rows done and in all, while rows are run.
    Raises InputError where there are no rows with a label, or a point or what `labelled` names isn't there.
    """
    opened = read_bundle(bundle)
    calibration = read_calibration(opened.path, opened.manifest)
    chosen = {name: calibration.point(name) for name in (dict.fromkeys(points) or calibration.points)}
    with _records(opened, labelled, device, threads, allow_nonfinite, progress) as (source, records):
        return _evaluation(opened, calibration, chosen, source, records)


@contextmanager
def _records(
    bundle: Bundle,
    labelled: Openable,
    device: str,
    threads: int | None,
    allow_nonfinite: bool,
    progress: Progress | None,
) -> Iterator[tuple[str, OpenedRecords]]:
    """("records" or "data", the records), kept in a folder of their own for as long as they are needed."""
    if isinstance(labelled, Records | OpenedRecords) or (Path(labelled) / INDEX).exists():
        opened = open_records(labelled, bundle.manifest)
        _check_labelled(opened.name, opened.records.truth, "records of labelled rows")
        yield "records", opened
        return
    sources = open_data(labelled, bundle)
    labels = [source.labels for source in sources if source.labels is not None]
    expected_ = f"a column `{LABELS[0]}` beside the rows, with a class number or name each (-1 where unknown)"
    _check_labelled(str(labelled), np.concatenate(labels) if labels else None, expected_)
    with tempfile.TemporaryDirectory(prefix="offramp-") as folder:
        with Cascade.load(bundle.path, device, threads=threads) as cascade:
            made = record(
                cascade, labelled, Path(folder, "records"), allow_nonfinite=allow_nonfinite, progress=progress
            )
        yield "data", open_records(made, bundle.manifest)


def _check_labelled(name: str, truth: Any, wanted: str) -> None:
    if truth is None:
        raise InputError(f"{name}: has no `{LABELS[0]}`, and without them nothing can be evaluated. Expected {wanted}.")
    if not (np.asarray(truth) >= 0).any():
        raise InputError(f"{name}: none of its {len(truth):,} rows has a label in `{LABELS[0]}`. Expected {wanted}.")


def _evaluation(
    bundle: Bundle,
    calibration: Calibration,
    points: Mapping[str, OperatingPoint],
    source: str,
    opened: OpenedRecords,
) -> Evaluation:
    everything = labelled_rows(opened.records)
    known = everything.truth >= 0
    rows, rest = everything.take(np.flatnonzero(known)), everything.take(np.flatnonzero(~known))
    manifest = bundle.manifest
    lines, classes = [], []
    for name, point in points.items():
        outcome = outcome_of(rows, point)
        figures = flat(expected(rows, point, outcome))
        abstained = float(outcome_of(rest, point).abstain.mean()) if len(rest) else None
        lines.append({"point": name, **figures, "unlabelled_abstained": abstained, **_then(point)})
        classes += [{"point": name, **line} for line in by_class(rows, outcome, manifest.classes)]
    promises, estimates = (
        [{"point": line["point"], **found} for line in lines for found in judge(points[line["point"]], line)]
        for judge in (held, estimated)
    )
    return Evaluation(
        about={**about(manifest, rows, None), "calibration": calibration.version, "labelled": opened.name},
        source=source,
        how=f"{len(everything):,} recorded rows, simulated with the rule that serves; nothing was run"
        if source == "records"
        else f"{len(everything):,} rows run once through all exits, and each point simulated from that",
        rows=len(rows),
        unlabelled=len(rest),
        headline=headline(lines, promises, estimates),
        points=lines,
        classes=classes,
        promises=promises,
        estimates=estimates,
        notes=[*_odd(rows, lines, len(rest)), *_seen_before(bundle, calibration, points, rows), *_moved(lines)],
    )


def _then(point: OperatingPoint) -> Line:
    """What calibration had measured of a point, on its own rows."""
    then = {f"then_{key}": value for key, value in flat(point.expected).items() if key.startswith(FIGURES)}
    return {**then, "then_rows": point.expected.get("rows")}


def _odd(rows: LabelledRows, lines: Sequence[Line], unlabelled: int) -> list[str]:
    notes = []
    if unlabelled:
        abstained = ", ".join(f"{line['point']} {line['unlabelled_abstained']:.1%}" for line in lines)
        notes.append(
            f"{unlabelled:,} rows have no label (-1) and are in none of the figures; abstained on: {abstained}."
        )
    present = len(np.unique(rows.truth))
    if present == 1 and rows.classes > 1:
        notes.append("every row has the same label, so nothing is known of the other classes.")
    elif present < rows.classes:
        notes.append(f"{present:,} of the {rows.classes:,} classes occur among the labels.")
    return notes


def _seen_before(
    bundle: Bundle, calibration: Calibration, points: Mapping[str, OperatingPoint], rows: LabelledRows
) -> list[str]:
    """Rows that the points were made from say nothing of new ones."""
    home = History(bundle.path, bundle.manifest)
    versions = {int(point.expected.get("from_version", calibration.version)) for point in points.values()}
    used = [keys for version in sorted(versions) if (keys := home.used(version)) is not None]
    again = int(np.isin(row_keys(rows), np.concatenate(used)).sum()) if used else 0
    if not again:
        return []
    return [f"{again:,} of the {len(rows):,} rows were calibrated on: figures are better than new rows would give."]


def _moved(lines: Sequence[Line]) -> list[str]:
    """Figures whose interval is apart from the one that calibration had measured."""
    notes = []
    for line in lines:
        for figure, name in _NAMES.items():
            low, high = line.get(f"{figure}_low"), line.get(f"{figure}_high")
            then_low, then_high = line.get(f"then_{figure}_low"), line.get(f"then_{figure}_high")
            if low is None or high is None or then_low is None or then_high is None:
                continue
            if low > then_high or high < then_low:
                notes.append(
                    f"{line['point']}: {name} of {line[figure]:.2%} [{low:.2%}, {high:.2%}] is apart from the "
                    f"{line[f'then_{figure}']:.2%} [{then_low:.2%}, {then_high:.2%}] measured at calibration."
                )
    return notes


def document(found: Evaluation) -> dict[str, Any]:
    """JSON-able; docs/guide/calibration.md says what is where."""
    return {
        "schema": SCHEMA,
        **found.about,
        **{name: getattr(found, name) for name in ("source", "how", "rows", "unlabelled", "headline")},
        "operating_points": found.points,
        "promises": found.promises,
        "broken": len(found.broken),
        "estimates": found.estimates,
        "classes": found.classes,
        "notes": found.notes,
    }
