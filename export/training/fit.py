"""Heads trained on features, all in one loop, each kept as it was when it did best on held-out rows.

Plain torch: the loop is a page, and no trainer that we know resumes to the same bits, or trains several heads that
stop at different times.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from offramp.export.attaching.folder import load_arrays, save_arrays
from offramp.export.training.features import Features
from offramp.export.training.state import moments_of, prefixed, restore_moments, tensors_under
from offramp.runtime.errors import ExportError, InputError
from torch.nn import functional

Progress = Callable[[int, int], None]
_STATE = "fit.npz"
_CHECKPOINT_SECONDS = 2.0
_LEAST_BATCH = 16


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How heads are trained.

    teaching: the share of the loss that is the divergence from the last exit's answer; the rest is that from the label.
    Rows without a label have the first alone. batch: rows a step, fewer where there are few. steps: of the optimiser,
    in at least 10 and at most `epochs` passes. patience: passes without a better head until one is done. held_out: the
    share of rows that decide on that.
    passes, rows, joint_rate: of joint training: passes over the data, rows a step, and the learning rate of the
    classifier's own weights.
    """

    rate: float = 2e-3
    decay: float = 0.02
    batch: int = 128
    epochs: int = 60
    steps: int = 8000
    patience: int = 12
    teaching: float = 0.5
    held_out: float = 0.1
    seed: int = 0
    passes: int = 2
    rows: int = 32
    joint_rate: float = 5e-5

    def __post_init__(self) -> None:
        for name, low, high in (("teaching", 0.0, 1.0), ("held_out", 0.001, 0.5)):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected a number from {low:g} to {high:g}.")
        for name in ("rate", "batch", "epochs", "steps", "patience", "passes", "rows", "joint_rate"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected more than 0.")


@dataclass
class _Fit:
    """Where the training stands. best: by head, its accuracy and loss on held-out rows; since: passes since then."""

    epoch: int
    best: NDArray[np.float64]
    since: NDArray[np.int64]
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @property
    def scores(self) -> list[float]:
        return [float(one) for one in self.best[:, 0]]


def fit_heads(
    heads: torch.nn.ModuleList,
    features: Features,
    recipe: Recipe,
    folder: Path | None = None,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[float]:
    """Train the heads in place. Returns each head's accuracy on the held-out rows; agreement with the last exit where
    no row is labelled.

    folder: for what a killed run goes on from, to the same bits; None keeps nothing.
    """
    train, held = split(len(features), recipe)
    optimiser = torch.optim.AdamW(heads.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    batch = min(recipe.batch, max(_LEAST_BATCH, len(train) // 40))  # few rows need small batches for many steps
    per_epoch = -(-len(train) // batch)
    epochs = max(min(10, recipe.epochs), min(recipe.epochs, -(-recipe.steps // per_epoch)))
    now = _begin(heads) if folder is None else _resume(folder, heads, optimiser)
    saved = time.monotonic()
    while now.epoch < epochs and (now.since < recipe.patience).any():
        if progress is not None:
            progress(now.epoch, epochs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed * 1_000_003 + now.epoch)
            heads.train()
            order = torch.randperm(len(train)).numpy()
            for k in range(per_epoch):
                rows = np.sort(train[order[k * batch : (k + 1) * batch]])
                loss = torch.stack(losses(heads, features, rows, recipe.teaching, device)).sum()
                for group in optimiser.param_groups:
                    group["lr"] = recipe.rate * paced((now.epoch * per_epoch + k) / (epochs * per_epoch))
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        heads.eval()
        now.epoch += 1
        _judge(now, heads, features, held, recipe, device)
        if folder is not None and time.monotonic() - saved >= _CHECKPOINT_SECONDS:
            _save(folder, now, heads, optimiser)
            saved = time.monotonic()
    if progress is not None:
        progress(epochs, epochs)
    for head, kept in zip(heads, now.kept, strict=True):
        head.load_state_dict(kept)
    heads.eval()
    return now.scores


def paced(done: float) -> float:
    """The learning rate's share when a share of the steps is done: up within a tenth, then down to 0 as a cosine."""
    return min(1.0, (done + 1e-3) / 0.1) * 0.5 * (1 + math.cos(math.pi * done))


def split(rows: int, recipe: Recipe) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on, and those held out. Raises InputError for fewer than ten rows."""
    if rows < 10:
        raise InputError(f"the training data has {rows} rows, expected at least 10.")
    order = np.random.default_rng(recipe.seed).permutation(rows)
    held = max(1, round(recipe.held_out * rows))
    return np.sort(order[held:]), np.sort(order[:held])


def losses(
    heads: torch.nn.ModuleList, features: Features, rows: NDArray[np.int64], teaching: float, device: str
) -> list[torch.Tensor]:
    """Each head's loss on some rows: −log p(label), and the divergence from the last exit's answer, by shares."""
    labels = torch.from_numpy(np.asarray(features.labels[rows])).to(device)
    taught = torch.from_numpy(np.asarray(features.logits[rows])).to(device)
    return [
        exit_loss(head(torch.from_numpy(np.asarray(pooled[rows])).to(device)), taught, labels, teaching)
        for head, pooled in zip(heads, features.pooled, strict=True)
    ]


def exit_loss(logits: torch.Tensor, taught: torch.Tensor, labels: torch.Tensor, teaching: float) -> torch.Tensor:
    """The mean loss of some rows' logits (batch, classes). taught: the teacher's logits. labels: -1 where unknown."""
    said = logits.log_softmax(1)
    known = (labels >= 0).float()
    share = teaching * known + (1 - known)
    apart = functional.kl_div(said, taught.log_softmax(1), reduction="none", log_target=True).sum(1)
    surprise = functional.nll_loss(said, labels.clamp(min=0), reduction="none")
    return (share * apart + (1 - share) * surprise).mean()


def _judge(
    now: _Fit,
    heads: torch.nn.ModuleList,
    features: Features,
    held: NDArray[np.int64],
    recipe: Recipe,
    device: str,
) -> None:
    """Keep each head that is more accurate on held-out rows than before, or as accurate with a lower loss."""
    with torch.inference_mode():
        lost = [float(loss) for loss in losses(heads, features, held, recipe.teaching, device)]
    for j, head in enumerate(heads):
        right = accuracy(predict(head, features.pooled[j], held, device), features, held)
        if (right, -lost[j]) > (now.best[j, 0], -now.best[j, 1]):
            now.best[j] = right, lost[j]
            now.since[j] = 0
            now.kept[j] = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
        else:
            now.since[j] += 1


def predict(
    head: torch.nn.Module, pooled: NDArray[np.float32], rows: NDArray[np.int64], device: str
) -> NDArray[np.int64]:
    """The head's class for each of the rows."""
    with torch.inference_mode():
        parts = [
            head(torch.from_numpy(np.asarray(pooled[rows[at : at + 4096]])).to(device)).argmax(1).cpu().numpy()
            for at in range(0, len(rows), 4096)
        ]
    return np.concatenate(parts)


def accuracy(said: NDArray[np.int64], features: Features, rows: NDArray[np.int64]) -> float:
    """On the labelled rows; where there are none, the share on which the last exit says the same."""
    truth = np.asarray(features.labels[rows])
    if (truth < 0).all():
        return float((said == np.asarray(features.logits[rows]).argmax(1)).mean())
    return float((said == truth)[truth >= 0].mean())


def _begin(heads: torch.nn.ModuleList) -> _Fit:
    best = np.tile([-1.0, np.inf], (len(heads), 1))
    kept = [{name: tensor.detach().clone() for name, tensor in head.state_dict().items()} for head in heads]
    return _Fit(0, best, np.zeros(len(heads), np.int64), kept)


def _save(folder: Path, now: _Fit, heads: torch.nn.ModuleList, optimiser: torch.optim.Optimizer) -> None:
    arrays = prefixed("head.", heads.state_dict()) | moments_of(optimiser)
    for j, kept in enumerate(now.kept):
        arrays |= prefixed(f"kept.{j}.", kept)
    arrays |= {"best": torch.from_numpy(now.best), "since": torch.from_numpy(now.since)}
    arrays["epoch"] = torch.tensor(now.epoch)
    save_arrays(folder / _STATE, arrays)


def _resume(folder: Path, heads: torch.nn.ModuleList, optimiser: torch.optim.Optimizer) -> _Fit:
    """Where a killed run stood, or the beginning."""
    try:
        arrays = load_arrays(folder / _STATE)
    except ExportError:
        return _begin(heads)
    heads.load_state_dict(tensors_under("head.", arrays))
    restore_moments(optimiser, arrays)
    kept = [tensors_under(f"kept.{j}.", arrays) for j in range(len(heads))]
    return _Fit(int(arrays["epoch"]), arrays["best"], arrays["since"], kept)
