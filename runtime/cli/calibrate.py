"""offramp calibrate"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import MANIFEST
from offramp.runtime.cli.options import below_one, fraction, seed
from offramp.runtime.cli.progress import bar
from offramp.runtime.errors import InputError
from offramp.runtime.files import write_atomically
from offramp.runtime.jobs.bundles.time_model import measure_times
from offramp.runtime.jobs.calibrating.calibrate import calibrate, check_out
from offramp.runtime.jobs.calibrating.report.document import REPORT
from offramp.runtime.jobs.calibrating.result import Calibrated, CalibrationRefused
from offramp.runtime.jobs.calibrating.targets import DEFAULT, AbstainRisk, Budget, Guarantee, MaxDrop, MaxMs, Target
from offramp.runtime.jobs.data.feedback import from_feedback
from offramp.runtime.jobs.data.opened import OpenedRecords, open_records, own_logits
from offramp.runtime.points import OperatingPoint
from offramp.runtime.records import INDEX, UNREADABLE

REFUSED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit codes: 0 done, 2 bad input, 3 refused because the calibration in force is significantly better, or done "
        "but for an --abstain-risk that can't be promised. "
        "[NAME=] names the operating point; without it the target does."
    )
    parser.add_argument("bundle", type=Path, nargs="?", help="bundle to calibrate; leave it out with --out")
    parser.add_argument("records", type=Path, nargs="?", help="folder written by `offramp record` on labelled data")
    own = parser.add_argument_group("your own logits instead of records")
    own.add_argument("--logits", type=Path, nargs="+", metavar="NPY", help="one (rows, classes) .npy an exit")
    own.add_argument("--labels", type=Path, metavar="NPY", help="(rows,) class numbers, -1 where unknown")
    own.add_argument("--flops", type=_numbers, metavar="N,N,…", help="cumulative cost of leaving at each exit")
    own.add_argument("--out", type=Path, help="folder for the calibration where there is no bundle")
    kept = parser.add_argument_group("served rows and their labels instead of records")
    kept.add_argument(
        "--from-feedback",
        metavar="STORE",
        help="SQLite file, or postgresql://…, in which a server or a cascade of this bundle keeps rows; those with a "
        "label and all exits known count",
    )
    kept.add_argument(
        "--key-share", type=fraction, default=1.0, help="of them that one sender of labels may have (default: 1)"
    )
    wanted = parser.add_argument_group("operating points, each repeatable (default: budgets balanced=0.5 and fast=0.3)")
    share, drop, ms = _named(fraction, "0.5"), _named(below_one, "0.02"), _named(_positive, "3")
    for option, convert, what, help_ in (
        ("--budget", share, "SHARE", "at most this share of the full model's cost, at 95%% confidence"),
        ("--max-ms", ms, "MS", "at most this mean time a row, each by itself, measured here at the records' mean size"),
        ("--max-drop", drop, "DROP", "accuracy lost at most, as measured"),
        ("--guarantee", drop, "DROP", "accuracy lost at most, promised with probability 1 - delta"),
    ):
        wanted.add_argument(option, type=convert, action="append", default=[], metavar=f"[NAME=]{what}", help=help_)
    wanted.add_argument(
        "--abstain-risk",
        type=_risk,
        action="append",
        metavar="RISK",
        help="promised error among answered rows of every point, or none (default: 5%%); a further one adds "
        "points of its own",
    )
    wanted.add_argument(
        "--abstain-all-if-infeasible",
        action="store_true",
        help="where a risk can't be promised abstain on every row, instead of on none without a promise",
    )
    wanted.add_argument("--delta", type=below_one, default=0.05, help="chance that a promise fails (default: 5%%)")
    parser.add_argument(
        "--calibrator",
        nargs="+",
        default=["auto"],
        metavar="NAME",
        help="auto, none, or names to choose from (default: auto)",
    )
    parser.add_argument(
        "--exit-ms", type=_numbers, metavar="MS,MS,…", help="cumulative milliseconds of the exits instead of measuring"
    )
    parser.add_argument(
        "--shift",
        type=_shift,
        action="append",
        default=[],
        metavar="NAME=RECORDS",
        help="also report on these shifted or out-of-scope records; repeatable",
    )
    parser.add_argument("--subgroup", metavar="[NAME=]FILE[:COLUMN]", help=".npy, or column of .npz, one value a row")
    parser.add_argument("--seed", type=seed, default=0, help="of the split and of every resample (default: 0)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write report.html and metrics.json there, too")
    parser.add_argument(
        "--cost", choices=["flops", "ms"], default="flops", help="what budgets are shares of (default: flops)"
    )
    parser.add_argument("--no-times", action="store_true", help="don't measure blocks for the report")
    parser.add_argument("--dry-run", action="store_true", help="show everything, put nothing in force")
    parser.add_argument(
        "--replace", action="store_true", help="drop operating points in force that aren't asked for again"
    )
    parser.add_argument("--force", action="store_true", help="replace a calibration that is better, too")


def _named(convert: Callable[[str], float], example: str) -> Callable[[str], tuple[str, float]]:
    def parse(text: str) -> tuple[str, float]:
        name, separator, value = text.rpartition("=")
        if separator and not name:
            raise argparse.ArgumentTypeError(f"{text!r}: expected [NAME=]NUMBER, such as balanced={example}")
        try:
            return name, convert(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or NAME=NUMBER, such as balanced={example}") from None

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text.removesuffix("ms"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected milliseconds above 0")
    return value


def _risk(text: str) -> float | None:
    return None if text == "none" else below_one(text)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, such as 1,2.5,4") from None


def _shift(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not separator or not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=RECORDS, such as oos=records-oos")
    return name, Path(folder)


def run(args: argparse.Namespace) -> int:
    targets, abstain = targets_of(args), _abstain(args)
    bundle, opened = _opened(args)
    assumed = opened.notes
    times = args.exit_ms
    if times is None and bundle is not None and not args.no_times:
        # Costs that were counted say nothing of how large a row is.
        times = measure_times(bundle, None if args.logits else opened.records)
    try:
        with bar("calibrating") as progress:
            result = calibrate(
                bundle,
                opened,
                targets=targets,
                abstain=abstain,
                abstain_all_if_infeasible=args.abstain_all_if_infeasible,
                calibrators=args.calibrator,
                seed=args.seed,
                times=times,
                cost=args.cost,
                shifts=dict(args.shift),
                subgroup=_subgroup(args.subgroup),
                out=args.out,
                dry_run=args.dry_run,
                force=args.force,
                replace=args.replace,
                command=_command(args, opened),
                progress=progress,
            )
    except CalibrationRefused as refusal:
        _write_report(args.report, refusal.result)
        _show(refusal.result, assumed)
        _warn(refusal.result.notes, assumed)
        print(f"offramp: {refusal} --force replaces it all the same.", file=sys.stderr)
        where = "give --report FOLDER to have it written" if args.report is None else f"{args.report}/{REPORT}"
        print(f"its report: {where}", file=sys.stderr)
        return REFUSED
    _write_report(args.report, result)
    _show(result, assumed)
    _say(result, assumed)
    broken = _unpromised(args, result.calibration.points)
    if broken:
        print(f"offramp: --abstain-risk isn't promised at {', '.join(broken)}: exit code {REFUSED}.", file=sys.stderr)
    for sentence in result.refused:
        if args.force:
            print(f"warning: worse than the one in force: {sentence}.", file=sys.stderr)
        else:
            print(f"would be refused: {sentence}.")
    if args.dry_run:
        print("dry run: nothing was put in force")
        return REFUSED if (result.refused and not args.force) or broken else 0
    print(f"wrote {args.out if bundle is None else bundle}/calibration.json, version {result.calibration.version}")
    print(f"report: {result.written}/report.html")
    return REFUSED if broken else 0


def _command(args: argparse.Namespace, opened: OpenedRecords) -> str:
    """The command line, for the provenance; a database's password stays out of it."""
    said = shlex.join(["offramp", *sys.argv[1:]])
    return said.replace(args.from_feedback, opened.described["feedback"]) if args.from_feedback else said


