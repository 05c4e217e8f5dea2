"""The record job: every exit of a bundle, on data, into a folder of records.

It may be killed at any moment: what was recorded stays in a hidden folder beside the result, and the same command
goes on from there, to the same bytes. The result appears when it's whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from offramp.runtime.bundle import Manifest, own_version
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.sources import Chunk, DataFile, open_data
from offramp.runtime.jobs.recording.float16 import Check, check_float16, store_float16
from offramp.runtime.jobs.recording.unfinished import Unfinished, unfinished
from offramp.runtime.predictions import Records
from offramp.runtime.records import INDEX, SCHEMA, Index, RecordsWriter, read_arrays, write_index

Progress = Callable[[int, int], None]
Say = Callable[[str], None]
# A second's work is lost by a kill, and a flush to the disk costs far less than that.
_CHECKPOINT_SECONDS = 1.0


class _Journal(msgspec.Struct, kw_only=True):
    """How far a recording is.

    key: what must be the same for it to be gone on with. index: of the records, but for their source.
    hashes: of the files begun. half: what float16 does to each exit, once that was looked at.
    """

    key: dict[str, Any]
    done: int = 0
    index: Index | None = None
    hashes: dict[str, str] = {}
    half: list[Check] = []


def record(
    cascade: Cascade,
    data: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    half: bool = False,
    progress: Progress | None = None,
    say: Say | None = None,
    checkpoint: float = _CHECKPOINT_SECONDS,
) -> Path:
    """Run every exit of the cascade's bundle on a data source and write the records to the folder `out`.

    data: what `open_data` takes: arrays named as the model's inputs, or raw rows if the bundle has
        preprocessing; and `labels`.
    half: store logits as float16, at each exit where that keeps the ranking (float16.py); scores and labels are
        those of the float32 logits. progress: called with rows done and rows in all. say: called with what
        a user should know. checkpoint: seconds of work that a kill may cost.

    A run that was cut short is gone on with if bundle, options and data are the same, else begun again; data
    that changed is recorded anew from the first changed file on. Raises InputError naming the file and column
    at fault, or if another process is recording into `out`.
    """
    if isinstance(cascade, str | Path):
        raise InputError(f"cascade is {cascade!r}, expected a loaded one: Cascade.load({str(cascade)!r}).")
    tell = say or (lambda _: None)
    with unfinished(Path(out), marker=INDEX, replace=overwrite, keep=Path(data)) as work:
        try:
            sources = open_data(data, cascade.bundle)
            total = sum(source.rows for source in sources)
            if not total:
                raise InputError(f"{data}: has no rows.")
            key = _key(cascade, sources, allow_nonfinite, half)
            journal = _resume(work, key, sources, tell)
            _Recording(cascade, sources, work, journal, total, allow_nonfinite, checkpoint).run(progress)
            assert journal.index is not None
            source: dict[str, Any] = {"files": {s.name: journal.hashes[s.name] for s in sources}}
            if half:
                source["half"] = _store_float16(work, journal, tell)
            write_index(work.work, msgspec.structs.replace(journal.index, source=source))
            work.finish()
        except InputError:
            kept = work.read(_Journal)
            if kept is None or not kept.done:
                work.discard()
            raise
    return Path(out)


class _Recording:
    """The rows from the journal's last one to the end."""

    def __init__(
        self,
        cascade: Cascade,
        sources: Sequence[DataFile],
        work: Unfinished,
        journal: _Journal,
        total: int,
        allow_nonfinite: bool,
        checkpoint: float,
    ) -> None:
        self._cascade, self._sources, self._work, self._journal = cascade, sources, work, journal
        self._total, self._allow_nonfinite, self._every = total, allow_nonfinite, checkpoint
        self._writer: RecordsWriter | None = None
        if journal.index is not None:
            self._writer = RecordsWriter(work.work, journal.index, journal.done)

    def run(self, progress: Progress | None) -> None:
        saved = time.monotonic()
        if progress is not None:
            progress(self._journal.done, self._total)
        for made in self._records():
            if self._writer is None:
                self._journal.index = _index(made, self._cascade.manifest, self._total)
                self._writer = RecordsWriter(self._work.work, self._journal.index)
            self._writer.append(made)
            if progress is not None:
                progress(self._writer.at, self._total)
            if time.monotonic() - saved >= self._every:
                self._save()
                saved = time.monotonic()
        self._save()
        assert self._writer is not None
        self._writer.stop()

    def _save(self) -> None:
        assert self._writer is not None
        self._writer.sync()
        self._journal.done = self._writer.at
        self._work.write(self._journal)

    def _records(self) -> Iterator[Records]:
        """Records of chunk after chunk, from the journal's row on."""
        begin, hashes = -self._journal.done, self._journal.hashes
        for source in self._sources:
            start = max(0, -begin)
            begin += source.rows
            if start >= source.rows and source.name in hashes:
                continue
            stamp = source.table.stamp()
            if source.name not in hashes:  # read once more, but then from the system's cache
                hashes[source.name] = source.table.digest()
            for chunk in source.chunks(start, self._cascade.batch_rows):
                yield self._chunk(chunk, source.name, start)
                start += chunk.rows
            if source.table.stamp() != stamp or start != source.rows:
                raise InputError(f"{source.name}: changed while it was being read. Record again.")

    def _chunk(self, chunk: Chunk, name: str, start: int) -> Records:
        try:
            parts = [self._cascade.record(i, allow_nonfinite=self._allow_nonfinite) for _, i in chunk.parts]
        except InputError as error:
            raise InputError(f"{name}, in rows {start} to {start + chunk.rows - 1}: {error}") from error
        made = parts[0] if len(parts) == 1 else _together(parts, [positions for positions, _ in chunk.parts])
        return replace(made, truth=chunk.labels)


