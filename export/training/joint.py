"""Joint training: the classifier's own weights with those of its heads, all exits at once.

The loss is the mean of the exits' losses. An early exit learns from the label and from what the last exit says of the
row at that moment (self-distillation: Zhang et al. 2019, "Be Your Own Teacher"); the last one from the label and from
what it said before joint training, so that rows without labels keep it where it was.

The model stays in evaluation mode: batch norms keep their statistics, and nothing but the heads drops out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from offramp.export.attaching.attached import Attached
from offramp.export.attaching.folder import load_arrays, save_arrays
from offramp.export.training.features import BATCH, Features
from offramp.export.training.fit import Recipe, accuracy, exit_loss, paced, split
from offramp.export.training.inputs import Inputs
from offramp.export.training.rows import tensors_of
from offramp.export.training.state import moments_of, prefixed, restore_moments, tensors_under
from offramp.runtime.errors import ExportError, InputError

Rows = NDArray[np.int64]
Progress = Callable[[int, int], None]
_STATE, _BEST, _WEIGHT = "joint.npz", "best.npz", "weight."
# A state is three times the model's weights: not written too often.
_CHECKPOINT_SECONDS = 60.0
# Batches among which rows of the same shapes are looked for: enough for most to be full, few enough to stay random.
_WINDOW = 50
# The heads were trained before, but the features move under them.
_HEADS_FASTER = 10
_LONGEST_GRADIENT = 1.0


@dataclass
class _Stand:
    """Steps done, and how often the exits are right on held-out rows, on average, with the weights that are best."""

    step: int
    best: float


def fit_joint(
    attached: Attached,
    inputs: Inputs,
    features: Features,
    recipe: Recipe,
    folder: Path,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[Rows]:
    """Train all weights of `attached` in place. Returns each exit's classes of the held-out rows, the last one's too.

    features: what the model said of the rows before, and their labels. folder: for what a killed run goes on from, to
    the same bits. Kept are the weights of the pass at whose end the exits are right most often on the held-out rows,
    on average; those that it began with, if no pass is better.
    Raises InputError for a model in another type than float32, and where the loss is no number any more.
    """
    _check(attached)
    train, held = split(len(features), recipe)
    passes = [_batches(inputs, train, recipe, k) for k in range(recipe.passes)]
    plan = [rows for batches in passes for rows in batches]
    ends = set(np.cumsum([len(batches) for batches in passes]).tolist())
    optimiser = _optimiser(attached, recipe)
    now = _resume(folder, attached, optimiser)
    if now is None:
        now = _Stand(0, _right(predict_all(attached, inputs, held, device), features, held))
        save_arrays(folder / _BEST, attached.state_dict())
    saved = time.monotonic()
    while now.step < len(plan):
        if progress is not None:
            progress(now.step, len(plan))
        _step(attached, optimiser, inputs, features, plan, now.step, recipe, device)
        now.step += 1
        if now.step in ends:
            right = _right(predict_all(attached, inputs, held, device), features, held)
            if right > now.best:
                now.best = right
                save_arrays(folder / _BEST, attached.state_dict())
        if now.step in ends or time.monotonic() - saved >= _CHECKPOINT_SECONDS:
            _save(folder, now, attached, optimiser)
            saved = time.monotonic()
    if progress is not None:
        progress(len(plan), len(plan))
    attached.load_state_dict({name: torch.from_numpy(array) for name, array in load_arrays(folder / _BEST).items()})
    return predict_all(attached, inputs, held, device)


def predict_all(attached: Attached, inputs: Inputs, rows: Rows, device: str) -> list[Rows]:
    """Each exit's class for each of the rows."""
    attached.eval()
    said = np.zeros((len(attached.taps) + 1, len(rows)), np.int64)
    place = np.zeros(len(inputs), np.int64)
    place[rows] = np.arange(len(rows))
    for some in inputs.batches(rows, BATCH):
        with torch.inference_mode():
            logits = attached(**tensors_of(inputs.of(some), device))
        said[:, place[some]] = [one.argmax(1).cpu().numpy() for one in logits]
    return list(said)


def _check(attached: Attached) -> None:
    for name, weight in attached.source.named_parameters():
        if weight.is_floating_point() and weight.dtype != torch.float32:
            kind = str(weight.dtype).removeprefix("torch.")
            raise InputError(f"joint training needs weights in float32, {name} is {kind}: give the model as .float().")


def _batches(inputs: Inputs, train: Rows, recipe: Recipe, number: int) -> list[Rows]:
    """A pass over the training rows."""
    rng = np.random.default_rng([recipe.seed, number])
    order = rng.permutation(train)
    window = _WINDOW * recipe.rows
    found = [
        batch for at in range(0, len(order), window) for batch in inputs.batches(order[at : at + window], recipe.rows)
    ]
    return [found[k] for k in rng.permutation(len(found))]


def _optimiser(attached: Attached, recipe: Recipe) -> torch.optim.Optimizer:
    attached.source.requires_grad_(True)
    groups = [
        {"params": list(attached.source.parameters()), "pace": recipe.joint_rate},
        {"params": list(attached.heads.parameters()), "pace": recipe.joint_rate * _HEADS_FASTER},
    ]
    return torch.optim.AdamW(groups, lr=recipe.joint_rate, weight_decay=recipe.decay)


def _step(
    attached: Attached,
    optimiser: torch.optim.Optimizer,
    inputs: Inputs,
    features: Features,
    plan: Sequence[Rows],
    step: int,
    recipe: Recipe,
    device: str,
) -> None:
    rows = plan[step]
    labels = torch.from_numpy(np.asarray(features.labels[rows])).to(device)
    before = torch.from_numpy(np.asarray(features.logits[rows])).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed * 1_000_003 + step)
        attached.train()
        *early, last = attached(**tensors_of(inputs.of(rows), device))
    lost = [exit_loss(one, last.detach(), labels, recipe.teaching) for one in early]
    loss = torch.stack([*lost, exit_loss(last, before, labels, recipe.teaching)]).mean()
    if not torch.isfinite(loss):
        raise InputError(f"joint training: the loss is {float(loss)} at step {step}. Lower joint_rate.")
    optimiser.zero_grad()
    # A batch that isn't full counts for as many rows as it has.
    (loss * (len(rows) / recipe.rows)).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(attached.parameters(), _LONGEST_GRADIENT)
    for group in optimiser.param_groups:
        group["lr"] = group["pace"] * paced(step / len(plan))
    optimiser.step()


def _right(said: Sequence[Rows], features: Features, rows: Rows) -> float:
    return float(np.mean([accuracy(one, features, rows) for one in said]))


def _save(folder: Path, now: _Stand, attached: Attached, optimiser: torch.optim.Optimizer) -> None:
    arrays = prefixed(_WEIGHT, attached.state_dict()) | moments_of(optimiser)
    arrays |= {"step": torch.tensor(now.step), "best": torch.tensor(now.best, dtype=torch.float64)}
    save_arrays(folder / _STATE, arrays)


def _resume(folder: Path, attached: Attached, optimiser: torch.optim.Optimizer) -> _Stand | None:
    """Where a killed run stood, None at the beginning."""
    try:
        arrays = load_arrays(folder / _STATE)
    except ExportError:
        return None
    attached.load_state_dict(tensors_under(_WEIGHT, arrays))
    restore_moments(optimiser, arrays)
    return _Stand(int(arrays["step"]), float(arrays["best"]))
