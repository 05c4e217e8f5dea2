"""A bundle's calibrations through time: calibration.json is the one in force, history/ keeps every one.

history/<version>/ holds calibration.json, metrics.json, report.html, used.npy (a number for each row that took part
in making it) and, once it has been in force, an empty file `published`. It appears whole, before calibration.json is
replaced by one rename: a reader finds the old calibration or the new one at every moment, and a job that is killed
leaves nothing that its next run doesn't replace.
"""

import hashlib
import io
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import CALIBRATION, MANIFEST, Manifest, read_bytes
from offramp.runtime.calibration_file import Calibration, decode_calibration, read_calibration
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.files import new_folder, remove_abandoned, write_atomically
from offramp.runtime.jobs.lock import one_at_a_time

HISTORY = "history"
USED = "used.npy"
PUBLISHED = "published"
LOCK = ".calibration.lock"

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class InForce:
    """The calibration in force, as it was found.

    calibration: None where there is none, or none that can be read: its error asks to replace it. used: numbers of
    the rows it was made from, None where that isn't known. next_version: of the one that replaces it.
    """

    calibration: Calibration | None
    used: Keys | None
    next_version: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class History:
    """Where calibrations live: a bundle's folder, or one of its own for logits of no bundle (manifest None)."""

    path: Path
    manifest: Manifest | None = None

    @property
    def digest(self) -> str:
        return "" if self.manifest is None else self.manifest.digest

    def current(self) -> Calibration | None:
        """The calibration in force; None if there is none. Raises BundleError if it can't be trusted."""
        where = self.path / CALIBRATION
        if not where.exists() and not where.is_symlink():
            return None
        if self.manifest is not None:
            return read_calibration(self.path, self.manifest)
        found = decode_calibration(read_bytes(self.path, CALIBRATION), where)
        if found.manifest:
            raise BundleError(f"{where}: belongs to a bundle. Name the bundle, or choose another folder.")
        return found

    def in_force(self) -> InForce:
        """The calibration in force with what a comparison needs; one that can't be read is noted, not raised."""
        try:
            current, notes = self.current(), ()
        except BundleError as error:
            note = f"the calibration in force can't be read, so nothing was compared with it: {error}"
            return InForce(None, None, self.next_version(None), (note,))
        used = None if current is None else self.used(current.version)
        return InForce(current, used, self.next_version(current), notes)

    def locked(self) -> AbstractContextManager[None]:
        """Wait for other jobs that put a calibration in force here, then keep them out.

        Reading the one in force, numbering the new one and `publish` belong in one such block.
        """
        return one_at_a_time(self.path / LOCK)

    def versions(self) -> list[int]:
        """Numbers of the calibrations kept in history/, ascending."""
        folder = self.path / HISTORY
        if not folder.is_dir():
            return []
        return sorted(int(f.name) for f in folder.iterdir() if re.fullmatch(r"[0-9]{1,9}", f.name) and f.is_dir())

    def used(self, version: int) -> Keys | None:
        """Numbers of the rows that made a version; None if that isn't known."""
        try:
            keys = np.load(self.path / HISTORY / str(version) / USED, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return keys if keys.dtype == np.uint64 and keys.ndim == 1 else None

    def next_version(self, current: Calibration | None) -> int:
        """One more than any that was ever in force; a folder that a killed job left beyond those is replaced.

        Where the current one can't be read, one more than what history/ keeps.
        """
        if current is None:
            return max(self.versions(), default=0) + 1
        published = (v for v in self.versions() if (self.path / HISTORY / str(v) / PUBLISHED).exists())
        return max(current.version, *published, 0) + 1

    def publish(self, document: bytes, version: int, files: Mapping[str, bytes], used: Keys) -> Path:
        """Keep everything in history/, then put the calibration in force. Returns the folder in history/.

        To be called while `locked`.
        """
        kept = self.path / HISTORY / str(version)
        self.path.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.path / CALIBRATION)
        self._keep_current()
        with new_folder(kept, marker=CALIBRATION, replace=True) as folder:
            (folder / CALIBRATION).write_bytes(document)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            stream = io.BytesIO()
            np.save(stream, np.sort(used))
            (folder / USED).write_bytes(stream.getvalue())
        write_atomically(self.path / CALIBRATION, document)
        write_atomically(kept / PUBLISHED, b"")
        return kept

    def _keep_current(self) -> None:
        """A calibration that another program put there is kept, too, beside ours if its number is taken."""
        with suppress(BundleError):
            current = self.current()
            if current is None:
                return
            data, kept = read_bytes(self.path, CALIBRATION), self.path / HISTORY / str(current.version)
            if kept.exists() and (kept / CALIBRATION).read_bytes() != data:
                kept = kept.with_name(f"{current.version}-{hashlib.sha256(data).hexdigest()[:8]}")
            if not kept.exists():
                with new_folder(kept, marker=CALIBRATION) as folder:
                    (folder / CALIBRATION).write_bytes(data)


def read_version(path: str | Path) -> Calibration:
    """A calibration from a bundle, a folder in its history/, or a calibration.json itself."""
    where = Path(path)
    if where.is_dir():
        if (where / MANIFEST).is_file() and not (where / CALIBRATION).exists():
            raise InputError(f"{where}: this bundle has no {CALIBRATION} yet.")
        where = where / CALIBRATION
    if not where.is_file():
        raise InputError(f"{path}: no calibration there; expected a bundle, a folder of its {HISTORY}/, or a file.")
    return decode_calibration(read_bytes(where.parent, where.name), where)


def diff(old: Calibration, new: Calibration) -> list[dict[str, Any]]:
    """What changed, one line a value: {"point", "field", "old", "new"}; a point that came or went is one line."""
    lines: list[dict[str, Any]] = []
    for name in dict.fromkeys([*old.points, *new.points]):
        before, after = old.points.get(name), new.points.get(name)
        if before is None or after is None:
            there = {"old": None if before is None else "there", "new": None if after is None else "there"}
            lines.append({"point": name, "field": "point", **there})
            continue
        pairs: list[tuple[str, Any, Any]] = [
            (f"threshold[{j}]", a, b) for j, (a, b) in enumerate(zip(before.thresholds, after.thresholds, strict=False))
        ]
        if len(before.thresholds) != len(after.thresholds):
            pairs.append(("exits", len(before.thresholds), len(after.thresholds)))
        pairs.append(("abstain_below", before.abstain_below, after.abstain_below))
        exits = max(len(before.thresholds), len(after.thresholds))
        pairs += [
            (f"calibrator[{j}]", _calibrator(before.calibrators, j), _calibrator(after.calibrators, j))
            for j in range(exits)
        ]
        for key in dict.fromkeys([*before.expected, *after.expected]):
            if key in ("intervals", "exit_shares"):
                continue
            pairs.append((f"expected.{key}", before.expected.get(key), after.expected.get(key)))
        pairs.append(("target", before.provenance.get("target"), after.provenance.get("target")))
        lines += [{"point": name, "field": f, "old": a, "new": b} for f, a, b in pairs if a != b]
    return lines


def _calibrator(calibrators: Any, j: int) -> str:
    """A calibrator in words: its name, with its values where they are few numbers."""
    if j >= len(calibrators):
        return "identity"
    given = calibrators[j].to_dict()
    few = {k: v for k, v in given["fitted"].items() if isinstance(v, float)}
    return " ".join([given["name"], *(f"{k}={v:.6g}" for k, v in few.items())])
