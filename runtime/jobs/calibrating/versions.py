"""Which calibrations a bundle has had, and putting one of them in force again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offramp.runtime.bundle import CALIBRATION
from offramp.runtime.calibration_file import Calibration
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.jobs.calibrating.history import HISTORY, LOG, History, PutInForce, home_of
from offramp.runtime.points import OperatingPoint

NOW, WAS, NEVER = "now", "was", "never"


@dataclass(frozen=True)
class Version:
    """A calibration that is kept, or in force.

    version: what `promote` takes. in_force: "now", "was" or "never" (its job was killed). since, by: when it was
    last put in force, and by what (see `PutInForce`). points: {"point", "target", "accuracy", "drop",
    "flops_fraction", "coverage", "risk", "from_version"}, figures on its test rows. rows: how many it was made
    from; looks: how often they had been looked at by then. forced: why it would have been refused. error: why it
    can't be read.
    """

    version: str
    created: str = ""
    in_force: str = NEVER
    since: str = ""
    by: str = ""
    points: tuple[Mapping[str, Any], ...] = ()
    rows: int | None = None
    looks: int = 1
    forced: tuple[str, ...] = ()
    report: str | None = None
    error: str | None = None


def history(bundle: str | Path) -> list[Version]:
    """Every calibration of a bundle, or of a folder without one, by number. Changes nothing.

    One that is damaged, or of another manifest, is there with its error.
    """
    home = home_of(bundle)
    lines, now = home.put_in_force(), home.in_force_name()
    names = home.kept()
    found = []
    for name in names if now is None or now in names else [*names, now]:
        last = next((line for line in reversed(lines) if line.version == name), None)
        state = NEVER if last is None else NOW if name == now else WAS
        since, by = ("", "") if last is None else (last.when, last.by)
        report = home.path / HISTORY / name / "report.html"
        try:
            one = home.current() if name not in names else home.read_kept(name)
        except BundleError as error:
            found.append(Version(name, in_force=state, since=since, by=by, error=str(error)))
            continue
        assert one is not None
        found.append(
            Version(
                name,
                one.created,
                state,
                since,
                by,
                points=tuple(_figures(key, point) for key, point in one.points.items()),
                rows=one.provenance.get("rows"),
                looks=one.provenance.get("looks", 1),
                forced=tuple(one.provenance.get("forced", ())),
                report=str(report) if report.is_file() else None,
            )
        )
    return found


def promote(bundle: str | Path, version: int | str) -> Calibration:
    """Put a version of history/ in force, as it was, and return it.

    Raises InputError if there is none of that number, BundleError if it is damaged or of another manifest.
    """
    home, name = home_of(bundle), str(version)
    if (current := _if_in_force(home, name)) is not None:
        return current
    home.read_kept(name)
    with home.locked():
        return home.put_back(name, "promote")


def _if_in_force(home: History, name: str) -> Calibration | None:
    """The calibration in force if it is that version, kept in history/ or not yet."""
    return home.current() if home.in_force_name() == name else None


def rollback(bundle: str | Path) -> Calibration:
    """Put the version in force that was before the current one, and return it.

    Once more goes one further back: what was rolled back from is never returned to, which `promote` does. Where
    nothing that can be read is in force, the last that was is put back. Raises InputError if there is none.
    """
    home = home_of(bundle)
    with home.locked():
        lines = home.put_in_force()
        if any(not line.version for line in lines):
            raise BundleError(
                f"{home.path / HISTORY / LOG}: has a line that can't be read, so what was in force before isn't "
                "known. Name a version: offramp promote."
            )
        been = in_turn(lines)
        if home.in_force_name() is not None:
            been = been[:-1]
        if not been:
            raise InputError(f"{home.path / CALIBRATION}: no version was in force before it, so none can be put back.")
        return home.put_back(been[-1], "rollback")


def in_turn(lines: Sequence[PutInForce]) -> list[str]:
    """Versions by which one came to the present one, without those that were rolled back from."""
    been: list[str] = []
    for line in lines:
        if line.by == "rollback" and line.version in been:
            while been[-1] != line.version:
                been.pop()
        elif not been or been[-1] != line.version:
            been.append(line.version)
    return been


def _figures(name: str, point: OperatingPoint) -> dict[str, Any]:
    keys = ("accuracy", "drop", "flops_fraction", "coverage", "risk", "from_version")
    return {
        "point": name,
        "target": point.provenance.get("target"),
        **{key: point.expected.get(key) for key in keys},
    }