def _unpromised(args: argparse.Namespace, points: Mapping[str, OperatingPoint]) -> list[str]:
    """Points without the risk that was asked for. The default one wasn't, and who abstains on all wants it so."""
    if args.abstain_risk is None or args.abstain_all_if_infeasible:
        return []
    return [name for name, point in points.items() if not point.provenance.get("abstention", {}).get("feasible", True)]


def _opened(args: argparse.Namespace) -> tuple[Path | None, OpenedRecords]:
    """The bundle, if any, and the records, kept rows or own logits."""
    bundle, folder = args.bundle, args.records
    if args.from_feedback is not None:
        if bundle is None or folder is not None or args.logits:
            raise InputError("--from-feedback: give the bundle that served the rows, and no records or --logits.")
        return bundle, from_feedback(bundle, args.from_feedback, share=args.key_share, seed=args.seed)
    if args.logits:
        if folder is not None:
            raise InputError("records: give a folder of records or --logits, not both.")
        if args.labels is None:
            raise InputError("--labels is missing: calibration needs the true class of each row of --logits.")
    elif folder is None and bundle is not None and ((bundle / INDEX).exists() or not (bundle / MANIFEST).exists()):
        bundle, folder = None, bundle  # one folder, and it isn't a bundle
    if folder is None and not args.logits:
        raise InputError(
            "records are missing: a folder written by `offramp record`, or --from-feedback STORE, or --logits and "
            "--labels."
        )
    check_out(bundle, args.out)
    return bundle, own_logits(args.logits, args.labels, args.flops) if args.logits else open_records(folder)


