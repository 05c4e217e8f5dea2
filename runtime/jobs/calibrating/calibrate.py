"""The calibration job: from labelled records to named operating points, each with what it promises and why.

Rows are split into fit, select, certify and test (see `splits`). Exit rules come from fit and select (see
`targets`), each exit's calibrator too (see `selection`), promises from certify alone, figures from test alone.
Each promise holds by itself with its own delta; it isn't a statement about all of them at once.

The stages are split, choose, compare and publish. Each gives a frozen result, and only the last changes anything.
"""

import dataclasses
import datetime
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike
from offramp.runtime import arrays
from offramp.runtime.bundle import MANIFEST, own_version, read_bundle
from offramp.runtime.calibration_file import Calibration, encode_calibration
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.auditing.audit import audit_records
from offramp.runtime.jobs.bundles.time_model import TimeModel, measure_times
from offramp.runtime.jobs.calibrating.about import about, versions_of
from offramp.runtime.jobs.calibrating.choose_points import Asked, Progress, choose_points
from offramp.runtime.jobs.calibrating.chooser import Cost
from offramp.runtime.jobs.calibrating.comparison import compare, kept_points
from offramp.runtime.jobs.calibrating.history import History
from offramp.runtime.jobs.calibrating.looks import Look, how_often
from offramp.runtime.jobs.calibrating.report.page import report_files
from offramp.runtime.jobs.calibrating.report.subgroups import Subgroup
from offramp.runtime.jobs.calibrating.result import Calibrated, CalibrationRefused
from offramp.runtime.jobs.calibrating.selection import ROUTED, resolve
from offramp.runtime.jobs.calibrating.shift import elsewhere
from offramp.runtime.jobs.calibrating.targets import DEFAULT, AbstainRisk, MaxMs, Target
from offramp.runtime.jobs.data.labelled_rows import LabelledRows, check_labels, labelled_rows
from offramp.runtime.jobs.data.opened import Openable, OpenedRecords, open_records
from offramp.runtime.jobs.data.splits import SplitRows, split_labelled
from offramp.runtime.jobs.data.unlike import unlike

# The audit's time grows with the square of the rows.
_MOST_AUDITED = 5000


