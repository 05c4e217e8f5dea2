"""offramp diff"""

import argparse
import json
from pathlib import Path
from typing import Any

from offramp.runtime.bundle import encode_number
from offramp.runtime.cli.output import print_json
from offramp.runtime.jobs.calibrating.history import diff, read_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit codes: 0, different or not; 2 bad input."
    for name in ("old", "new"):
        parser.add_argument(name, type=Path, help="a bundle, a folder in its history/, or a calibration.json")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")


def run(args: argparse.Namespace) -> int:
    old, new = read_version(args.old), read_version(args.new)
    lines = diff(old, new)
    if args.json:
        plain = [{key: _plain(value) for key, value in line.items()} for line in lines]
        found = {"old": old.version, "new": new.version, "changes": plain}
        print_json(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        return 0
    print(f"version {old.version} ({old.created or 'no date'}) -> version {new.version} ({new.created or 'no date'})")
    if old.manifest != new.manifest:
        print("they belong to different bundles")
    if not lines:
        print("no operating point differs")
    point = None
    for line in lines:
        if line["point"] != point:
            point = line["point"]
            print(point)
        print(f"  {line['field']:<28} {_shown(line['old'])} -> {_shown(line['new'])}")
    return 0


def _plain(value: Any) -> Any:
    return encode_number(value) if isinstance(value, float) else value


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
