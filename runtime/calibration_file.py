"""calibration.json, where a bundle keeps its named operating points."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from offramp.runtime import calibration
from offramp.runtime.bundle import (
    CALIBRATION,
    Manifest,
    decode_document,
    decode_number,
    encode_number,
    read_bytes,
)
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.files import seal, unseal, write_atomically
from offramp.runtime.points import FULL, OperatingPoint, full

CALIBRATION_SCHEMA = "offramp-calibration/1"


class _Point(msgspec.Struct, kw_only=True):
    thresholds: list[float | str]
    abstain_below: float | str
    calibrators: list[dict[str, Any]] = []
    expected: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


class _Document(msgspec.Struct, kw_only=True):
    schema: str
    version: int
    created: str
    producer: str
    manifest: str
    score: str
    operating_points: dict[str, _Point]
    digest: str
    provenance: dict[str, Any] = {}


@dataclass(frozen=True)
class Calibration:
    """calibration.json, checked: the named operating points of one bundle. `full` is always among them.

    manifest: digest of the bundle's manifest as it stood in the file, "" for logits of no bundle.
    """

    points: Mapping[str, OperatingPoint]
    version: int = 0
    created: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    manifest: str = ""

    def point(self, name: str) -> OperatingPoint:
        if name not in self.points:
            raise InputError(f"operating_point is {name!r}, this bundle has {list(self.points)}.")
        return self.points[name]

    def stopping_at(self, point: OperatingPoint, exit: int) -> OperatingPoint:
        """The point with nobody going past an exit, calibrated there as well if any point here knows that exit.

        A point has calibrators for the exits that it switches on. For another one the calibrator is that of the point
        which lets the fewest rows leave before: it was fitted on the rows that come so far there, which are all of
        them at the first exit, and at a deeper one the harder ones, so that it is wary of the others. A point of the
        user's own stays as it was made.
        """
        shortened = point.stopping_at(exit)
        known = [p for p in self.points.values() if p.calibrators and p.thresholds[exit] != math.inf]
        if point.thresholds[exit] != math.inf or point != self.points.get(point.name) or not known:
            return shortened
        calibrators = [point.calibrator(j) for j in range(len(point.thresholds))]
        calibrators[exit] = max(known, key=lambda p: p.thresholds[:exit]).calibrators[exit]
        return replace(shortened, calibrators=tuple(calibrators))


def read_calibration(folder: Path, manifest: Manifest) -> Calibration:
    """The bundle's calibration, or one with only `full` if there is no calibration.json.

    Raises BundleError if it was damaged, edited, is of another schema or belongs to another bundle.
    """
    where = folder / CALIBRATION
    exits = len(manifest.exits)
    if not where.exists() and not where.is_symlink():
        return Calibration({FULL: full(exits)})
    found = decode_calibration(read_bytes(folder, CALIBRATION), where)
    if found.manifest != manifest.digest:
        raise BundleError(
            f"{where}: belongs to another bundle (its manifest's digest differs). Run `offramp calibrate` on this one."
        )
    for name, point in found.points.items():
        if len(point.thresholds) != exits:
            raise BundleError(
                f"{where}: operating_points[{name!r}]: {len(point.thresholds)} thresholds for {exits} exits"
            )
    return found


def decode_calibration(data: bytes, where: Path) -> Calibration:
    """Check the bytes of a calibration.json, for whichever bundle; BundleError as in `read_calibration`."""
    document: _Document = decode_document(
        data, _Document, CALIBRATION_SCHEMA, where, again="Run `offramp calibrate` again with this version."
    )
    unseal(data, document.digest, where=str(where))
    if document.score != "logodds":
        raise BundleError(f"{where}: score is {document.score!r}, this offramp gates on 'logodds'.")
    points = {name: _point(name, raw, where) for name, raw in document.operating_points.items()}
    if FULL not in points:
        raise BundleError(f"{where}: operating_points lacks {FULL!r}. Run `offramp calibrate` again.")
    return Calibration(points, document.version, document.created, document.provenance, document.manifest)


def _point(name: str, raw: _Point, where: Path) -> OperatingPoint:
    try:
        return OperatingPoint(
            thresholds=tuple(decode_number(t) for t in raw.thresholds),
            abstain_below=decode_number(raw.abstain_below),
            name=name,
            calibrators=tuple(calibration.from_dict(c) for c in raw.calibrators),
            expected=raw.expected,
            provenance=raw.provenance,
        )
    except (InputError, ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{where}: operating_points[{name!r}]: {error}") from error


def write_calibration(folder: Path, manifest: Manifest, new: Calibration, *, created: str, producer: str) -> None:
    """Write calibration.json atomically; the one that was there stays until the new one is whole."""
    write_atomically(folder / CALIBRATION, encode_calibration(new, manifest.digest, created=created, producer=producer))


def encode_calibration(new: Calibration, manifest: str, *, created: str, producer: str) -> bytes:
    """The bytes of a calibration.json for the bundle whose manifest has this digest."""
    return seal(
        {
            "schema": CALIBRATION_SCHEMA,
            "version": new.version,
            "created": created,
            "producer": producer,
            "manifest": manifest,
            "score": "logodds",
            "operating_points": {
                name: {
                    "thresholds": [encode_number(t) for t in point.thresholds],
                    "abstain_below": encode_number(point.abstain_below),
                    "calibrators": [c.to_dict() for c in point.calibrators],
                    "expected": dict(point.expected),
                    "provenance": dict(point.provenance),
                }
                for name, point in new.points.items()
            },
            "provenance": dict(new.provenance),
        }
    )