def calibrate(
    bundle: str | Path | None,
    records: Openable,
    *,
    targets: Sequence[Target] = DEFAULT,
    abstain: Sequence[AbstainRisk] = (AbstainRisk(0.05),),
    abstain_all_if_infeasible: bool = False,
    calibrators: str | Sequence[str] = "auto",
    seed: int = 0,
    times: Sequence[float] | TimeModel | None = None,
    cost: Cost = "flops",
    shifts: Mapping[str, Openable] | None = None,
    subgroup: tuple[str, ArrayLike] | None = None,
    out: str | Path | None = None,
    dry_run: bool = False,
    force: bool = False,
    replace: bool = False,
    report: bool = True,
    command: str = "",
    progress: Progress | None = None,
) -> Calibrated:
    """Calibrate a bundle (or, with `out`, logits of no bundle) and put the result in force.

    targets, abstain, abstain_all_if_infeasible: as in `Asked`. calibrators: "auto", "none", or names; `ar_condcal`
    needs a yes from the audit.
    times: (J,) milliseconds of leaving at each exit, or a `TimeModel`; measured where they are needed and there is a
    bundle. cost: what budgets are shares of and rules are compared by, "flops" or "ms". shifts: name -> records of
    shifted or out-of-scope data. subgroup: a name and one value a row of the records, for tables by group. force:
    replace a better calibration, too. replace: drop the operating points in force that aren't asked for again;
    otherwise they go on as they are, marked with their version. report: also write report.html and metrics.json beside
    the calibration kept in history/. command: for the report.

    The same records, options and seed give the same calibration, its date apart. Each look at the same rows with
    others is counted, a dry run too, and said from the second on. Raises InputError for data
    that can't be calibrated on, CalibrationRefused (with the result) when the one in force is better.
    """
    arrays.seed(seed)
    _check_lists(targets, abstain)
    home, classes = _home(bundle, out)
    opened = open_records(records, home.manifest)
    rows = split_labelled(labelled_rows(opened.records), seed)
    groups = None if subgroup is None else Subgroup.of(*subgroup, rows=len(rows.everything))
    doubts = _doubts(rows)
    others = {name: _shift(name, open_records(given, home.manifest), rows) for name, given in (shifts or {}).items()}

    yes, verdict = _audited(opened, rows.propose, calibrators)
    asked = Asked(tuple(targets), tuple(abstain), resolve(calibrators, yes), seed, cost, abstain_all_if_infeasible)
    chosen = choose_points(rows, asked, _time_model(times, asked, home, opened), progress)
    moved = elsewhere(chosen.points, rows, others, chosen.chooser.times)
    provenance = _provenance(opened, rows, asked, command)

    look = Look.at(rows.keys, asked, seed)

    # Nobody may put another one in force between this look at the one in force and `publish`.
    with nullcontext() if dry_run else home.locked():
        in_force, looks = home.in_force(), how_often(look, home.looks())
        compared = compare(in_force, chosen.points, rows, seed=seed)
        kept, said = kept_points(in_force.calibration, chosen.points, drop=replace)
        if looks > 1:
            provenance["looks"] = looks
            said.append(_often(looks))
        if force and compared.refused:
            provenance["forced"] = list(compared.refused)
        made = Calibration(chosen.points, in_force.next_version, provenance=provenance, manifest=home.digest)
        notes = (*opened.notes, *doubts, *verdict, *said)
        origin = about(home.manifest, rows.everything, chosen.chooser.times)
        result = Calibrated(made, rows, chosen, moved, compared, notes, classes, kept=kept, about=origin)
        if report:  # on what these rows say: nothing of points that are only kept
            result = dataclasses.replace(result, files=report_files(result, groups))
        result = dataclasses.replace(result, calibration=dataclasses.replace(made, points={**chosen.points, **kept}))
        if dry_run:
            return _only_looked(result, home, look)
        if result.refused and not force:
            home.note(dataclasses.replace(look, outcome="refused"))
            raise CalibrationRefused(result)
        home.note(dataclasses.replace(look, outcome=f"version {made.version}"))
        return publish(result, home)


def _often(looks: int) -> str:
    return (
        f"look {looks} at these rows: other seeds or options tried before on at least half of them, dry runs included: "
        f"{looks - 1}. A promise is for one look; if the best is kept, it breaks with a probability of up to "
        f"{looks} times its delta. Only new rows give it back."
    )


def _only_looked(result: Calibrated, home: History, look: Look) -> Calibrated:
    """A dry run leaves nothing but its look."""
    try:
        with home.locked():
            home.note(dataclasses.replace(look, outcome="dry run"))
    except OSError as error:
        lost = f"this look at the rows couldn't be noted, so later ones don't count it: {error}."
        return dataclasses.replace(result, said=(*result.said, lost))
    return result


def publish(result: Calibrated, home: History) -> Calibrated:
    """Put a calibration in force. To be called while `home` is locked, since it was numbered and compared."""
    document = encode_calibration(
        result.calibration,
        home.digest,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        producer=f"offramp {own_version()}",
    )
    written = home.publish(document, result.calibration.version, result.files, result.rows.made_from)
    return dataclasses.replace(result, written=written)


def _check_lists(targets: Any, abstain: Any) -> None:
    """Raises InputError for what isn't a list of what it should be; one by itself is the likeliest."""
    for name, given, kinds, example in (
        ("targets", targets, get_args(Target), "[Budget(0.5)]"),
        ("abstain", abstain, (AbstainRisk,), "[AbstainRisk(0.05)]"),
    ):
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        if not listed or not all(isinstance(one, kinds) for one in given):
            raise InputError(f"{name} is {given!r}, expected a list such as {example}.")


