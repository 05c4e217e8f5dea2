"""A bundle's calibrations through time: calibration.json is the one in force, history/ keeps every one.

history/<version>/ holds calibration.json, metrics.json, report.html and used.npy (a number for each row that took part
in making it). It appears whole, before calibration.json is replaced by one rename: a reader finds the old calibration
or the new one at every moment, and a job that is killed leaves nothing that its next run doesn't replace.

history/log.jsonl says what was put in force when, a line each time, oldest first. The line is written before the
rename, and what calibration.json holds decides what it means (see `put_in_force`): a last line that isn't in force,
after one that is, was never carried out, and a calibration in force without a line was put there by something else.
So a job killed between the two changes neither what a rollback goes back to nor the next version's number, and one
small file, always whole, is enough. Beside it, looks.jsonl has the looks at the same rows (see `looks`).
"""

import datetime
import hashlib
import io
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import CALIBRATION, MANIFEST, Manifest, read_bundle, read_bytes
from offramp.runtime.calibration_file import Calibration, decode_calibration, read_calibration
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.files import new_folder, remove_abandoned, write_atomically
from offramp.runtime.jobs.calibrating.card import promises_of
from offramp.runtime.jobs.calibrating.looks import Look, note_look, read_looks
from offramp.runtime.jobs.lock import one_at_a_time
from offramp.runtime.jobs.pages.model_card import PROMISES, put_section

HISTORY = "history"
USED = "used.npy"
LOG = "log.jsonl"
LOCK = ".calibration.lock"

