"""Operating points and calibration.json, where a bundle keeps the named ones."""

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
from offramp.runtime.calibration import Calibrator
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.files import seal, unseal, write_atomically

CALIBRATION_SCHEMA = "offramp-calibration/1"
FULL = "full"


@dataclass(frozen=True)
class OperatingPoint:
    """A rule for leaving and abstaining.

    thresholds: one an exit, on the score's scale (log-odds). A row leaves at the first exit whose score
        reaches its threshold; +inf switches an exit off, and the last one is always -inf.
    abstain_below: log-odds of the calibrated confidence under which the answer is flagged as an abstention;
        -inf never abstains, +inf always does.
    calibrators: one an exit, or none for plain maximum softmax response.
    expected, provenance: what calibration measured and promised, and how; free-form, kept in the bundle.
    """

    thresholds: tuple[float, ...]
    abstain_below: float = -math.inf
    name: str = "custom"
    calibrators: tuple[Calibrator, ...] = ()
    expected: Mapping[str, Any] = field(default_factory=dict, compare=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        try:
            thresholds = tuple(float(t) for t in self.thresholds)
            object.__setattr__(self, "thresholds", thresholds)
            object.__setattr__(self, "abstain_below", float(self.abstain_below))
        except (TypeError, ValueError) as error:
            raise InputError(f"operating point {self.name!r}: thresholds and abstain_below must be numbers.") from error
        if math.isnan(self.abstain_below):
            raise InputError(
                f"operating point {self.name!r}: abstain_below is NaN, expected log-odds; -inf never abstains."
            )
        if not thresholds or any(math.isnan(t) for t in thresholds):
            raise InputError(f"operating point {self.name!r}: expected one threshold an exit, none of them NaN.")
        if thresholds[-1] != -math.inf:
            raise InputError(
                f"operating point {self.name!r}: the last threshold is {thresholds[-1]}, expected -inf: "
                f"the last exit always answers. It was given {len(thresholds)} thresholds, and takes one an exit."
            )
        if self.calibrators and len(self.calibrators) != len(thresholds):
            raise InputError(
                f"operating point {self.name!r}: {len(self.calibrators)} calibrators for {len(thresholds)} exits."
            )

    def stopping_at(self, exit: int) -> "OperatingPoint":
        """The same rule with nobody going past an exit: there the threshold is -inf, as the last one's is.

        What was measured for the whole rule doesn't hold for the shortened one, so it isn't carried over.
        """
        if not 0 <= exit < len(self.thresholds):
            raise InputError(f"exit is {exit}, expected 0 to {len(self.thresholds) - 1}.")
        thresholds = (*self.thresholds[:exit], *[-math.inf] * (len(self.thresholds) - exit))
        if thresholds == self.thresholds:
            return self
        return replace(self, thresholds=thresholds, expected={}, provenance={})

    @property
    def exits(self) -> tuple[int, ...]:
        """The exits that are switched on."""
        return tuple(j for j, t in enumerate(self.thresholds) if t != math.inf)


def full(exits: int) -> OperatingPoint:
    """The whole network for every row: nothing leaves early, nothing abstains."""
    return OperatingPoint((*[math.inf] * (exits - 1), -math.inf), name=FULL)


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
