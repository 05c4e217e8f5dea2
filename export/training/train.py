"""train_heads: heads on a classifier learn from labelled rows, or from what its own last exit says."""

import copy
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from offramp.export.attaching.attached import Attached
from offramp.export.training.features import BATCH, Features, compute_features
from offramp.export.training.fit import Recipe, accuracy, fit_heads, predict, split
from offramp.export.training.inputs import keep_inputs
from offramp.export.training.joint import fit_joint
from offramp.export.training.rows import open_rows
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.data.sources import DataFile
from offramp.runtime.jobs.data.tables import LABELS

Bars = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Makes a progress bar of a title: inside `with`, a function to call with (done, total)."""


@dataclass(frozen=True)
class ExitLine:
    """An exit on the held-out rows. share: of the FLOPs until there. accuracy: None without labels. agreement: the
    share of rows on which it says what the last exit says."""

    exit: int
    behind: str
    share: float
    accuracy: float | None
    agreement: float


@dataclass(frozen=True)
class Trained:
    """attached: as it was given, its heads trained. rows, labelled, held_out: how many. exits: a line an exit.

    before: after joint training, how often the last exit had been right before on the held-out rows (without labels,
    1); else None. notes: what is odd about the labels.
    """

    attached: Attached
    rows: int
    labelled: int
    held_out: int
    exits: list[ExitLine]
    before: float | None = None
    notes: tuple[str, ...] = ()


def train_heads(
    attached: Attached,
    data: str | Path,
    *,
    labels: bool = True,
    joint: bool = False,
    recipe: Recipe | None = None,
    work: str | Path | None = None,
    device: str = "cpu",
    bars: Bars | None = None,
) -> Trained:
    """Train the heads of `attach_exits`, in place; the classifier itself stays as it is, unless `joint`.

    data: what `offramp record` takes: texts, pictures or arrays, with `labels` or without. Rows without a label teach
    the heads to say what the last exit says. labels: False ignores those that there are.
    joint: train the classifier's weights too, once the heads have been trained without. Its source is a copy then: the
    module that was given stays as it is. docs/guide/attach.md says what came of it.
    recipe: how; the default needs no tuning. Its seed, the data and the model decide the result to the bit, on the
    same machine and threads.
    work: a folder for what is computed once, and for what a killed run goes on from; it is the caller's to remove.
    device: where torch runs. bars: for progress, such as `offramp.runtime.cli.progress.bar`.

    Raises InputError for data that don't fit, naming file and row.
    """
    recipe = recipe or Recipe()
    shown = bars or (lambda _: nullcontext(lambda done, total: None))
    sources = open_rows(attached, data, labels=labels)
    with ExitStack() as kept:
        folder = Path(kept.enter_context(tempfile.TemporaryDirectory()) if work is None else work)
        _to(attached, device)
        kept.callback(_to, attached, "cpu")
        key = _key(attached, sources, device)
        place = folder / f"features-{_short(key)}"
        with shown("running the model") as progress:
            features = compute_features(attached, sources, place, key, device=device, progress=progress)
        place = folder / f"fit-{_short([key, labels, msgspec.to_builtins(recipe), digest(attached.heads)])}"
        place.mkdir(exist_ok=True)
        with shown("training the heads") as progress:
            fit_heads(attached.heads, features, recipe, place, device=device, progress=progress)
        held = split(len(features), recipe)[1]
        own = np.asarray(features.logits[held]).argmax(1)
        if joint:
            attached.source = copy.deepcopy(attached.source)
            with shown("keeping the rows") as progress:
                inputs = keep_inputs(sources, place, progress)
            with shown("joint training") as progress:
                said = fit_joint(attached, inputs, features, recipe, place, device=device, progress=progress)
        else:
            heads = zip(attached.heads, features.pooled, strict=True)
            said = [*(predict(head, pooled, held, device) for head, pooled in heads), own]
        lines = _lines(attached, features, held, said)
        known = int((np.asarray(features.labels) >= 0).sum())
        before = accuracy(own, features, held) if joint else None
        notes = _about_labels(np.asarray(features.labels), str(data)) if labels else []
    return Trained(attached, len(features), known, len(held), lines, before, tuple(notes))


def _about_labels(labels: NDArray[np.int64], data: str) -> list[str]:
    known = np.unique(labels[labels >= 0])
    if not len(known):
        named = " or ".join(repr(name) for name in LABELS)
        return [f"{data} has no labels (a column {named}): heads learned to say what the last exit says."]
    if len(known) == 1:
        return [f"all labels of {data} are of one class: the heads know no other."]
    return []


def summary(trained: Trained) -> dict[str, Any]:
    """What a folder's index keeps of a training."""
    return {
        "rows": trained.rows,
        "labelled": trained.labelled,
        "held_out": trained.held_out,
        "exits": [asdict(line) for line in trained.exits],
        "last_before_joint_training": trained.before,
    }


def table(trained: Trained) -> str:
    """Accuracy by exit on the held-out rows, for people."""
    lines = [f"{'exit':<6}{'FLOPs':>7}{'accuracy':>10}{'as the last':>13}  behind"]
    for line in trained.exits:
        right = "-" if line.accuracy is None else f"{line.accuracy:.2%}"
        share = "?" if math.isnan(line.share) else f"{line.share:.1%}"
        lines.append(f"{line.exit:<6}{share:>7}{right:>10}{line.agreement:>13.2%}  {line.behind}")
    if trained.before is not None:
        lines.append(f"before joint training, the last exit: {trained.before:.2%}")
    return "\n".join(lines)


def _lines(
    attached: Attached, features: Features, rows: NDArray[np.int64], said: Sequence[NDArray[np.int64]]
) -> list[ExitLine]:
    """said: each exit's classes of the held-out rows."""
    names = [tap.name for tap in attached.taps] + ["the model's own"]
    shares = [tap.share for tap in attached.taps] + [1.0]
    truth = np.asarray(features.labels[rows])
    return [
        ExitLine(
            j,
            name,
            share,
            None if (truth < 0).all() else accuracy(one, features, rows),
            float((one == said[-1]).mean()),
        )
        for j, (name, share, one) in enumerate(zip(names, shares, said, strict=True))
    ]


def _to(attached: Attached, device: str) -> None:
    try:
        attached.to(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device is {device!r}, which torch can't use here: {str(error).splitlines()[0]}") from error


def _key(attached: Attached, sources: Sequence[DataFile], device: str) -> dict[str, Any]:
    """All that decides what the model says of the rows."""
    return {
        "torch": [str(torch.__version__), torch.get_num_threads(), device],
        "source": digest(attached.source),
        "taps": [[tap.name, tap.pooling] for tap in attached.taps],
        "data": [[source.name, source.table.digest()] for source in sources],
        "preprocess": json.dumps(attached.about.preprocess, sort_keys=True, default=str),
        "batch": BATCH,
    }


def digest(module: torch.nn.Module) -> str:
    """SHA-256 of a module's weights, their names and types."""
    whole = hashlib.sha256(type(module).__name__.encode())
    for name, tensor in module.state_dict().items():
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        whole.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
