"""Real texts and pictures through real models: the same answers as from the arrays their owner made."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from offramp.export.preprocess import take_preprocess
from offramp.runtime import Cascade, Records, scores
from offramp.runtime.cli import main
from offramp.runtime.files import seal, sha256_of_file
from offramp.runtime.jobs.auditing.audit import audit_records
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.records import SCHEMA, Index, RecordsWriter, read_records

ROWS = 300


@pytest.fixture(scope="module")
def text_bundle(minilm_bundle, shared, tmp_path_factory):
    """The exported bundle with its tokenizer, as export's `preprocess` would have written it."""
    pytest.importorskip("tokenizers")
    folder = Path(shutil.copytree(minilm_bundle, tmp_path_factory.mktemp("text") / "b"))
    document = json.loads((folder / "manifest.json").read_text())
    inputs = {given["name"]: (given["dtype"], given["shape"]) for given in document["inputs"]}
    given = {"kind": "text", "tokenizer": str(shared("models/minilm_clinc150/tokenizer.json")), "sample": ["hello"]}
    taken = take_preprocess(given, inputs)
    taken.copy(folder)
    document["preprocess"] = msgspec.to_builtins(taken.spec)
    tokenizer = folder / "tokenizer.json"
    document["files"]["tokenizer.json"] = {"sha256": sha256_of_file(tokenizer), "bytes": tokenizer.stat().st_size}
    document.pop("digest")
    (folder / "manifest.json").write_bytes(seal(document))
    (folder / "calibration.json").unlink(missing_ok=True)  # it was the other manifest's
    return folder


def test_raw_intents_are_recorded_as_their_tokens_are(text_bundle, clinc_test, shared, tmp_path):
    texts = json.loads(shared("data/clinc150/text.json").read_text())["test"][:ROWS]
    inputs = {name: clinc_test[name][:ROWS] for name in ("input_ids", "attention_mask")}
    with Cascade.load(text_bundle) as cascade:
        names = [cascade.classes[k] for k in clinc_test["labels"][:ROWS]]
        rows = [{"text": text, "labels": name} for text, name in zip(texts, names, strict=True)]
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        got = read_records(record(cascade, tmp_path / "d.jsonl", tmp_path / "r"))
        expected = cascade.record(inputs)
    assert (got.truth == clinc_test["labels"][:ROWS]).all()
    for j in range(6):
        assert np.abs(got.logits[j] - expected.logits[j]).max() < 1e-3
    assert got.flops.mean() < 0.5 * expected.flops.mean(), "no row pays for the longest one's padding"


@pytest.fixture
def golden(shared):
    """The gaps its owner computed from torch's outputs, by name."""
    entries = json.loads(shared("golden/values.json").read_text())
    return {e["name"].removeprefix("matched_gap_"): e for e in entries if e["name"].startswith("matched_gap")}


def check(found, golden):
    for name, entry in golden.items():
        one = found.exits[found.numbers.index(entry["exit"])]
        aggregate = next(each for each in one.features if each.feature == "r_agg")  # what its owner looked at
        observed = getattr(aggregate.permutation.observed, name)
        assert observed == pytest.approx(entry["value"], abs=entry["tolerance"], rel=0), name
    assert not found.yes
    assert found.verdict.startswith("No: at exit 2")
    assert "within chance" in found.verdict


@pytest.mark.slow
def test_the_audit_reproduces_the_golden_gaps(shared, golden, tmp_path):
    """The last exit of the records its owner kept."""
    with np.load(shared("models/ar_vit_cifar10/records.npz")) as kept:
        z, h, y = kept["logits"], kept["routing"], kept["labels"]
    index = Index(
        schema=SCHEMA,
        manifest="",
        exits=3,
        rows=len(y),
        classes=10,
        routing=len(h),
        routing_seen=[[], [], list(range(len(h)))],
        labelled=True,
    )
    score = np.stack([scores.log_odds(each) for each in z]).astype(np.float32)
    writer = RecordsWriter(tmp_path, index)
    flops = np.ones(score.shape, np.int64)
    writer.append(Records(logits=z, score=score, label=z.argmax(axis=2), flops=flops, routing=h, truth=y))
    writer.close()
    check(audit_records(tmp_path, permutations=500, replicates=500), golden)


@pytest.mark.slow
def test_the_command_reproduces_them_from_the_exported_model(ar_vit_bundle, shared, golden, tmp_path, capsys):
    with np.load(shared("data/cifar10/test.npz")) as archive:
        x = np.ascontiguousarray(archive["x"].transpose(0, 3, 1, 2)).astype(np.float32) / 255
        np.savez(tmp_path / "d.npz", x=x, labels=archive["labels"])
    paths = {name: str(tmp_path / name) for name in ("d.npz", "r", "a")}
    assert main(["record", str(ar_vit_bundle), paths["d.npz"], "--out", paths["r"]]) == 0
    assert main(["audit", str(ar_vit_bundle), paths["r"], "--out", paths["a"]]) == 0
    assert "No: at exit 2" in capsys.readouterr().out
    found = json.loads((tmp_path / "a" / "audit.json").read_text())
    for name, entry in golden.items():
        features = found["exits"][entry["exit"]]["features"]
        observed = next(each for each in features if each["feature"] == "r_agg")["permutation"]["observed"][name]
        assert observed == pytest.approx(entry["value"], abs=entry["tolerance"], rel=0), name
