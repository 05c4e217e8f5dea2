"""A Hugging Face text classifier becomes a bundle that leaves early, however often the command is killed."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import hugging_face, library
from offramp.runtime import Cascade

pytestmark = pytest.mark.slow
SUPPORT = str(Path(__file__).parents[1] / "support")
TOPICS = {"weather": "rain sun wind snow", "money": "bank coin loan price", "food": "bread soup apple rice"}
OTHERS = "please tell me about the what is a now then there can you".split()  # noqa: SIM905


def sentences(count, seed):
    """(text, topic): a word of the topic among others, and for a third of them a word of another topic behind 'not'."""
    rng = random.Random(seed)
    for _ in range(count):
        topic, other = rng.sample(sorted(TOPICS), 2)
        words = [*rng.sample(OTHERS, 4), rng.choice(TOPICS[topic].split())]
        rng.shuffle(words)
        if rng.random() < 1 / 3:
            words += ["not", rng.choice(TOPICS[other].split())]
        yield " ".join(words), topic


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A checkpoint that was trained for a minute, and train, val and test.csv."""
    library("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("home")
    words = ["[PAD]", "[UNK]", "not", *OTHERS, *" ".join(TOPICS.values()).split()]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = sorted(TOPICS)
    model = hugging_face("Bert", num_hidden_layers=4, id2label=dict(enumerate(names)))
    rows = {name: list(sentences(count, k)) for k, (name, count) in enumerate(COUNTS.items())}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(400):
        some = random.Random(step).sample(rows["train"], 32)
        tokens = [tokenizer.encode(text).ids for text, _ in some]
        width = max(map(len, tokens))
        ids = torch.tensor([t + [0] * (width - len(t)) for t in tokens])
        labels = torch.tensor([names.index(topic) for _, topic in some])
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(folder / "checkpoint")
    tokenizer.save(str(folder / "checkpoint" / "tokenizer.json"))
    for name, found in rows.items():
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("text", "labels"), *found])
    return folder


COUNTS = {"train": 3000, "val": 1500, "test": 1000}


def command(home, out):
    given = {"train": "train.csv", "val": "val.csv", "out": out, "max-drop": "2%", "seconds": "0", "exits": "0,1"}
    options = [text for name, value in given.items() for text in (f"--{name}", value)]
    return [sys.executable, "-m", "offramp.runtime.cli", "make", "checkpoint", *options]


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def bundle(home):
    subprocess.run(command(home, "bundle"), cwd=home, env=environment(), check=True)
    return home / "bundle"


def test_texts_leave_early_and_are_as_often_right(home, bundle):
    with (home / "test.csv").open(newline="") as stream:
        texts, topics = zip(*list(csv.reader(stream))[1:], strict=True)
    with Cascade.load(bundle, operating_point="max-drop-2%") as cascade:
        inputs = cascade.preprocess(list(texts))
        early, full = cascade.predict(inputs), cascade.at("full").predict(inputs)
        truth = np.array([cascade.classes.index(topic) for topic in topics])
    assert early.flops.mean() < 0.8 * full.flops.mean()
    assert (early.label == truth).mean() > (full.label == truth).mean() - 0.03


def test_a_command_that_is_killed_again_and_again_ends_with_the_same_bundle(home, bundle):
    rng = random.Random(0)
    for _ in range(12):
        with subprocess.Popen(command(home, "killed"), cwd=home, env=environment()) as process:
            time.sleep(rng.uniform(3, 20))
            process.send_signal(signal.SIGKILL)
        if (home / "killed").exists():
            break
    else:
        subprocess.run(command(home, "killed"), cwd=home, env=environment(), check=True)
    for name in ("manifest.json", "calibration.json"):
        one, other = (json.loads((folder / name).read_text()) for folder in (bundle, home / "killed"))
        assert without_dates(one) == without_dates(other), name
    assert {f: d["sha256"] for f, d in read(bundle)["files"].items()} == {
        f: d["sha256"] for f, d in read(home / "killed")["files"].items()
    }


def read(folder):
    return json.loads((folder / "manifest.json").read_text())


def without_dates(value):
    """A document without what a date is in: digests, too."""
    if isinstance(value, dict):
        return {k: without_dates(v) for k, v in value.items() if k not in ("created", "digest", "manifest", "command")}
    return [without_dates(v) for v in value] if isinstance(value, list) else value
