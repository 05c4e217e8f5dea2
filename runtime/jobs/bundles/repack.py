"""Fewer exits: a bundle with some exits gone, their heads and gates with them.

An exit earns its place if the time its leavers save is more than what its head, its gate and the cut cost
everybody who passes: with measured times and recorded scores, every set of exits has an expected time.
"""

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from offramp.runtime.bundle import CALIBRATION, MANIFEST, Block, Bundle, Manifest, Segment, read_bundle
from offramp.runtime.calibration_file import Calibration, read_calibration, write_calibration
from offramp.runtime.errors import InputError
from offramp.runtime.execution.stages import plan
from offramp.runtime.files import new_folder, seal, sha256_of_file
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.bundles.timing import Timings
from offramp.runtime.jobs.data.expected import expected
from offramp.runtime.jobs.data.labelled_rows import labelled_rows
from offramp.runtime.jobs.data.opened import Openable, open_records
from offramp.runtime.jobs.data.splits import split_labelled
from offramp.runtime.jobs.pages.model_card import CARD, DATA, model_card, read_card, section
from offramp.runtime.points import FULL, OperatingPoint
from offramp.runtime.predictions import Records

# With more exits than this, sets are searched by leaving out one exit after the other.
_MOST_EXITS_FOR_ALL_SETS = 10
# A set must be this much faster than keeping everything: less is noise, and an exit that's gone stays gone.
_WORTH = 0.01


def repack(
    bundle: str | Path,
    out: str | Path,
    exits: Sequence[int],
    *,
    records: Openable | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a bundle that keeps only some exits. The last exit always stays.

    exits: indices to keep. records: of the old bundle; the points' expected figures are then measured
    again on the rows that calibration reported on, and otherwise left out.
    Raises InputError if an exit doesn't exist, or the bundle lacks the merged graph that a gap needs.
    """
    opened = read_bundle(bundle)
    manifest = opened.manifest
    given = None if records is None else open_records(records, manifest).records
    kept = kept_exits(manifest, exits)
    stages = plan(manifest, kept)
    if len(stages) != len(kept):
        spans = [stage.blocks for stage in stages if stage.exit is None]
        raise InputError(f"exits: the bundle has no graph for the blocks from {spans[0][0]} on. Export it again.")
    calibration = read_calibration(opened.path, manifest)
    with new_folder(Path(out), marker=MANIFEST, replace=overwrite, keep=opened.path) as folder:
        document = _document(opened, kept, [stage.graph for stage in stages])
        document["files"] = {}
        for name in _files(manifest, document):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(opened.file(name), target)
            document["files"][name] = {"sha256": sha256_of_file(target), "bytes": target.stat().st_size}
        (folder / MANIFEST).write_bytes(seal(document))
        new = read_bundle(folder)
        if (opened.path / CALIBRATION).exists():
            points = {name: _fewer(point, kept, manifest.digest, given) for name, point in calibration.points.items()}
            write_calibration(
                folder,
                new.manifest,
                Calibration(points, calibration.version, provenance=calibration.provenance),
                created=calibration.created,
                producer=manifest.producer,
            )
        _write_card(opened.path, folder, document)
    return Path(out)


def _write_card(old: Path, new: Path, document: Mapping[str, Any]) -> None:
    """The old bundle's card, with the architecture that there is now; none if it has none of ours."""
    card = read_card(old)
    data = None if card is None else section(card, DATA)
    if data is not None:
        promises = "Exits are gone since thresholds were chosen: `offramp calibrate` says again what holds."
        kept = {"promises": promises} if (new / CALIBRATION).exists() else {}
        (new / CARD).write_text(model_card(document, data=data, **kept), encoding="utf-8")


def kept_exits(manifest: Manifest, exits: Sequence[int]) -> list[int]:
    """The exits asked for and the last, each once, ascending. Raises InputError for one that doesn't exist."""
    last = len(manifest.exits) - 1
    for j in exits:
        if not 0 <= j <= last:
            raise InputError(f"exits has {j}, this bundle's are 0 to {last}.")
    return sorted({*exits, last})


def _document(bundle: Bundle, kept: list[int], graphs: Sequence[Block | Segment]) -> dict[str, Any]:
    """The new manifest: the kept graphs are its blocks, and merged graphs between them its segments."""
    manifest = bundle.manifest
    old: dict[str, Any] = msgspec.to_builtins(manifest)
    new_exit = {j: k for k, j in enumerate(kept)}
    ends = [manifest.exits[j].block for j in kept]
    starts = [0, *(end + 1 for end in ends[:-1])]
    fields = Block.__struct_fields__
    blocks = [{name: getattr(graph, name) for name in fields} | {"exit": k} for k, graph in enumerate(graphs)]
    segments = [
        {name: getattr(s, name) for name in fields}
        | {"exit": ends.index(s.last), "first": starts.index(s.first), "last": ends.index(s.last)}
        for s in manifest.segments
        if s.first in starts and s.last in ends and starts.index(s.first) < ends.index(s.last)
    ]
    used = {name for block in blocks for name in (*block["inputs"], *block["outputs"])}
    old.pop("digest")
    cascade_graph = old["cascade"] if len(kept) > 1 else None
    return old | {
        "blocks": blocks,
        "segments": segments,
        "tensors": {name: tensor for name, tensor in old["tensors"].items() if name in used},
        "exits": [old["exits"][j] | {"block": new_exit[j]} for j in kept],
        "cascade": cascade_graph and cascade_graph | {"exits": [cascade_graph["exits"][j] for j in kept]},
    }


def _files(manifest: Manifest, document: dict[str, Any]) -> list[str]:
    """The files the new bundle needs: its graphs, and whatever isn't a graph (weights, raw-input files)."""
    graphs = {graph.file for graph in (*manifest.blocks, *manifest.segments)}
    wanted = {graph["file"] for graph in (*document["blocks"], *document["segments"])}
    if manifest.cascade is not None:
        graphs |= set(manifest.cascade.files)
        wanted |= set(manifest.cascade.files) if document["cascade"] else set()
    return [name for name in manifest.files if name in wanted or name not in graphs]


_SURVIVES = ("seed", "repacked_from", "exits_kept")


def loses_promises(point: OperatingPoint, kept: Sequence[int]) -> bool:
    """Whether a point leaves at an exit that isn't kept, so that nothing measured about it holds any more."""
    return any(j not in kept for j in point.exits)


def _fewer(point: OperatingPoint, kept: list[int], origin: str, records: Records | None) -> OperatingPoint:
    thresholds = tuple(point.thresholds[j] for j in kept)
    provenance = {**point.provenance, "repacked_from": origin, "exits_kept": kept}
    if loses_promises(point, kept):  # what was promised and met was so with exits that are gone
        provenance = {"method": "repacked", **{k: v for k, v in provenance.items() if k in _SURVIVES}}
    new = replace(
        point,
        thresholds=thresholds,
        calibrators=tuple(point.calibrators[j] for j in kept) if point.calibrators else (),
        expected={},
        provenance=provenance,
    )
    if records is None or records.truth is None:
        return new
    rows = split_labelled(labelled_rows(_only(records, kept)), int(point.provenance.get("seed", 0)))
    return replace(new, expected=expected(rows.test, new))


def _only(records: Records, kept: list[int]) -> Records:
    """Records of some exits."""

    def pick(values: Any) -> Any:
        return None if values is None else tuple(values[j] for j in kept)

    return replace(
        records,
        logits=tuple(records.logits[j] for j in kept),
        score=records.score[kept],
        label=records.label[kept],
        flops=records.flops[kept],
        features=pick(records.features),
        routing_seen=pick(records.routing_seen),
        external=None if records.external is None else records.external[kept],
        reservation=None if records.reservation is None else records.reservation[kept],
    )


@dataclass(frozen=True)
class ExitSet:
    """A set of exits and its expected time, as a fraction of keeping all of them, by operating point."""

    exits: tuple[int, ...]
    time: Mapping[str, float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.time.values())))


