"""What `offramp make` makes of a plain timm classifier: a small ResNet on CIFAR-10.

    python benchmarks/attach_timm.py          # trains it first, on 4,000 pictures

The data are CIFAR-10's 10,000 test pictures: 4,000 to train the classifier and its heads, 1,000 to calibrate, 5,000 to
measure on. No weights can be fetched here, and so few pictures make a weak classifier: the figures say what its exits
are worth beside it, not how good timm's models are. Heads' own FLOPs count; the rival is the classifier alone.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save, table
from offramp.runtime import Cascade

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "cifar10" / "test.npz"
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
ROWS = {"train": slice(0, 4000), "val": slice(4000, 5000), "test": slice(5000, 10_000)}
DROPS = ("1%", "2%")
BATCH, RATE = 64, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA, help="an .npz with x (10000, 32, 32, 3) uint8 and labels")
    parser.add_argument("--model", default="resnet18", help="a timm model (default: resnet18)")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--work", type=Path, help="folder for what is made (default: one that goes)")
    args = parser.parse_args()
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        print(f"benchmarks/attach_timm.py: passed by, timm can't be imported here ({error}).")
        return
    with np.load(args.data) as archive, tempfile.TemporaryDirectory() as scratch:
        parts = {name: (archive["x"][rows], archive["labels"][rows]) for name, rows in ROWS.items()}
        folder = args.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (pictures, labels) in parts.items():
            np.savez(folder / f"{name}.npz", image=pictures, labels=labels)
        if not (folder / "checkpoint").exists():
            train(timm, args.model, *parts["train"], args.epochs, folder / "checkpoint")
        lines = []
        for taught_by, options in (("labels", []), ("no labels", ["--no-labels"])):
            bundle, minutes = folder / taught_by.replace(" ", "-"), None
            if not bundle.exists():
                began = time.perf_counter()
                make(folder, bundle, options)
                minutes = (time.perf_counter() - began) / 60
            lines += [{"taught by": taught_by, "minutes": minutes, **line} for line in measured(bundle, parts["test"])]
    shown = [
        (line["taught by"], line["point"], f"{line['saving']:.2f}x", f"{line['accuracy']:.2%}", f"{line['lost']:+.2%}")
        for line in lines
    ]
    print(table([("taught by", "point", "fewer FLOPs", "accuracy on test", "lost"), *shown]))
    save("attach-timm", {"model": args.model, "epochs": args.epochs, "made": lines})


def train(timm: Any, name: str, pictures: np.ndarray, labels: np.ndarray, epochs: int, out: Path) -> None:
    """A plain classifier, as its owner would have trained it: mirrored and shifted pictures, one cycle."""
    torch.manual_seed(0)
    size = {"input_size": (3, 32, 32), "crop_pct": 1.0}
    model = timm.create_model(name, num_classes=10, pretrained_cfg_overlay=size)
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    x = (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - mean) / std
    y = torch.from_numpy(labels)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    steps = epochs * -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            some = torch.nn.functional.pad(x[rows], (4, 4, 4, 4))
            down, right = torch.randint(9, (2,)).tolist()
            some = some[:, :, down : down + 32, right : right + 32]
            some = torch.where(torch.rand(len(rows), 1, 1, 1) < 0.5, some, some.flip(3))
            loss = torch.nn.functional.cross_entropy(model(some), y[rows], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    about = {"label_names": NAMES}
    timm.models.save_for_hf(model.eval(), str(out), model_config=about, safe_serialization=True)


def make(folder: Path, bundle: Path, options: list[str]) -> None:
    drops = [text for drop in DROPS for text in ("--max-drop", drop)]
    data = ["--train", str(folder / "train.npz"), "--val", str(folder / "val.npz"), "--out", str(bundle)]
    command = [sys.executable, "-m", "offramp.runtime.cli", "make", str(folder / "checkpoint"), *data, *drops]
    subprocess.run([*command, "--seconds", "0", *options], check=True)


def measured(bundle: Path, test: tuple[np.ndarray, np.ndarray]) -> list[dict[str, Any]]:
    """Each operating point on the test pictures, and every exit's accuracy there."""
    pictures, truth = test
    with Cascade.load(bundle) as cascade:
        inputs = cascade.preprocess(list(pictures))
        batches = [{name: array[at : at + 250] for name, array in inputs.items()} for at in range(0, len(truth), 250)]
        by_exit = np.concatenate([cascade.record(batch).label for batch in batches], axis=1)
        whole = by_exit[-1]
        found = []
        for drop in DROPS:
            point = cascade.at(f"max-drop-{drop}")
            answers = [point.predict(batch) for batch in batches]
            label, exit_, flops = (np.concatenate([getattr(a, n) for a in answers]) for n in ("label", "exit", "flops"))
            found.append(
                {
                    "point": f"max-drop-{drop}",
                    "saving": float(cascade.row_flops({})[-1] / flops.mean()),
                    "full": float((whole == truth).mean()),
                    "accuracy": float((label == truth).mean()),
                    "lost": float((whole == truth).mean() - (label == truth).mean()),
                    "exit shares": np.bincount(exit_, minlength=len(by_exit)) / len(truth),
                    "accuracy by exit": (by_exit == truth).mean(1),
                }
            )
    return found


if __name__ == "__main__":
    main()
