"""Data files of raw rows: .txt, .csv, .jsonl, and folders of pictures."""

import csv
import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from offramp.runtime.errors import InputError
from offramp.runtime.files import sha256_of_file
from offramp.runtime.jobs.data.tables import LABELS, Block, reading, stamp_of

PICTURES = (".png", ".jpg", ".jpeg")
# Characters of one field. csv's own limit, 131,072, is less than many a text; none would let one quote that is
# missing take a whole file for a field.
_LONGEST_FIELD = 1 << 24


class Lines:
    """Rows that are read one after another: records of a .txt (column "text"), .csv or .jsonl file.

    The file is read once to count and check its rows, and again as they are used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []
        self._kind = path.suffix.lower()
        with reading(path):
            self._count = sum(1 for _ in self._records())

    def _records(self) -> Iterator[dict[str, Any]]:
        with self.path.open(encoding="utf-8-sig", newline="" if self._kind == ".csv" else None) as stream:
            if self._kind == ".txt":
                self.names = ["text"]
                for line in stream:
                    yield {"text": line.removesuffix("\n")}
            elif self._kind == ".csv":
                yield from self._csv(stream)
            else:
                yield from self._json(stream)

    def _csv(self, stream: Any) -> Iterator[dict[str, Any]]:
        csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
        try:
            table = csv.reader(stream, strict=True)
            self.names = next(table, [])
            if len(set(self.names)) != len(self.names):
                raise InputError(f"{self.path}: the first line names a column twice: {self.names}.")
            for fields in table:
                if not fields:
                    continue
                if len(fields) != len(self.names):
                    raise InputError(
                        f"{self.path}: line {table.line_num} has {len(fields)} fields, the first one {len(self.names)}."
                    )
                yield dict(zip(self.names, fields, strict=True))
        except csv.Error as error:
            raise InputError(f"{self.path}: line {table.line_num} is not CSV ({error}).") from error

    def _json(self, stream: Any) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeEncodeError) as error:
                raise InputError(f"{self.path}: line {number} is not a JSON object ({error}).") from error
            self.names += [name for name in record if name not in self.names]
            yield record

    def rows(self, name: str, axis: int = 0) -> int:
        return self._count

    def blocks(self, axes: Mapping[str, int], start: int, step: int) -> Iterator[Block]:
        with reading(self.path):
            records = islice(self._records(), start, None)
            while block := list(islice(records, step)):
                yield {name: [record.get(name) for record in block] for name in axes}

    def digest(self) -> str:
        with reading(self.path):
            return sha256_of_file(self.path)

    def stamp(self) -> object:
        return stamp_of(self.path)


def visible(folder: Path, wanted: tuple[str, ...]) -> list[Path]:
    """What isn't hidden in a folder, in name order. Raises InputError for a link to what is wanted that isn't there.

    wanted: suffixes. Hidden files are a system's own, such as the ._name that macOS writes beside each on some disks.
    """
    with reading(folder):
        found = sorted(f for f in folder.iterdir() if not f.name.startswith("."))
    for path in found:
        if path.is_symlink() and path.suffix.lower() in wanted and not path.exists():
            raise InputError(f"{path} is a link that leads nowhere: correct it, or remove it.")
    return found


def pictures_in(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Pictures at any depth, hidden ones and what is in hidden folders apart; folders may be linked.

    above: folders that are being looked into; a link back to one adds nothing.
    """
    real = folder.resolve()
    if real in above:
        return
    for path in visible(folder, ("", *PICTURES)):
        if path.is_dir():
            yield from pictures_in(path, above | {real})
        elif path.suffix.lower() in PICTURES and path.is_file():
            yield path


class Pictures:
    """A folder of PNG and JPEG files: columns "path" and, if they lie in a folder a class, "labels"."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = ["path"]
        found = list(pictures_in(path))
        self._files = sorted(found, key=lambda f: f.relative_to(path).parts)
        depths = {len(f.relative_to(path).parts) for f in found}
        if depths - {1, 2} or len(depths) > 1:
            raise InputError(f"{path}: expected pictures, or one folder of pictures a class, not both or deeper ones.")
        if depths == {2}:
            self.names = ["path", LABELS[0]]

    def rows(self, name: str, axis: int = 0) -> int:
        return len(self._files)

    def blocks(self, axes: Mapping[str, int], start: int, step: int) -> Iterator[Block]:
        for at in range(start, len(self._files), step):
            files = self._files[at : at + step]
            columns = {"path": files, LABELS[0]: [f.parent.name for f in files]}
            yield {name: columns[name] for name in axes}

    def digest(self) -> str:
        return digest_of(self.path, self._files)

    def stamp(self) -> object:
        return [stamp_of(f) for f in self._files]


def digest_of(root: Path, files: list[Path]) -> str:
    """SHA-256 over the names and contents of many files."""
    whole = hashlib.sha256()
    for file in files:
        with reading(file):
            name = file.relative_to(root) if file.is_relative_to(root) else file
            whole.update(f"{name.as_posix()}\0{sha256_of_file(file)}\n".encode())
    return whole.hexdigest()