def check_out(bundle: str | Path | None, out: str | Path | None) -> None:
    """Raises InputError unless exactly one of the two says where the calibration goes, and `out` isn't a bundle."""
    if bundle is not None and out is not None:
        raise InputError(f"out (--out): {out} is for calibrations of no bundle; a bundle's is put in force in it.")
    if bundle is None and out is None:
        raise InputError("out (--out) is missing: without a bundle, name a folder for the calibration.")
    if out is not None and (manifest := Path(out) / MANIFEST).exists() | manifest.is_symlink():
        raise InputError(
            f"out (--out): {out} is a bundle, and what is calibrated on logits of no bundle wouldn't be its own. "
            "Give it as the bundle, or choose another folder."
        )


def _home(bundle: str | Path | None, out: str | Path | None) -> tuple[History, tuple[str, ...] | None]:
    check_out(bundle, out)
    if bundle is not None:
        opened = read_bundle(bundle)
        return History(opened.path, opened.manifest), tuple(opened.manifest.classes)
    return History(Path(str(out))), None


def _doubts(rows: SplitRows) -> list[str]:
    """What is odd about the rows. Raises InputError where they can't be calibrated on."""
    found = [*check_labels(rows.labelled), *rows.notes, *unlike(rows)]
    if len(rows.unlabelled):
        found.append(
            f"{len(rows.unlabelled)} of {len(rows.everything)} rows are labelled −1 (unknown or out of scope): "
            "they decide nothing, and are reported as the shift 'unlabelled'."
        )
    return found


def _shift(name: str, opened: OpenedRecords, rows: SplitRows) -> LabelledRows:
    """Every row of other data, to be judged like the records' own."""
    records, own = opened.records, rows.everything
    if records.truth is None:  # nothing in scope is known, so nothing is
        records = dataclasses.replace(records, truth=np.full(len(records), -1))
    moved = labelled_rows(records)
    if moved.exits != own.exits or moved.classes != own.classes:
        raise InputError(
            f"shift {name!r}: {moved.exits} exits and {moved.classes} classes, the records have {own.exits} and "
            f"{own.classes}."
        )
    return moved if moved.layers is not None else dataclasses.replace(moved, layers=own.layers)


def _audited(
    opened: OpenedRecords, propose: LabelledRows, calibrators: str | Sequence[str]
) -> tuple[bool, tuple[str, ...]]:
    """Whether the audit of the routing says yes, and its verdict, if what is asked for needs one.

    Test and certify are kept out: calibrators are chosen by it.
    """
    asked = (calibrators,) if isinstance(calibrators, str) else calibrators
    if opened.records.routing is None or not {"auto", ROUTED} & set(asked):
        return False, ()
    found = audit_records(opened, rows=propose.rows[:_MOST_AUDITED])
    return found.yes, (f"audit of the routing: {found.verdict}",)


def _time_model(
    times: Sequence[float] | TimeModel | None, asked: Asked, home: History, opened: OpenedRecords
) -> TimeModel | None:
    if isinstance(times, TimeModel):
        return times
    if times is not None:
        return TimeModel.given(times, len(opened.records.logits))
    if home.manifest is not None and (asked.cost == "ms" or any(isinstance(target, MaxMs) for target in asked.targets)):
        return measure_times(home.path, opened.records)
    return None


def _provenance(opened: OpenedRecords, rows: SplitRows, asked: Asked, command: str) -> dict[str, Any]:
    return {
        "records": dict(opened.described),
        "rows": len(rows.everything),
        "labelled": len(rows.labelled),
        "split": rows.split.sizes(),
        "seed": asked.seed,
        "fingerprint": hashlib.sha256(rows.keys.tobytes()).hexdigest(),
        "calibrators": list(asked.calibrators),
        "versions": versions_of(),
        "command": command,
    }
