"""Train an intent classifier with an exit after each of its layers, and write the sample that ships with offramp.

    python examples/intents.py                       # fetches its two public parts, trains, rebuilds runtime/sample
    python examples/intents.py --encoder all-MiniLM-L6-v2 --sentences data_full.json --out my_intents

Parts: the encoder sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), a folder with model.safetensors and
tokenizer.json; and CLINC150 (Larson et al. 2019, CC BY 3.0), the file data_full.json. Takes half an hour on a core or
two. `--trained` keeps the trained weights, and takes them from there if they are there already.

Writes intents/ (the bundle, calibrated, its weights as int8) and intents.json (sentences that neither training nor
calibration has seen).
"""

import argparse
import hashlib
import json
import shutil
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade
from offramp.runtime.cli.calibrate import table
from offramp.runtime.jobs import AbstainRisk, MaxDrop, calibrate, record, repack
from offramp.runtime.sample.packing import WeightPacker
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

ENCODER = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/main"
ENCODER_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
SENTENCES = "https://raw.githubusercontent.com/clinc/oos-eval/master/data/data_full.json"
WIDTH, HEADS, LAYERS = 384, 12, 6
KEPT_EXITS = (0, 1, 2)  # and the last: what those after layers 4 and 5 win is less than what asking them costs
VOCABULARY, LONGEST = 8192, 64
EPOCHS, BATCH, RATE, HEAD_RATE, SEED = 8, 32, 1.5e-4, 2e-3, 0
DROP, RISK = 0.005, 0.02


class Layer(nn.Module):
    """One layer of BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, 1e-12), nn.LayerNorm(WIDTH, 1e-12)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = self.norm1(x + self.drop(self.out(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))))
        return self.norm2(x + self.drop(self.down(functional.gelu(self.up(x)))))


class Intents(nn.Module):
    """Token ids and their mask (rows, tokens) through six layers; after each, the mean of the states is classified."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH, 1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, classes)) for _ in range(LAYERS)
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[torch.Tensor]:
        x = self.drop(self.norm(self.word(input_ids) + self.position.weight[: input_ids.shape[1]]))
        keep = attention_mask.to(x.dtype)
        bias = (1 - keep)[:, None, None, :] * torch.finfo(x.dtype).min
        share = (keep / keep.sum(1, keepdim=True))[..., None]
        logits = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x, bias)
            logits.append(head((x * share).sum(1)))
        return logits


# ---------------------------------------------------------------- the two public parts


