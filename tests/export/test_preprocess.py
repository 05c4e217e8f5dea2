"""A bundle that says how raw rows become inputs: written with its files, checked when read, one meaning everywhere."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import BundleError, Cascade, ExportError, InputError
from offramp.runtime.bundle import read_bundle
from offramp.runtime.cli import main
from offramp.runtime.files import seal
from offramp.runtime.jobs.bundles.repack import repack
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.preprocess import Image, Text
from offramp.runtime.records import read_records
from raw_bundles import picture_bundle, text_bundle, word_tokenizer
from toys import SEQUENCE, Masked

tokenizers = pytest.importorskip("tokenizers")
PIL = pytest.importorskip("PIL.Image")

TEXTS = ["what is my balance", "play music", "", "is is is is is is is is", "é \U0001f600", "play my balance"]


def changed(bundle, copy, change):
    """A copy of a bundle whose preprocessing says something else."""
    shutil.copytree(bundle, copy)
    document = json.loads((copy / "manifest.json").read_text())
    document["preprocess"] |= change
    document.pop("digest")
    (copy / "manifest.json").write_bytes(seal(document))
    return copy


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer") / "words.json")


@pytest.fixture(scope="module")
def texts(tokenizer, tmp_path_factory):
    return text_bundle(tmp_path_factory.mktemp("texts") / "b", tokenizer)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return picture_bundle(tmp_path_factory.mktemp("pictures"))


def test_the_files_are_in_the_bundle_and_in_its_manifest(texts, pictures, tokenizer):
    manifest = read_bundle(texts).manifest
    assert isinstance(manifest.preprocess, Text)
    assert manifest.preprocess.tokenizer in manifest.files
    assert (texts / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    manifest = read_bundle(pictures).manifest
    assert isinstance(manifest.preprocess, Image)
    assert manifest.preprocess.sample == "sample.png"
    assert "sample.png" in manifest.files


def test_raw_texts_predict_as_their_tokens_do(texts):
    with Cascade.load(texts) as cascade:
        inputs = cascade.preprocess(TEXTS)
        assert inputs["ids"].shape == (6, 8)
        together = cascade.predict(inputs)
        for row, text in enumerate(TEXTS):
            alone = cascade.at("full").predict(cascade.preprocess([text]))
            assert alone.label[0] == together.label[row]
            np.testing.assert_allclose(alone.score[0], together.score[row], atol=1e-4)


@pytest.fixture(params=["txt", "csv", "jsonl", "parquet", "folder"])
def text_data(request, tmp_path):
    labels = ["bank", "music", "", "oos", "none", "bank"]
    kind = request.param
    path = tmp_path / f"d.{kind}"
    if kind == "txt":
        path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
        return path, None
    if kind == "csv":
        lines = [f'"{text}",{label}' for text, label in zip(TEXTS, labels, strict=True)]
        path.write_text("\n".join(["text,labels", *lines]), encoding="utf-8")
    elif kind == "jsonl":
        rows = [{"text": text, "labels": label} for text, label in zip(TEXTS, labels, strict=True)]
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.table({"text": TEXTS, "labels": labels}), path, row_group_size=4)
    else:
        path.mkdir()
        for k in range(2):
            rows = [{"text": t, "labels": n} for t, n in zip(TEXTS[3 * k : 3 * k + 3], labels[3 * k :], strict=False)]
            (path / f"{k}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path, [0, 1, -1, 3, 4, 0]


def test_every_kind_of_text_file_gives_the_same_records(texts, text_data, tmp_path):
    path, labels = text_data
    with Cascade.load(texts) as cascade:
        got = read_records(record(cascade, path, tmp_path / "r"))
        expected = cascade.record(cascade.preprocess(TEXTS))
    for j in range(3):
        np.testing.assert_allclose(got.logits[j], expected.logits[j], atol=1e-4)
    assert (got.label == expected.label).all()
    assert (got.truth is None) if labels is None else (got.truth.tolist() == labels)
    assert got.flops[-1, 2] < got.flops[-1, 0] < expected.flops[-1, 0], "a row costs what it costs alone"


def test_the_command_answers_texts_in_their_order(texts, tmp_path, capsys):
    (tmp_path / "d.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    assert main(["predict", str(texts), str(tmp_path / "d.txt")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with Cascade.load(texts) as cascade:
        assert [line["label"] for line in lines] == cascade.predict(cascade.preprocess(TEXTS)).label.tolist()


def test_pictures_in_folders_or_by_path_are_recorded(pictures, tmp_path):
    random = np.random.default_rng(0)
    folder = tmp_path / "d"
    for name, sizes in {"cat": [(4, 6), (9, 9)], "owl": [(4, 6)]}.items():
        (folder / name).mkdir(parents=True)
        for k, size in enumerate(sizes):
            PIL.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(folder / name / f"{k}.png")
    paths = ["cat/0.png", "cat/1.png", "owl/0.png"]
    (tmp_path / "list.csv").write_text("path,labels\n" + "".join(f"d/{p},{p[:3]}\n" for p in paths))
    with Cascade.load(pictures) as cascade:
        expected = cascade.record(cascade.preprocess([folder / p for p in paths]))
        for data in (folder, tmp_path / "list.csv"):
            got = read_records(record(cascade, data, tmp_path / "r", overwrite=True))
            assert got.truth.tolist() == [0, 0, 2]
            np.testing.assert_array_equal(got.logits[1], expected.logits[1])
        (folder / "owl" / "0.png").write_bytes(b"no picture")
        with pytest.raises(InputError, match=r"d: row 2 \(.*0\.png\): can't be read"):
            record(cascade, folder, tmp_path / "r", overwrite=True)


def test_normalisation_is_the_specs(pictures):
    buffer = io.BytesIO()
    PIL.fromarray(np.full((4, 6, 3), 51, np.uint8)).save(buffer, "PNG")
    with Cascade.load(pictures) as cascade:
        made = cascade.preprocess([buffer.getvalue()])["x"]
    np.testing.assert_allclose(made, (0.2 - 0.5) / 0.25, rtol=1e-5)


def test_a_repacked_bundle_keeps_it(texts, tmp_path):
    repack(texts, tmp_path / "few", [1])
    with Cascade.load(tmp_path / "few") as few, Cascade.load(texts) as whole:
        assert (few.predict(few.preprocess(TEXTS)).label == whole.predict(whole.preprocess(TEXTS)).label).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "other.json"}, "preprocess.tokenizer 'other.json' is not in files"),
        ({"tokenizer": "../tokenizer.json"}, "is not in files"),
        ({"ids": "nothing"}, "the model also takes"),
        ({"mask": None}, r"the model also takes \['mask'\]"),
        ({"mask": "ids"}, "names an input twice"),
        ({"max_length": 0}, "preprocess.max_length is 0"),
        ({"pad_id": -1}, "pad_id -1"),
        ({"padding": "middle"}, "preprocess.padding"),
        ({"kind": "sound"}, "preprocess.kind"),
        ({"surprise": 1}, "surprise"),
        ({"sample": [3]}, r"preprocess.sample\[0\]"),
    ],
)
def test_a_manifest_whose_preprocessing_does_not_fit_is_refused(texts, tmp_path, change, message):
    with pytest.raises(BundleError, match=message):
        read_bundle(changed(texts, tmp_path / "b", change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "y"}, "preprocess.input is 'y'"),
        ({"height": 5}, r"preprocess makes \[batch, 3, 5, 6\]"),
        ({"layout": "NHWC"}, "preprocess makes"),
        ({"channels": "L", "layout": "NHW", "mean": [0.1], "std": [1]}, "preprocess makes"),
        ({"mean": [0.1]}, "preprocess.mean"),
        ({"std": [0.1, 0, 1]}, "preprocess.std has a zero"),
        ({"background": [0, 0, 256]}, "preprocess.background"),
        ({"resize": "crop", "shorter": 3}, "preprocess.shorter is 3, expected at least 6"),
        ({"width": 10**9}, "preprocess.width"),
        ({"sample": "none.png"}, "preprocess.sample 'none.png' is not in files"),
    ],
)
def test_a_manifest_whose_pictures_do_not_fit_is_refused(pictures, tmp_path, change, message):
    with pytest.raises(BundleError, match=message):
        read_bundle(changed(pictures, tmp_path / "b", change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sound"}, "preprocess"),
        ({"tokenizer": "/nowhere.json"}, "preprocess.tokenizer is '/nowhere.json', expected the path of a file"),
        ({"max_length": "long"}, "preprocess.max_length is 'long', expected int"),
        ({"ids": "nothing"}, "preprocess"),
        ({"sample": ["is " * 70], "max_length": 100}, "its sample can't be answered"),
    ],
)
def test_a_spec_that_does_not_fit_writes_no_bundle(tokenizer, tmp_path, change, message):
    torch.manual_seed(0)
    ids = torch.randint(1, 10, (3, 6))
    spec = {"kind": "text", "tokenizer": str(tokenizer), "ids": "ids", "mask": "mask", "max_length": 8} | change
    example = {"ids": ids, "mask": torch.ones_like(ids)}
    with pytest.raises(ExportError, match=message):
        export_bundle(Masked().eval(), example, tmp_path / "b", dynamic_axes=SEQUENCE, preprocess=spec)
    assert not list(tmp_path.iterdir())


def test_a_bundle_without_it_says_so(digits, tmp_path):
    (tmp_path / "d.txt").write_text("a")
    with Cascade.load(digits) as cascade:
        assert cascade.manifest.preprocess is None
        with pytest.raises(InputError, match="takes arrays only; export it with preprocess"):
            cascade.preprocess(["a"])
        with pytest.raises(InputError, match="texts and pictures need a bundle that was exported with preprocess"):
            record(cascade, tmp_path / "d.txt", tmp_path / "r")


def test_the_command_line_takes_a_spec_whose_paths_start_where_it_lies(tokenizer, tmp_path, capsys):
    (tmp_path / "spec").mkdir()
    shutil.copy(tokenizer, tmp_path / "spec" / "tok.json")
    spec = {"kind": "text", "tokenizer": "tok.json", "ids": "ids", "mask": "mask", "max_length": 8, "sample": ["my"]}
    (tmp_path / "spec" / "pre.json").write_text(json.dumps(spec))
    (tmp_path / "model.py").write_text(
        "import torch\nfrom toys import Masked\n"
        "def build():\n    return Masked().eval()\n"
        "def example():\n    return {name: torch.ones((3, 6), dtype=torch.long) for name in ('ids', 'mask')}\n"
        "def axes():\n    return {'ids': {0: 'batch', 1: 'seq'}, 'mask': {0: 'batch', 1: 'seq'}}\n"
    )
    model = tmp_path / "model.py"
    options = ["--example", f"{model}:example", "--dynamic", f"{model}:axes", "--out", str(tmp_path / "b")]
    command = ["export", f"{model}:build", *options, "--preprocess", str(tmp_path / "spec" / "pre.json")]
    assert main(command) == 0, capsys.readouterr().err
    with Cascade.load(tmp_path / "b") as cascade:
        assert len(cascade.predict(cascade.preprocess(TEXTS))) == len(TEXTS)


@pytest.mark.parametrize(("kind", "library"), [("pictures", "PIL"), ("texts", "tokenizers")])
def test_after_warming_up_the_first_raw_row_imports_nothing(kind, library, request):
    """A first picture took 49 ms, most of them an import."""
    bundle = request.getfixturevalue(kind)
    code = (
        "import sys\nfrom offramp.runtime import Cascade\n"
        f"cascade = Cascade.load({str(bundle)!r})\n"
        f"before = {library!r} in sys.modules\n"
        "cascade.warm_up()\n"
        f"print(before, {library!r} in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "True"]


def test_other_operating_points_share_the_preprocessor(texts):
    with Cascade.load(texts) as cascade:
        other = cascade.at(cascade.operating_point)
        before = cascade.preprocess(["what is my balance"])["ids"]
        tokenizer = texts / cascade.manifest.preprocess.tokenizer
        kept = tokenizer.read_bytes()
        tokenizer.unlink()
        try:
            assert other.preprocess(["what is my balance"])["ids"].tolist() == before.tolist()
        finally:
            tokenizer.write_bytes(kept)
