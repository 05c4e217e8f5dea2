"""offramp history"""

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offramp.runtime.bundle import read_bundle
from offramp.runtime.cli.output import print_json
from offramp.runtime.jobs.calibrating.history import home_of
from offramp.runtime.jobs.calibrating.versions import NOW, Version, history
from offramp.runtime.jobs.plain_json import plain
from offramp.runtime.jobs.plain_text import aligned

ONLINE_HEAD = ("version", "date", "in force", "from", "point", "method", "why")
HEAD = ("version", "date", "in force", "rows", "point", "target", "accuracy", "cost", "coverage", "risk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Figures are those on each version's own test rows. Exit codes: 0 done; 2 bad input."
    parser.add_argument("bundle", type=Path, help="a bundle, or a folder that `offramp calibrate --out` wrote")
    parser.add_argument(
        "--online",
        metavar="STORE",
        help="SQLite file, or postgresql://…, in which a server or a cascade keeps rows: the versions made there, too",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    found, looks = history(args.bundle), home_of(args.bundle).looks()
    online = None if args.online is None else made_online(args.bundle, args.online)
    if args.json:
        seen = [{key: value for key, value in vars(look).items() if key != "sketch"} for look in looks]
        document = {"versions": plain(found), "looks": seen} | ({} if online is None else {"online": plain(online)})
        print_json(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        return 0
    print(table(found) if found else f"{args.bundle}: no calibration yet, only `full` can be served")
    for version in found:
        for sentence in _said(version):
            print(f"version {version.version}: {sentence}")
    idle = Counter(look.outcome for look in looks if not look.outcome.startswith("version "))
    if idle:
        print(f"looks that put nothing in force: {', '.join(f'{count} {what}' for what, count in idle.items())}")
    if online is not None:
        print("\n" + online_table(online))
    return 0


def made_online(bundle: Path, where: str) -> dict[str, Any]:
    """What a store says of this bundle: mode, frozen, in_force (0 is the bundle's own), versions, decisions.

    Raises InputError, StoreError, RuntimeUnavailable without the extra `online`.
    """
    from offramp.runtime.online.store.kept import read_past

    manifest = read_bundle(bundle).manifest
    past = read_past(where, model=manifest.name, bundle=manifest.digest)
    why = {one.version: one for one in past.decisions if one.version is not None}
    return {
        "store": past.name,
        "mode": past.state.mode,
        "frozen": past.state.frozen,
        "in_force": past.state.calibration,
        "versions": [_made(one, why.get(one.version)) for one in past.versions],
        "decisions": [vars(one) for one in past.decisions],
    }


def _made(one: Any, decision: Any) -> dict[str, Any]:
    """A version and the decision that made it, None where the log doesn't reach back so far."""
    numbers: Mapping[str, Any] = {} if decision is None else decision.numbers
    made = {key: getattr(one, key) for key in ("version", "parent", "time", "method")}
    by = None if decision is None else decision.by
    return {**made, "point": numbers.get("point"), "by": by, "why": numbers.get("reason")}


def online_table(online: Mapping[str, Any]) -> str:
    """A line a version that was made online."""
    rows: list[tuple[str, ...]] = [ONLINE_HEAD]
    for one in online["versions"]:
        made = datetime.datetime.fromtimestamp(one["time"], datetime.UTC).strftime("%Y-%m-%d %H:%M")
        state = "now" if one["version"] == online["in_force"] else "-"
        said = (one["point"] or "-", one["method"], one["why"] or "-")
        rows.append((str(one["version"]), made, state, str(one["parent"]), *said))
    own = "" if online["in_force"] else "; the bundle's own calibration is in force"
    head = f"made online ({online['store']}): mode {online['mode']}{', frozen' if online['frozen'] else ''}{own}"
    return "\n".join([head, *(aligned(rows) if len(rows) > 1 else ["no version yet"])])


def table(versions: list[Version]) -> str:
    """A line an operating point; what is the version's stands in its first."""
    rows: list[tuple[str, ...]] = [HEAD]
    for one in versions:
        state = f"now, since {_date(one.since)}" if one.in_force == NOW else one.in_force
        first = (one.version, _date(one.created), state, "-" if one.rows is None else str(one.rows))
        lines = [_point(point) for point in one.points] or [("-",) * 6]
        rows += [(*(first if k == 0 else ("",) * 4), *line) for k, line in enumerate(lines)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _said(one: Version) -> list[str]:
    said = [f"damaged: {one.error}"] if one.error else []
    if one.in_force == NOW and one.by not in ("", "calibrate"):
        said.append({"found": "was put in force by something else"}.get(one.by, f"put in force by {one.by}"))
    said += [f"forced, though {sentence}" for sentence in one.forced]
    if one.looks > 1:
        said.append(f"was look {one.looks} at its rows")
    if one.report:
        said.append(f"report: {one.report}")
    return said


def _point(line: Mapping[str, Any]) -> tuple[str, ...]:
    made = line["from_version"]
    name = line["point"] if made is None else f"{line['point']} (of version {made})"
    figures = [("accuracy", 2), ("flops_fraction", 1), ("coverage", 1), ("risk", 2)]
    shown = ("-" if line[key] is None else f"{line[key]:.{digits}%}" for key, digits in figures)
    return (name, _target(line["target"]), *shown)


def _target(target: Mapping[str, Any] | None) -> str:
    """A target in a few words: "budget 0.4", "guarantee 0.01"."""
    if not target:
        return "-"
    value = next((target[key] for key in ("share", "ms", "drop", "epsilon") if key in target), "")
    return f"{target.get('kind', '')} {value}".strip()


def _date(text: str) -> str:
    return text[:16].replace("T", " ") or "-"