def choose_exits(
    manifest: Manifest, points: Mapping[str, OperatingPoint], records: Records, timings: Timings
) -> list[ExitSet]:
    """Sets of exits by expected time, fastest first; the first is what `--auto` takes.

    A set is a candidate only if no operating point gets slower by it. Times come from `timings`, which must
    hold every block and segment; how many rows pass where, from the records.
    """
    early = range(len(manifest.exits) - 1)
    rules = {name: point for name, point in points.items() if name != FULL} or dict(points)
    model = TimeModel.measured(manifest, timings)

    def time_of(some: frozenset[int]) -> dict[str, float]:
        """Expected time a row at each point with only these early exits: alone and in a batch, since both must pay."""
        spent = {}
        for name, point in rules.items():
            bars = [*(t if j in some else math.inf for j, t in enumerate(point.thresholds[:-1])), -math.inf]
            spent[name] = sum(
                model.ms(records.score, bars, rows) / rows for rows in (timings.rows[0], timings.rows[-1])
            )
        return spent

    everything = time_of(frozenset(early))

    def consider(some: frozenset[int]) -> ExitSet:
        times = time_of(some)
        return ExitSet((*sorted(some), len(manifest.exits) - 1), {n: times[n] / everything[n] for n in rules})

    if len(manifest.exits) <= _MOST_EXITS_FOR_ALL_SETS:
        sets = [frozenset(s) for size in range(len(early) + 1) for s in itertools.combinations(early, size)]
        choices = [consider(some) for some in sets]
    else:
        now = consider(frozenset(early))
        choices = [now]
        while len(now.exits) > 1:
            now = min((consider(frozenset(now.exits[:-1]) - {j}) for j in now.exits[:-1]), key=lambda c: c.mean)
            choices.append(now)
    keep_all = next(c for c in choices if len(c.exits) == len(manifest.exits))
    better = [c for c in choices if max(c.time.values()) <= 1 and c.mean < 1 - _WORTH]
    return [*sorted(better, key=lambda c: c.mean), keep_all]


def describe(choices: Sequence[ExitSet]) -> str:
    """The best few sets of exits, as a table."""
    lines = ["exits kept        expected time against all exits"]
    for choice in choices[:5]:
        times = "  ".join(f"{name} {value:.3f}" for name, value in choice.time.items())
        lines.append(f"{','.join(map(str, choice.exits)):<18}{times}")
    return "\n".join(lines)