def targets_of(args: argparse.Namespace) -> Sequence[Target]:
    """The targets asked for, in the order of their kinds; the default ones if there are none."""
    asked: list[Target] = [Budget(value, name) for name, value in args.budget]
    asked += [MaxMs(value, name) for name, value in args.max_ms]
    asked += [MaxDrop(value, name) for name, value in args.max_drop]
    asked += [Guarantee(value, args.delta, name) for name, value in args.guarantee]
    return asked or DEFAULT


def _abstain(args: argparse.Namespace) -> list[AbstainRisk]:
    asked = dict.fromkeys([0.05] if args.abstain_risk is None else args.abstain_risk)
    if None in asked and len(asked) > 1:
        raise InputError("--abstain-risk: none goes alone; give it, or the risks, not both.")
    return [AbstainRisk(risk, args.delta) for risk in asked if risk is not None]


def _subgroup(text: str | None) -> tuple[str, NDArray[Any]] | None:
    if text is None:
        return None
    name, _, file = text.rpartition("=")
    path, column = Path(file), ""
    if not path.exists() and ":" in file:
        path, column = Path(file.rpartition(":")[0]), file.rpartition(":")[2]
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return name or path.stem, found
        with found:
            if column not in found.files:
                raise InputError(f"--subgroup: {path} has the columns {found.files}; write {path}:COLUMN.")
            return name or column, found[column]
    except UNREADABLE as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--subgroup: {path} can't be read ({error}).") from error


def _write_report(folder: Path | None, result: Calibrated) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in result.files.items():
        write_atomically(folder / name, data)


def _show(result: Calibrated, assumed: Sequence[str]) -> None:
    """The operating points, and what their figures rest on that nobody gave."""
    print(table(result.calibration.points, cost="assumed cost" if assumed else "FLOPs"))
    for sentence in assumed:
        print(f"note: {sentence}")


def _say(result: Calibrated, assumed: Sequence[str]) -> None:
    _warn([*result.notes, *result.unmet], assumed)
    for sentence in result.overruns:
        print(f"note: {sentence}", file=sys.stderr)
    for name, point in result.chosen.points.items():
        for complaint in complaints(point):
            print(f"warning: {name}: {complaint}", file=sys.stderr)
    for line in result.shifts:
        ratio = line["abstention_ratio"]
        times = "" if ratio is None else f", {ratio:.3g} times"
        print(
            f"{line['shift']}: {line['point']} abstains on {line['abstained']:.1%} of {line['rows']} rows "
            f"({line['abstained_on_test']:.1%} of the test rows{times})"
        )


def _warn(sentences: Sequence[str], assumed: Sequence[str]) -> None:
    for sentence in sentences:
        if sentence not in assumed:
            print(f"warning: {sentence}", file=sys.stderr)


def complaints(point: OperatingPoint) -> list[str]:
    """What of an operating point is switched on in vain, in words."""
    shares = point.expected.get("exit_shares", [])
    return [
        f"exit {j} is switched on, but no row of the test part leaves there."
        for j, (threshold, share) in enumerate(zip(point.thresholds, shares, strict=False))
        if share == 0 and j < len(shares) - 1 and abs(threshold) != float("inf")
    ]


def table(points: Mapping[str, OperatingPoint], cost: str = "FLOPs") -> str:
    """Operating points side by side, for people."""
    head = ("point", "accuracy", cost, "coverage", "risk", "exit shares")
    rows = [head]
    for name, point in points.items():
        e = point.expected
        rows.append(
            (
                f"{name} (of version {e['from_version']})" if "from_version" in e else name,
                _share(e.get("accuracy"), 2),
                _share(e.get("flops_fraction"), 1),
                _share(e.get("coverage"), 1),
                _share(e.get("risk"), 2),
                " ".join(f"{s:.0%}" for s in e.get("exit_shares", ())),
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _share(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}%}"
