"""make_bundle: attach, train, export, record, choose exits, repack, calibrate, measure."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from offramp.export.attaching.attached import Attached
from offramp.export.attaching.folder import load_attached, save_attached
from offramp.export.making.steps import Say, Steps
from offramp.export.training.fit import Recipe
from offramp.export.training.rows import open_rows
from offramp.export.training.train import Bars, digest, summary, table, train_heads
from offramp.runtime.bundle import MANIFEST, own_version, read_bundle
from offramp.runtime.calibration_file import read_calibration
from offramp.runtime.cascade import Cascade
from offramp.runtime.errors import InputError, OfframpError
from offramp.runtime.files import write_atomically
from offramp.runtime.jobs.benching.bench import bench, document
from offramp.runtime.jobs.benching.describe import describe
from offramp.runtime.jobs.bundles.repack import choose_exits, kept_exits, repack
from offramp.runtime.jobs.bundles.timing import time_parts
from offramp.runtime.jobs.calibrating.calibrate import calibrate
from offramp.runtime.jobs.calibrating.targets import Target
from offramp.runtime.jobs.data.labelled_rows import FEWEST_ROWS
from offramp.runtime.jobs.data.opened import open_records
from offramp.runtime.jobs.data.sources import DataFile
from offramp.runtime.jobs.pages.model_card import DATA, put_section
from offramp.runtime.jobs.plain_json import to_json
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.jobs.recording.unfinished import Unfinished, unfinished
from offramp.runtime.points import OperatingPoint

_NOTES = "notes.json"
_FLATTERING = (
    "note: these are the rows of --val, which also chose exits and thresholds, so their accuracies flatter leaving "
    "early; --test FILE measures on others."
)


@dataclass(frozen=True)
class Asked:
    """What is asked for. train, val, test: data as `record` takes it; val has labels, train needs none.

    targets: of the operating points. exits: early exits to keep, None for those that pay by times measured here.
    labels: whether the train rows' labels are used. joint: whether the classifier's own weights are trained.
    seconds: for measuring, 0 for not at all.
    """

    train: Path
    val: Path
    targets: Sequence[Target]
    test: Path | None = None
    exits: Sequence[int] | None = None
    labels: bool = True
    joint: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    seconds: float = 20.0
    device: str = "cpu"


@dataclass(frozen=True)
class Made:
    """path: of the bundle. exits: those of the attached ones that were kept. training, times: tables, as text."""

    path: Path
    exits: list[int]
    points: Mapping[str, OperatingPoint]
    training: str
    times: str
    notes: list[str]


def make_bundle(
    attached: Attached,
    source: str,
    out: str | Path,
    asked: Asked,
    *,
    build: Callable[[str], torch.nn.Module] | None = None,
    overwrite: bool = False,
    bars: Bars,
    say: Say,
) -> Made:
    """Make a bundle that leaves early of a classifier with untrained heads.

    source, build: as of `save_attached` and `load_attached`. Each step leaves its result in a hidden folder beside
    `out`; a run that was killed goes on from there, to the same result. What is measured is measured once.

    Raises InputError for data that don't fit, before anything is run.
    """
    out = Path(out)
    sources = {name: open_rows(attached, path) for name, path in (("train", asked.train), ("val", asked.val))}
    if any(one.labels is None for one in sources["val"]):
        raise InputError(f"{asked.val}: has no labels: what leaving early costs in accuracy is measured on them.")
    labelled = sum(int((one.labels >= 0).sum()) for one in sources["val"] if one.labels is not None)
    if labelled < FEWEST_ROWS:
        raise InputError(f"{asked.val}: has {labelled} labelled rows, expected at least {FEWEST_ROWS}.")
    if asked.test is not None:
        open_rows(attached, asked.test)
    for j in asked.exits or ():
        if not 0 <= j <= len(attached.taps):
            raise InputError(f"exits has {j}, the model's are 0 to {len(attached.taps)}.")
    with unfinished(out, marker=MANIFEST, replace=overwrite) as work:
        try:
            return _Making(attached, source, asked, sources, work, build, bars, say).run(out)
        except (OfframpError, OSError) as error:
            if work.kept:
                error.add_note(work.kept)
            raise


class _Making:
    def __init__(
        self,
        attached: Attached,
        source: str,
        asked: Asked,
        sources: Mapping[str, Sequence[DataFile]],
        work: Unfinished,
        build: Callable[[str], torch.nn.Module] | None,
        bars: Bars,
        say: Say,
    ) -> None:
        self._attached, self._source, self._asked, self._sources = attached, source, asked, sources
        self._data = {name: [[one.name, one.table.digest()] for one in found] for name, found in sources.items()}
        self._work, self._build, self._bars, self._say = work, build, bars, say
        self._folder = work.folder / "steps"
        self._steps = Steps(self._folder, say)

    def run(self, out: Path) -> Made:
        asked, recipe = self._asked, msgspec.to_builtins(self._asked.recipe)
        model = [own_version(), digest(self._attached.source), digest(self._attached.heads), repr(self._attached.taps)]
        taught = [model, self._data["train"], recipe, asked.labels, asked.joint, asked.device]
        trained = self._steps.do("trained", "training the heads", taught, self._train)
        about = self._attached.about
        known = [about.classes, json.dumps(about.preprocess, sort_keys=True, default=str)]
        exported = self._steps.do("exported", "exporting", known, lambda path: self._export(trained, path))
        records = self._steps.do("records", "recording", self._data["val"], lambda path: self._record(exported, path))
        wanted = [[repr(target) for target in asked.targets], None if asked.exits is None else list(asked.exits)]
        chosen = self._steps.do(
            "exits.json", "choosing exits", wanted, lambda path: self._choose(exported, records, path)
        )
        exits = msgspec.json.decode(chosen.read_bytes(), type=list[int])
        bundle = self._steps.do(
            "bundle", "repacking and calibrating", 0, lambda path: self._pack(exported, exits, path)
        )
        test = None if asked.test is None else str(asked.test)
        report = self._steps.do(
            "times.json", "measuring", [test, asked.seconds], lambda path: self._measure(bundle, path)
        )
        made = Made(
            out,
            exits,
            read_calibration(bundle, read_bundle(bundle).manifest).points,
            (trained / "table.txt").read_text(encoding="utf-8"),
            msgspec.json.decode(report.read_bytes(), type=dict[str, Any])["text"],
            msgspec.json.decode((self._folder / _NOTES).read_bytes(), type=list[str]),
        )
        self._work.restart()
        shutil.copytree(bundle, self._work.work, dirs_exist_ok=True)
        self._work.finish()
        return made

    def _train(self, path: Path) -> None:
        scratch = self._folder / "training"
        scratch.mkdir(exist_ok=True)
        made = train_heads(
            self._attached,
            self._asked.train,
            labels=self._asked.labels,
            joint=self._asked.joint,
            recipe=self._asked.recipe,
            work=scratch,
            device=self._asked.device,
            bars=self._bars,
        )
        save_attached(self._attached, path, self._source, tuned=self._asked.joint, trained=summary(made))
        write_atomically(path / "table.txt", table(made).encode())
        shutil.rmtree(scratch)

    def _export(self, trained: Path, path: Path) -> None:
        attached = load_attached(trained, self._build)[0]
        attached.export(path, progress=lambda step: self._say(f"  {step} …"))

    def _record(self, bundle: Path, path: Path) -> None:
        with Cascade.load(bundle) as cascade, self._bars("recording") as progress:
            record(cascade, self._asked.val, path, overwrite=True, progress=progress)

    def _choose(self, bundle: Path, records: Path, path: Path) -> None:
        with Cascade.load(bundle) as cascade:
            if self._asked.exits is None:
                opened = open_records(records, cascade.manifest)
                dry = calibrate(
                    bundle,
                    opened,
                    targets=self._asked.targets,
                    abstain=(),
                    calibrators="none",
                    dry_run=True,
                    report=False,
                )
                timings = time_parts(cascade, cascade.manifest.typical_sizes)
                found = choose_exits(cascade.manifest, dry.calibration.points, opened.records, timings)
                exits = list(found[0].exits)
            else:
                exits = kept_exits(cascade.manifest, self._asked.exits)
        write_atomically(path, msgspec.json.encode(exits))

    def _pack(self, exported: Path, exits: Sequence[int], path: Path) -> None:
        """In a folder beside, since a calibration that was cut short behind its end must not be counted twice."""
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="packing-") as scratch:
            bundle = repack(exported, Path(scratch) / "bundle", exits)
            records = Path(scratch) / "records"
            self._record(bundle, records)
            with self._bars("calibrating") as progress:
                made = calibrate(bundle, records, targets=self._asked.targets, abstain=(), progress=progress)
            put_section(bundle, DATA, self._origin())
            write_atomically(self._folder / _NOTES, msgspec.json.encode([*made.notes, *made.unmet, *made.overruns]))
            bundle.rename(path)

    def _origin(self) -> list[str]:
        """What the model card says of data: what is known here, and what isn't."""
        counted = {name: sum(one.rows for one in found) for name, found in self._sources.items()}
        taught = "with their labels" if self._asked.labels else "without labels, from what the last exit says"
        what = "All weights were trained on" if self._asked.joint else "Heads were trained behind the frozen model on"
        source = Path(self._source).name if Path(self._source).exists() else self._source  # no path of this machine
        return [
            f"Made by `offramp make` of {source!r}. {what} {counted['train']:,} rows of "
            f"{self._asked.train.name}, {taught}. Exits and thresholds were chosen, and measured, on "
            f"{counted['val']:,} rows of {self._asked.val.name}.",
            "",
            "Not known here: what the model itself was trained on, what it is for, and the licences of model and data.",
        ]

    def _measure(self, bundle: Path, path: Path) -> None:
        if not self._asked.seconds:
            write_atomically(path, to_json({"text": ""}))
            return
        with self._bars("measuring, seconds") as progress:
            found = bench(bundle, self._asked.test or self._asked.val, seconds=self._asked.seconds, progress=progress)
        text = describe(found) if self._asked.test else f"{describe(found)}\n\n{_FLATTERING}"
        write_atomically(path, to_json({"text": text, **document(found)}))