def fetched(folder: Path) -> Path:
    """The encoder's two files in `folder`, checked."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in ENCODER_SHA256.items():
        if not (folder / name).exists():
            print(f"fetching {ENCODER}/{name}")
            urllib.request.urlretrieve(f"{ENCODER}/{name}", folder / name)
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != wanted:
            raise SystemExit(f"{folder / name}: has the SHA-256 {found}, expected {wanted}.")
    return folder


def sentences(file: Path) -> dict[str, list[tuple[str, str]]]:
    """(sentence, intent) by split: train, val, test, oos_val, oos_test."""
    if not file.exists():
        print(f"fetching {SENTENCES}")
        urllib.request.urlretrieve(SENTENCES, file)
    return {split: [(text, intent) for text, intent in rows] for split, rows in json.loads(file.read_text()).items()}


def pruned(tokenizer: Path, texts: list[str]) -> tuple[list[int], str]:
    """The ids to keep of the encoder's vocabulary, and its tokenizer without the others.

    Kept are the pieces of the training sentences, every single character, so that any word can be spelt, and the most
    frequent others, which come first in BERT's vocabulary.
    """
    spec = json.loads(tokenizer.read_text(encoding="utf-8"))
    whole = Tokenizer.from_str(json.dumps(spec | {"padding": None, "truncation": None}))
    names = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    keep = {k for encoding in whole.encode_batch(texts) for k in encoding.ids}
    keep |= {k for k, name in enumerate(names) if name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")}
    keep |= {k for k, name in enumerate(names) if name.isascii() and len(name.removeprefix("##")) == 1}
    for k, name in enumerate(names):
        if len(keep) < VOCABULARY and name.isascii() and not name.startswith("["):
            keep.add(k)
    kept = sorted(keep)
    number = {names[k]: new for new, k in enumerate(kept)}
    spec["model"]["vocab"] = number
    spec["added_tokens"] = [t | {"id": number[t["content"]]} for t in spec["added_tokens"] if t["content"] in number]
    for token in spec["post_processor"]["special_tokens"].values():
        token["ids"] = [number[name] for name in token["tokens"]]
    return kept, json.dumps(spec | {"padding": None, "truncation": None}, ensure_ascii=False)


def pretrained(weights: dict[str, torch.Tensor], kept: list[int], classes: int) -> Intents:
    """The network with the encoder's weights, and heads that know nothing yet."""
    model = Intents(classes)
    state = {
        "word.weight": weights["embeddings.word_embeddings.weight"][kept],
        "position.weight": weights["embeddings.position_embeddings.weight"][:LONGEST]
        + weights["embeddings.token_type_embeddings.weight"][0],
    }
    for kind in ("weight", "bias"):
        state[f"norm.{kind}"] = weights[f"embeddings.LayerNorm.{kind}"]
        for k in range(LAYERS):
            old, new = f"encoder.layer.{k}", f"layers.{k}"
            state[f"{new}.qkv.{kind}"] = torch.cat(
                [weights[f"{old}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            )
            state[f"{new}.out.{kind}"] = weights[f"{old}.attention.output.dense.{kind}"]
            state[f"{new}.norm1.{kind}"] = weights[f"{old}.attention.output.LayerNorm.{kind}"]
            state[f"{new}.up.{kind}"] = weights[f"{old}.intermediate.dense.{kind}"]
            state[f"{new}.down.{kind}"] = weights[f"{old}.output.dense.{kind}"]
            state[f"{new}.norm2.{kind}"] = weights[f"{old}.output.LayerNorm.{kind}"]
    loaded = model.load_state_dict(state, strict=False)
    assert not loaded.unexpected_keys
    assert all(name.startswith("heads.") for name in loaded.missing_keys), loaded.missing_keys
    return model


# ---------------------------------------------------------------- training


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for place, row in zip(ids, rows, strict=True):
        place[: len(row)] = torch.tensor(row)
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def batches(lengths: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """Rows in random order, but such of like length together: short ones aren't padded for long ones."""
    made: list[torch.Tensor] = []
    for chunk in torch.randperm(len(lengths), generator=generator).split(50 * BATCH):
        made += chunk[torch.argsort(lengths[chunk], stable=True)].split(BATCH)
    return [made[k] for k in torch.randperm(len(made), generator=generator)]


def train(model: Intents, rows: list[list[int]], labels: torch.Tensor) -> None:
    """Every exit learns the labels, and early ones what the last one thinks of them."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    heads = list(model.heads.parameters())
    body = [p for name, p in model.named_parameters() if not name.startswith("heads.")]
    optimiser = torch.optim.AdamW([{"params": body, "lr": RATE}, {"params": heads, "lr": HEAD_RATE}], weight_decay=0.01)
    steps = EPOCHS * -(-len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, [RATE, HEAD_RATE], total_steps=steps, pct_start=0.1)
    lengths = torch.tensor([len(row) for row in rows])
    model.train()
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in batches(lengths, generator):
            logits = model(*padded([rows[k] for k in batch]))
            told = functional.log_softmax(logits[-1].detach(), 1)
            loss = sum(functional.cross_entropy(z, labels[batch]) for z in logits)
            loss = loss + 0.5 * sum(
                functional.kl_div(functional.log_softmax(z, 1), told, log_target=True, reduction="batchmean")
                for z in logits[:-1]
            )
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimiser.step()
            schedule.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {total / len(rows):.3f}", flush=True)


# ---------------------------------------------------------------- the bundle


@torch.no_grad()
def round_to_int8(model: Intents, packer: WeightPacker) -> None:
    """Round every matrix, row by row, to what an int8 times a float32 says, and have the packer know it."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = module.weight.numpy()
            scale = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float32)
            small = np.rint(weight / scale).astype(np.int8)
            module.weight.copy_(torch.from_numpy(packer.know(small, scale)))


def build(model: Intents, tokenizer: str, intents: list[str], data: dict[str, Any], out: Path) -> None:
    packer = WeightPacker()
    round_to_int8(model, packer)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        ids = torch.randint(4, VOCABULARY, (3, 9))
        whole = export_bundle(
            model.eval(),
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            folder / "whole",
            dynamic_axes={name: {0: "batch", 1: "seq"} for name in ("input_ids", "attention_mask")},
            classes=intents,
            name="intents",
            preprocess={"kind": "text", "tokenizer": str(folder / "tokenizer.json"), "max_length": LONGEST},
            progress=print,
        )
        bundle = repack(whole, folder / "intents", KEPT_EXITS)
        known = folder / "val.jsonl"
        known.write_text("".join(json.dumps({"text": t, "label": i}) + "\n" for t, i in data["val"]), encoding="utf-8")
        with Cascade.load(bundle) as cascade:
            record(cascade, known, folder / "records")
        made = calibrate(
            bundle,
            folder / "records",
            targets=[MaxDrop(DROP, "fast")],
            abstain=[AbstainRisk(RISK)],
            report=False,
        )
        print(table(made.calibration.points))
        target = out / "intents"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(bundle, target, ignore=shutil.ignore_patterns("history", "weights.bin"))
        packer.pack(bundle, target)
    held_out = {split: data[split] for split in ("test", "oos_test")}
    (out / "intents.json").write_text(json.dumps(held_out, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", type=Path, default=Path("all-MiniLM-L6-v2"), help="folder; fetched if not there")
    parser.add_argument("--sentences", type=Path, default=Path("data_full.json"), help="file; fetched if not there")
    parser.add_argument("--trained", type=Path, help="a .safetensors file of trained weights to keep, or to take")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "runtime" / "sample")
    args = parser.parse_args()
    data, encoder = sentences(args.sentences), fetched(args.encoder)
    intents = sorted({intent for _, intent in data["train"]})
    kept, tokenizer = pruned(encoder / "tokenizer.json", [text for text, _ in data["train"]])
    model = pretrained(load_file(encoder / "model.safetensors"), kept, len(intents))
    if args.trained is not None and args.trained.exists():
        model.load_state_dict(load_file(args.trained))
    else:
        encodings = Tokenizer.from_str(tokenizer).encode_batch([text for text, _ in data["train"]])
        labels = torch.tensor([intents.index(intent) for _, intent in data["train"]])
        train(model, [encoding.ids[:LONGEST] for encoding in encodings], labels)
        if args.trained is not None:
            save_file(model.state_dict(), args.trained)
    build(model, tokenizer, intents, data, args.out)


if __name__ == "__main__":
    main()
