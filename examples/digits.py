"""Train a three-exit network on scikit-learn's handwritten digits and write the bundle that ships with offramp.

    python examples/digits.py                 # rebuilds runtime/sample in place
    python examples/digits.py --out my_digits

Takes about a minute on two cores. Writes digits/ (the bundle, calibrated) and heldout.npz (rows that
neither training nor calibration has seen).
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade
from offramp.runtime.cli.calibrate import table
from offramp.runtime.jobs import AbstainRisk, Budget, calibrate, record
from sklearn.datasets import load_digits
from torch import nn

TRAIN, CALIBRATE = 800, 500  # of 1,797 rows; the other 497 are held out
WIDTH, EPOCHS, SEED = 48, 40, 0


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(self.first(x)))


class Digits(nn.Module):
    """8x8 grey pixels (uint8, 0…16) through three stages, a classifier after each."""

    def __init__(self, width: int = WIDTH, classes: int = 10) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                Residual(width),
                nn.Sequential(Residual(width), Residual(width)),
            ]
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * width, classes))
            for _ in self.stages
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        state = x.unsqueeze(1).to(torch.float32) / 16
        logits = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            state = stage(state)
            logits.append(head(state))
        return logits


def rows() -> tuple[np.ndarray, np.ndarray]:
    """All digits in a fixed random order: uint8 (1797, 8, 8), labels."""
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    return digits.images[order].astype(np.uint8), digits.target[order].astype(np.int64)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The batch moved by up to one pixel each way: 800 digits are few."""
    dy, dx = (int(v) for v in torch.randint(-1, 2, (2,)))
    return torch.roll(x, (dy, dx), (1, 2))


def train(x: np.ndarray, y: np.ndarray) -> Digits:
    torch.manual_seed(SEED)
    model = Digits()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    steps = EPOCHS * -(-len(x) // 50)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    pixels, labels = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(50):
            logits = model(shifted(pixels[batch]))
            loss = sum(nn.functional.cross_entropy(z, labels[batch], label_smoothing=0.02) for z in logits)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "runtime" / "sample")
    out = parser.parse_args().out
    x, y = rows()
    model = train(x[:TRAIN], y[:TRAIN])
    bundle = export_bundle(
        model,
        {"x": torch.from_numpy(x[:4])},
        out / "digits",
        dynamic_axes={"x": {0: "batch"}},
        classes=[str(k) for k in range(10)],
        name="digits",
        overwrite=True,
    )
    held_out = slice(TRAIN + CALIBRATE, None)
    np.savez_compressed(out / "heldout.npz", x=x[held_out], labels=y[held_out])
    with tempfile.TemporaryDirectory() as scratch:
        known = Path(scratch) / "calibration.npz"
        np.savez(known, x=x[TRAIN : TRAIN + CALIBRATE], labels=y[TRAIN : TRAIN + CALIBRATE])
        with Cascade.load(bundle) as cascade:
            record(cascade, known, Path(scratch) / "records")
        print(
            table(
                calibrate(
                    bundle,
                    Path(scratch) / "records",
                    targets=[Budget(0.5, "balanced"), Budget(0.3, "fast")],
                    abstain=[AbstainRisk(0.03)],
                    report=False,
                ).calibration.points
            )
        )
    shutil.rmtree(bundle / "history")  # the sample is a bundle to copy, not one with a past
    with Cascade.load(bundle) as cascade:
        for name in cascade.calibration.points:
            answer = cascade.at(name).predict({"x": x[held_out]})
            right = answer.label == y[held_out]
            print(f"held out, {name}: accuracy {right.mean():.2%}, answered {1 - answer.abstain.mean():.1%}")


if __name__ == "__main__":
    main()