Keys = NDArray[np.uint64]
# A foreign calibration whose number was taken has a piece of its digest behind it.
_KEPT = re.compile(r"([0-9]{1,9})(-[0-9a-f]{8})?")


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
class PutInForce:
    """A line of the log. version: a folder of history/. when: ISO 8601.

    by: "calibrate", "promote", "rollback", "found" (something else put it there) or "unreadable" (the line is).
    """

    version: str
    when: str
    by: str


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
        return self._read(self.path) if self._there() else None

    def _there(self) -> bool:
        where = self.path / CALIBRATION
        return where.exists() or where.is_symlink()

    def _unreadable(self) -> Path:
        """Where a calibration.json that another program wrote, or that was damaged, is kept byte for byte.

        Raises BundleError if not even its bytes can be had: then nothing may replace it.
        """
        digest = hashlib.sha256(read_bytes(self.path, CALIBRATION)).hexdigest()[:8]
        return self.path / HISTORY / f"unreadable-{digest}.json"

    def _read(self, folder: Path) -> Calibration:
        if self.manifest is not None:
            return read_calibration(folder, self.manifest)
        where = folder / CALIBRATION
        found = decode_calibration(read_bytes(folder, CALIBRATION), where)
        if found.manifest:
            raise BundleError(f"{where}: belongs to a bundle. Name the bundle, or choose another folder.")
        return found

    def in_force(self) -> InForce:
        """The calibration in force with what a comparison needs; one that can't be read is noted, not raised."""
        try:
            current, notes = self.current(), ()
        except BundleError as error:
            note = (
                f"the calibration in force can't be read, so nothing was compared with it: {error} Before it is "
                f"replaced, its bytes are kept as {self._unreadable()}."
            )
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
        return [int(name) for name in self.kept() if name.isdigit()]

    def kept(self) -> list[str]:
        """Folders of history/ that keep a calibration, in the order of their numbers."""
        folder = self.path / HISTORY
        if not folder.is_dir():
            return []
        names = [f.name for f in folder.iterdir() if _KEPT.fullmatch(f.name) and f.is_dir()]
        return sorted(names, key=lambda name: (_number(name), name))

    def read_kept(self, name: str) -> Calibration:
        """A version in history/, checked to be of this bundle.

        Raises InputError if it isn't there, BundleError if it can't be trusted.
        """
        folder = self.path / HISTORY / name
        if not _KEPT.fullmatch(name) or not folder.is_dir():
            there = f"there are {', '.join(self.kept())}" if self.kept() else f"{HISTORY}/ keeps none yet"
            raise InputError(f"{self.path} has no version {name!r}: {there}.")
        if not (folder / CALIBRATION).is_file():
            raise BundleError(f"{folder}: holds no {CALIBRATION}. Restore it, or choose another version.")
        found = self._read(folder)
        if found.version != _number(name):
            raise BundleError(f"{folder}: says that it is version {found.version}. Restore the folder, or rename it.")
        return found

    def in_force_name(self) -> str | None:
        """The folder of history/ that keeps, or will keep, what is in force; None without one that can be read."""
        try:
            current = self.current()
            if current is None:
                return None
            data = read_bytes(self.path, CALIBRATION)
        except BundleError:
            return None
        kept = self.path / HISTORY / str(current.version) / CALIBRATION
        if kept.parent.exists() and not (kept.is_file() and kept.read_bytes() == data):
            return f"{current.version}-{hashlib.sha256(data).hexdigest()[:8]}"
        return str(current.version)

    def put_in_force(self) -> list[PutInForce]:
        """What was put in force when, oldest first, the one in force last where it can be read."""
        lines, now = self._log(), self.in_force_name()
        if now is None or (lines and lines[-1].version == now):
            return lines
        if len(lines) > 1 and lines[-2].version == now:
            return lines[:-1]  # written down, then killed
        changed = datetime.datetime.fromtimestamp((self.path / CALIBRATION).stat().st_mtime, datetime.UTC)
        return [*lines, PutInForce(now, changed.isoformat(timespec="seconds"), "found")]

    def _log(self) -> list[PutInForce]:
        where = self.path / HISTORY / LOG
        text = where.read_bytes().decode("utf-8", "replace") if where.is_file() else ""
        return [_line(one) for one in text.splitlines() if one.strip()]

    def used(self, version: int) -> Keys | None:
        """Numbers of the rows that made a version; None if that isn't known."""
        try:
            keys = np.load(self.path / HISTORY / str(version) / USED, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return keys if keys.dtype == np.uint64 and keys.ndim == 1 else None

    def next_version(self, current: Calibration | None) -> int:
        """One more than any that was ever in force; a folder that a killed job left beyond those is replaced.

        Where it can't be known what was in force, one more than any that history/ keeps.
        """
        lines = self.put_in_force()
        known = current is not None and (self.path / HISTORY / LOG).is_file() and all(one.version for one in lines)
        taken = [_number(one.version) for one in lines] if known else self.versions()
        return max(0 if current is None else current.version, *taken, 0) + 1

    def looks(self) -> list[Look]:
        """What was calibrated on here before, dry runs included, oldest first."""
        return read_looks(self.path / HISTORY)

    def note(self, look: Look) -> None:
        """Remember a look. To be called while `locked`."""
        note_look(self.path / HISTORY, look)

    def publish(self, document: bytes, version: int, files: Mapping[str, bytes], used: Keys) -> Path:
        """Keep everything in history/, then put the calibration in force. Returns the folder in history/.

        To be called while `locked`.
        """
        kept = self.path / HISTORY / str(version)
        self.path.mkdir(parents=True, exist_ok=True)
        self._settle()
        with new_folder(kept, marker=CALIBRATION, replace=True) as folder:
            (folder / CALIBRATION).write_bytes(document)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            stream = io.BytesIO()
            np.save(stream, np.sort(used))
            (folder / USED).write_bytes(stream.getvalue())
        self._put(kept.name, document, "calibrate")
        return kept

    def put_back(self, name: str, by: str) -> Calibration:
        """Put a version of history/ in force as it was, and return it. To be called while `locked`.

        Nothing is renumbered, and what was in force is kept. Raises as `read_kept`.
        """
        found = self.read_kept(name)
        if self.in_force_name() != name:
            self._settle()
            self._put(name, read_bytes(self.path / HISTORY / name, CALIBRATION), by)
        return found

    def _settle(self) -> None:
        """Keep what is in force, whoever put it there, and have the log say what is so."""
        remove_abandoned(self.path / CALIBRATION)
        self._keep_current()
        if (self.path / HISTORY).is_dir():
            remove_abandoned(self.path / HISTORY / LOG)
            lines = self.put_in_force()
            if lines != self._log():
                self._write_log(lines)

    def _put(self, name: str, document: bytes, by: str) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write_log([*self._log(), PutInForce(name, now, by)])
        write_atomically(self.path / CALIBRATION, document)
        put_section(self.path, PROMISES, promises_of(decode_calibration(document, self.path / CALIBRATION)))

    def _write_log(self, lines: list[PutInForce]) -> None:
        text = "".join(json.dumps(vars(line)) + "\n" for line in lines)
        write_atomically(self.path / HISTORY / LOG, text.encode())

    def _keep_current(self) -> None:
        """A calibration that another program put there is kept, too, beside ours if its number is taken."""
        name = self.in_force_name()
        if name is None:
            if self._there():
                kept = self._unreadable()
                kept.parent.mkdir(exist_ok=True)
                write_atomically(kept, read_bytes(self.path, CALIBRATION))
            return
        if (self.path / HISTORY / name).exists():
            return
        data = read_bytes(self.path, CALIBRATION)
        with new_folder(self.path / HISTORY / name, marker=CALIBRATION) as folder:
            (folder / CALIBRATION).write_bytes(data)


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _line(text: str) -> PutInForce:
    try:
        found = PutInForce(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return PutInForce("", "", "unreadable")
    known = all(isinstance(value, str) for value in vars(found).values()) and _KEPT.fullmatch(found.version)
    return found if known else PutInForce("", "", "unreadable")


def home_of(path: str | Path) -> History:
    """The history of a bundle, or of a folder that `calibrate` wrote for logits of no bundle."""
    where = Path(path)
    if (where / MANIFEST).exists():
        opened = read_bundle(where)
        return History(opened.path, opened.manifest)
    if not (where / CALIBRATION).exists() and not (where / HISTORY).is_dir():
        raise InputError(f"{path}: no calibrations there; expected a bundle, or a folder that calibrate wrote (--out).")
    return History(where)


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
