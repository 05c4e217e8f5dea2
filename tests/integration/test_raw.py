"""Real texts and pictures through real models: the same answers as from the arrays their owner made."""

import json

import numpy as np
import pytest
from offramp.export import export_bundle
from offramp.runtime import Cascade
from offramp.runtime.jobs.audit import audit_records
from offramp.runtime.jobs.record import record
from offramp.runtime.records import read_records

ROWS = 300


@pytest.fixture(scope="module")
def text_bundle(minilm, shared, tmp_path_factory):
    pytest.importorskip("tokenizers")
    spec = {"kind": "text", "tokenizer": str(shared("models/minilm_clinc150/tokenizer.json")), "sample": ["hello"]}
    return export_bundle(
        minilm.build(),
        minilm.example_inputs(),
        tmp_path_factory.mktemp("text") / "b",
        dynamic_axes=minilm.dynamic_axes(),
        classes=minilm.classes(),
        preprocess=spec,
    )


def test_raw_intents_are_recorded_as_their_tokens_are(text_bundle, clinc_test, shared, tmp_path):
    texts = json.loads(shared("data/clinc150/text.json").read_text())["test"][:ROWS]
    inputs = {name: clinc_test[name][:ROWS] for name in ("input_ids", "attention_mask")}
    with Cascade.load(text_bundle) as cascade:
        names = [cascade.classes[k] for k in clinc_test["labels"][:ROWS]]
        rows = [{"text": text, "labels": name} for text, name in zip(texts, names, strict=True)]
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        got = read_records(record(cascade, tmp_path / "d.jsonl", tmp_path / "r"))
        expected = cascade.record(inputs)
    assert (got.labels == clinc_test["labels"][:ROWS]).all()
    for j in range(6):
        assert np.abs(got.logits[j] - expected.logits[j]).max() < 1e-3
    assert got.flops.mean() < 0.5 * expected.flops.mean(), "no row pays for the longest one's padding"


def test_the_audit_reproduces_the_golden_gaps(ar_vit_bundle, shared, tmp_path):
    """AR-ViT exported, recorded on the test images, audited: the values its owner computed from torch."""
    golden = {
        entry["name"]: entry
        for entry in json.loads(shared("golden/values.json").read_text())
        if entry["name"].startswith("matched_gap")
    }
    with np.load(shared("data/cifar10/test.npz")) as archive:
        x = np.ascontiguousarray(archive["x"].transpose(0, 3, 1, 2)).astype(np.float32) / 255
        np.savez(tmp_path / "d.npz", x=x, labels=archive["labels"])
    with Cascade.load(ar_vit_bundle) as cascade:
        folder = record(cascade, tmp_path / "d.npz", tmp_path / "r")
    found = audit_records(folder, permutations=200, replicates=200, seeds=2)
    for name, entry in golden.items():
        observed = found.exits[entry["exit"]].permutation.observed
        assert getattr(observed, name.removeprefix("matched_gap_")) == pytest.approx(
            entry["value"], abs=entry["tolerance"], rel=0
        )
    assert not found.yes
    assert found.verdict.startswith("No: at exit 2, which comes closest, the matched-confidence gap is within chance")
