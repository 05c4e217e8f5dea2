"""Lone rows on cold caches, as a camera or a chat gives them: one every 20 ms.

    python benchmarks/paced.py                  # a three-exit CNN of some 80 MFLOP, made here, with random weights
    python benchmarks/paced.py --bundle mine/ --data rows.npz

Baseline: one plain ONNX Runtime session of the whole network, which gives label and score of its last exit, at the
better of two thread settings. Against it, taking turns row by row: `full`, and a point whose first exit keeps the
share of rows that --leave names. The label is looked at; besides, so that nothing is hidden in what is made out
later, exit, abstention and confidence too.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import machine, ratio, save, table
from harness import take_turns as in_turns
from offramp.export import export_bundle
from offramp.runtime import Cascade, OperatingPoint
from offramp.runtime.execution.cpu.session import available_threads
from offramp.runtime.jobs.benching.plain import plain_sessions
from torch import nn

ROWS = 200
PACE = 0.02


class Pictures(nn.Module):
    """3x32x32 pictures through three stages of two convolutions, a classifier after each: 80 MFLOP in all."""

    def __init__(self, width: int = 33, classes: int = 10) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.stages = nn.ModuleList(
            nn.Sequential(*self._conv(sizes[k], sizes[k + 1], 1 + (k > 0)), *self._conv(sizes[k + 1], sizes[k + 1], 1))
            for k in range(3)
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, classes)) for size in sizes[1:]
        )

    @staticmethod
    def _conv(given: int, made: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU()]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        logits = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            logits.append(head(x))
        return logits


def pictures(folder: Path) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """The made-up network as a bundle, and rows for it."""
    torch.manual_seed(0)
    bundle = export_bundle(Pictures().eval(), {"x": torch.randn(2, 3, 32, 32)}, folder / "pictures")
    rng = np.random.default_rng(0)
    return bundle, [{"x": rng.standard_normal((1, 3, 32, 32)).astype(np.float32)} for _ in range(ROWS)]


def rows_of(cascade: Cascade, data: Path) -> list[dict[str, np.ndarray]]:
    """Single rows of a .npz file with the model's inputs, padding cut off where a mask says so."""
    with np.load(data, allow_pickle=False) as archive:
        arrays = {i.name: archive[i.name] for i in cascade.manifest.inputs}
    picks = np.random.default_rng(0).permutation(len(next(iter(arrays.values()))))[:ROWS]
    mask = arrays.get("attention_mask")
    rows = []
    for k in picks:
        width = None if mask is None else int(mask[k].sum())
        rows.append({name: np.ascontiguousarray(a[k : k + 1, :width]) for name, a in arrays.items()})
    return rows


def leaving(cascade: Cascade, rows: list[dict[str, np.ndarray]], share: float) -> Cascade:
    """The cascade at a point where that share of the rows leaves at the first exit, and the rest at the last."""
    scores = np.concatenate([cascade.record(row).score[0] for row in rows])
    closed = [math.inf] * (len(cascade.exits) - 2)
    return cascade.at(OperatingPoint((float(np.quantile(scores, 1 - share)), *closed, -math.inf)))


def measure(path: Path, rows: list[dict[str, np.ndarray]] | Path, leave: float, threads: int, seconds: float):
    with Cascade.load(path, threads=threads) as cascade:
        rows = rows if isinstance(rows, list) else rows_of(cascade, rows)
        plain, about = plain_sessions(cascade.bundle, threads)
        at = 0

        def next_row() -> dict[str, np.ndarray]:
            nonlocal at
            at += 1
            return rows[at // 6 % len(rows)]  # six take a turn at each row

        def label(one: Cascade) -> None:
            one.predict(next_row()).label.item()

        def everything(one: Cascade) -> None:
            answer = one.predict(next_row())
            answer.label.item()
            answer.exit.item()
            answer.abstain.item()
            answer.confidence.item()

        point = leaving(cascade, rows, leave)

        def plainly(run: Callable[..., Any]) -> None:
            run(next_row())[0].item()

        runs = {f"plain, {name}": partial(plainly, run) for name, run in plain.items()}
        runs |= {"full": partial(label, cascade), "full, all looked at": partial(everything, cascade)}
        runs |= {f"{leave:.0%} leave first": partial(label, point)}
        runs |= {f"{leave:.0%} leave first, all looked at": partial(everything, point)}
        spent = in_turns(runs, rounds=2 * ROWS, seconds=seconds, settle=PACE)
        base = min((name for name in runs if name.startswith("plain")), key=lambda name: spent[name].median)
        flops = cascade.row_flops(cascade.manifest.typical_sizes)
        print(
            f"{cascade.manifest.name}: {flops[-1] / 1e6:.0f} MFLOP, exits {cascade.exits}; {threads} threads; {about}"
        )
        found = {name: ratio(spent[name], spent[base]) for name in runs}
        # The middle row leaves first, so the median says nothing of the others: the mean says what all cost.
        means = {name: float(spent[name].wall.mean() / spent[base].wall.mean()) for name in runs}
        print(
            table(
                [("", "median ms", "of the baseline", "mean ms", "of the baseline")]
                + [
                    (
                        name + (" (baseline)" if name == base else ""),
                        f"{1e3 * spent[name].median:.3f}",
                        str(found[name]),
                        f"{1e3 * spent[name].wall.mean():.3f}",
                        f"{means[name]:.3f}",
                    )
                    for name in runs
                ]
            )
        )
        return {name: {"median": found[name], "mean": means[name]} for name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--data", type=Path, help=".npz with the model's inputs, for --bundle")
    parser.add_argument("--leave", type=float, default=0.7, help="share of rows that leave at the first exit")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    if (args.bundle is None) != (args.data is None):
        sys.exit("--bundle and --data go together.")
    with tempfile.TemporaryDirectory() as scratch:
        path, rows = pictures(Path(scratch)) if args.bundle is None else (args.bundle, args.data)
        found = measure(path, rows, args.leave, args.threads, args.seconds)
    print(f"load {machine()['load']}; saved in {save('paced-pictures' if args.bundle is None else 'paced', found)}")


if __name__ == "__main__":
    main()