def _together(parts: Sequence[Records], positions: Sequence[NDArray[np.int64]]) -> Records:
    """The parts' rows as one, each at its position."""
    order = np.argsort(np.concatenate(positions))

    def join(values: Sequence[Any], axis: int) -> Any:
        return np.take(np.concatenate(values, axis=axis), order, axis=axis)

    def maybe(name: str, axis: int = 1) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else join(values, axis)

    features = [part.features for part in parts]
    return Records(
        logits=join([np.asarray(part.logits) for part in parts], 1),
        score=maybe("score"),
        label=maybe("label"),
        flops=maybe("flops"),
        features=None if features[0] is None else tuple(join(each, 0) for each in zip(*features, strict=True)),
        routing=maybe("routing"),
        external=maybe("external"),
        reservation=maybe("reservation"),
        routing_seen=parts[0].routing_seen,
    )


def _key(cascade: Cascade, sources: Sequence[DataFile], allow_nonfinite: bool, half: bool) -> dict[str, Any]:
    """All that decides the result's bytes, but the data's content."""
    return {
        "offramp": own_version(),
        "bundle": cascade.manifest.digest,
        "session": cascade.fingerprint,
        "batch": cascade.batch_rows,
        "allow_nonfinite": allow_nonfinite,
        "half": half,
        "files": [[source.name, source.rows, source.labels is not None] for source in sources],
    }


_CHANGED = {
    "offramp": "offramp's version",
    "bundle": "the bundle",
    "session": "ONNX Runtime, its providers or the threads",
    "batch": "the batch",
    "allow_nonfinite": "--allow-nonfinite",
    "half": "--half",
    "files": "the data's files",
}


def _resume(work: Unfinished, key: dict[str, Any], sources: Sequence[DataFile], say: Say) -> _Journal:
    """The journal to go on with: an earlier process's as far as it holds, or a new one."""
    found: _Journal | None = work.read(_Journal)
    if found is not None and found.done and work.work.is_dir():
        changed = [what for name, what in _CHANGED.items() if found.key.get(name) != key[name]]
        if not changed and _unchanged_rows(found, sources) and _whole(work, found):
            say(f"going on at row {found.done} of {sum(s.rows for s in sources)}, where an earlier run was cut short")
            work.write(found)
            return found
        why = f"{' and '.join(changed)} changed" if changed else "its data or files changed"
        say(f"an earlier run was cut short, but {why} since: beginning again")
    work.restart()
    return _Journal(key=key)


def _unchanged_rows(journal: _Journal, sources: Sequence[DataFile]) -> int:
    """Rows done in front of the first file whose content isn't what it was; the journal is wound back to them."""
    before = 0
    for source in sources:
        if source.name not in journal.hashes or before >= journal.done:
            break
        if source.table.digest() != journal.hashes[source.name]:
            journal.done = before
        before += source.rows
    rest = False
    at = 0
    for source in sources:  # what lies behind is hashed anew when its turn comes
        rest = rest or at >= journal.done
        if rest:
            journal.hashes.pop(source.name, None)
        at += source.rows
    return journal.done


def _whole(work: Unfinished, journal: _Journal) -> bool:
    """Whether the files begun are there, of the sizes they were made with."""
    try:
        if journal.index is not None:
            read_arrays(work.work, journal.index)
            return True
    except InputError:
        pass
    return False


def _store_float16(work: Unfinished, journal: _Journal, say: Say) -> list[dict[str, Any]]:
    """Logits as float16 where the ranking survives; what was found at each exit, for the index.

    The finding is in the journal before the file is replaced, so a kill in between changes nothing.
    """
    assert journal.index is not None
    for j in range(journal.index.exits):
        path = work.work / f"logits_{j}.npy"
        if j >= len(journal.half):
            journal.half.append(check_float16(np.load(path, mmap_mode="r", allow_pickle=False)))
            work.write(journal)
        found = journal.half[j]
        if found.survives:
            store_float16(path)
        else:
            say(
                f"exit {j} keeps its logits as they are: as float16, {found.labels:.2%} of the labels and up to "
                f"{found.pairs:.2%} of the order would change, {found.overflow} logits would overflow"
            )
    return [
        {"exit": j, "stored": "float16" if found.survives else "as computed", **msgspec.to_builtins(found)}
        for j, found in enumerate(journal.half)
    ]


def _index(first: Records, manifest: Manifest, rows: int) -> Index:
    return Index(
        schema=SCHEMA,
        manifest=manifest.digest,
        exits=len(manifest.exits),
        rows=rows,
        classes=len(manifest.classes),
        routing=len(manifest.routing),
        routing_seen=[list(layers) for layers in manifest.routing_seen],
        features=None if first.features is None else [list(f.shape[1:]) for f in first.features],
        external=first.external is not None,
        reservation=first.reservation is not None,
        labelled=first.truth is not None,
    )
