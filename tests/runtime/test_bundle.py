"""A damaged, edited, foreign or hostile bundle gives one clear error, and nothing of it is run."""

import gc
import hashlib
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import BundleError, Cascade, InputError, OperatingPoint, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.calibration_file import read_calibration
from offramp.runtime.files import seal


@pytest.fixture
def copy(digits, tmp_path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "bundle"))


@pytest.fixture
def nothing_runs(monkeypatch):
    """Opening any session fails the test: refusals must come before."""

    def refuse(*args, **kwargs):
        raise AssertionError("a session was opened")

    monkeypatch.setattr("offramp.runtime.execution.cpu.session.open_session", refuse)


def edit(bundle: Path, change, name: str = "manifest.json") -> None:
    """Change a document and seal it again, as an attacker or a careful editor would."""
    document = json.loads((bundle / name).read_text())
    change(document)
    document.pop("digest")
    (bundle / name).write_bytes(seal(document))


def refusal(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Cascade.load(bundle, operating_point="balanced")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_whole_bundle_loads(copy):
    with Cascade.load(copy, operating_point="balanced") as cascade:
        assert cascade.operating_point.name == "balanced"


def test_one_flipped_byte_of_any_file_is_refused_by_the_files_name(copy, nothing_runs):
    for file in sorted(copy.iterdir()):
        whole = file.read_bytes()
        for at in {0, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1}:
            for flip in (0x01, 0x20):
                damaged = bytearray(whole)
                damaged[at] ^= flip
                file.write_bytes(damaged)
                assert file.name in refusal(copy), (file.name, at)
        file.write_bytes(whole)


def test_every_byte_of_the_manifest_counts(copy, nothing_runs):
    path = copy / "manifest.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 0x04
        path.write_bytes(damaged)
        refusal(copy)


@pytest.mark.parametrize("name", ["block_1.onnx", "weights.bin", "manifest.json"])
def test_a_missing_file_is_named(copy, name, nothing_runs):
    (copy / name).unlink()
    assert name in refusal(copy)


def test_a_truncated_file_is_named_with_its_size(copy, nothing_runs):
    path = copy / "weights.bin"
    path.write_bytes(path.read_bytes()[:-5])
    assert "weights.bin" in refusal(copy)
    assert "bytes" in refusal(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"].update({"../evil": m["files"]["weights.bin"]}), "'../evil', which leaves"),
        (lambda m: m["blocks"][0].update(file="../block_0.onnx"), "'../block_0.onnx', which leaves"),
        (lambda m: m["blocks"][0].update(file="/etc/passwd"), "leaves the bundle"),
        (lambda m: m["blocks"][1].update(file="other.onnx"), r"blocks\[1\].file 'other.onnx' is not in files"),
        (lambda m: m["blocks"][1]["inputs"].append("ghost"), r"blocks\[1\].inputs names 'ghost', which no earlier"),
        (lambda m: m["blocks"][0].update(flops="batch*ghost"), r"blocks\[0\].flops names the axes \['ghost'\]"),
        (lambda m: m["blocks"][0].update(flops="__import__('os')"), r"blocks\[0\].flops: cost expression"),
        (lambda m: m["exits"][0].update(score="ghost"), r"exits\[0\] names 'ghost'"),
        (lambda m: m["exits"].reverse(), r"blocks\[0\].exit and exits\[0\].block disagree"),
        (lambda m: m["exits"].pop(), r"blocks\[2\].exit is 2, but exits has 2"),
        (lambda m: m["exits"].pop(0), r"blocks\[0\].exit and exits\[0\].block disagree"),
        (lambda m: m["blocks"][1].update(exit=-1), r"blocks\[1\].exit is -1, but exits has 3"),
        (lambda m: m["blocks"][1].update(exit=None), "exit is not that of its last block"),
        (lambda m: m["inputs"][0].update(dtype="object"), r"inputs\[0\] \('x'\).dtype 'object'"),
        (lambda m: m["inputs"][0].update(shape=["n", 8, 8]), r"inputs\[0\] \('x'\).shape has no single"),
        (lambda m: next(iter(m["tensors"].values())).update(batch_axis=1), "batch_axis doesn't point"),
        (lambda m: m["inputs"][0].update(shape=["batch", 2**40, 8]), r"inputs\['x'\].shape .* numbers a row, exp"),
        (lambda m: next(iter(m["tensors"].values()))["shape"].append(2**70), r"tensors\[.*\].shape .* numbers a row"),
        (lambda m: m.update(classes="ten"), "classes"),
        (lambda m: m.pop("blocks"), "blocks"),
        (lambda m: m.update(blocks=[]), "blocks is empty"),
        (lambda m: m["files"]["weights.bin"].update(sha256="zz"), "sha256 is not 64 hex"),
    ],
)
def test_a_manifest_that_makes_no_sense_names_the_field(copy, change, message, nothing_runs):
    edit(copy, change)
    with pytest.raises(BundleError, match=message):
        Cascade.load(copy)


def hard_links(bundle, root):
    return shutil.copytree(bundle, root / "linked", copy_function=os.link)


def links_to_files(bundle, root):
    """As a Kubernetes volume has them: data elsewhere, a link for each file."""
    (root / "linked").mkdir()
    for file in bundle.iterdir():
        (root / "linked" / file.name).symlink_to(file)
    return root / "linked"


def link_to_the_folder(bundle, root):
    (root / "linked").symlink_to(bundle, target_is_directory=True)
    return root / "linked"


def snapshot_of_blobs(bundle, root):
    """As a model cache has them: content under its digest, relative links to it, two steps away."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "1f"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in bundle.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blobs / digest)
        (snapshot / file.name).symlink_to(Path("../../blobs") / digest)
    (root / "linked").symlink_to(snapshot, target_is_directory=True)
    return root / "linked"


LAYOUTS = [hard_links, links_to_files, link_to_the_folder, snapshot_of_blobs]


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bundle_answers_at_every_point_however_its_files_are_linked(copy, tmp_path, layout, device):
    images = sample.heldout()[0]
    linked = layout(copy, tmp_path)
    with Cascade.load(sample.BUNDLE) as plain, Cascade.load(linked, device=device) as cascade:
        for name in plain.calibration.points:
            assert (cascade.at(name).predict({"x": images}).label == plain.at(name).predict({"x": images}).label).all()


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json", "calibration.json"])
def test_a_link_to_other_content_is_refused(copy, tmp_path, name, nothing_runs):
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "outside").write_bytes(content)
    (copy / name).unlink()
    (copy / name).symlink_to(tmp_path / "outside")
    assert name in refusal(copy)


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json", "calibration.json"])
def test_a_link_in_a_circle_is_named(copy, name, nothing_runs):
    (copy / name).unlink()
    (copy / name).symlink_to(name)
    assert name in refusal(copy)


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("harm", ["truncated", "overwritten", "gone"])
def test_nothing_that_happens_to_the_files_after_load_changes_an_answer(copy, harm, device):
    images = sample.heldout()[0]
    with Cascade.load(sample.BUNDLE, device=device) as plain, Cascade.load(copy, device=device) as cascade:
        for file in list(copy.iterdir()):
            if harm == "gone":
                file.unlink()
                continue
            with file.open("r+b") as stream:
                stream.truncate(0) if harm == "truncated" else stream.write(b"\x7f" * file.stat().st_size)
        for name in plain.calibration.points:
            assert (cascade.at(name).predict({"x": images}).score == plain.at(name).predict({"x": images}).score).all()


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("how", ["moved in place", "written over"])
def test_another_bundle_put_in_its_place_answers_only_those_who_load_it(copy, tmp_path, how, device):
    """Same names and shapes, other weights: what is opened late would fit, and be silently wrong."""
    images = sample.heldout()[0]
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    weights = bytearray((other / "weights.bin").read_bytes())
    numbers = np.frombuffer(weights, np.float32, offset=len(weights) % 4)
    numbers *= np.float32(0.5)
    (other / "weights.bin").write_bytes(weights)
    digest = hashlib.sha256(weights).hexdigest()
    edit(other, lambda d: d["files"]["weights.bin"].update(sha256=digest))
    (other / "calibration.json").unlink()
    with Cascade.load(sample.BUNDLE, device=device) as plain, Cascade.load(copy, device=device) as cascade:
        if how == "moved in place":
            copy.rename(tmp_path / "old")
            other.rename(copy)
        else:
            for file in other.iterdir():
                if file.is_file():
                    (copy / file.name).write_bytes(file.read_bytes())
            (copy / "calibration.json").unlink()
        with Cascade.load(copy, device=device) as replaced:
            assert (replaced.predict({"x": images}).score != plain.predict({"x": images}).score).any()
        for name in plain.calibration.points:
            assert (cascade.at(name).predict({"x": images}).score == plain.at(name).predict({"x": images}).score).all()


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("room", [True, False])
def test_a_relative_path_is_that_of_when_it_was_loaded(copy, tmp_path, monkeypatch, device, room):
    images = sample.heldout()[0]
    monkeypatch.chdir(copy.parent)
    with Cascade.load(sample.BUNDLE, device=device) as plain, warnings.catch_warnings():
        if not room:
            monkeypatch.setattr("offramp.runtime.bundle.private_places", lambda: iter([]))
        warnings.simplefilter("ignore")
        cascade = Cascade.load(copy.name, device=device)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        for name in (*plain.calibration.points, OperatingPoint((0.5, 1.5, -np.inf))):
            assert (cascade.at(name).predict({"x": images}).score == plain.at(name).predict({"x": images}).score).all()
        with pickle.loads(pickle.dumps(cascade)) as again:
            assert again.manifest.digest == cascade.manifest.digest
        cascade.close()


def test_the_copy_that_is_run_goes_with_the_last_one_who_holds_it(copy):
    cascade = Cascade.load(copy)
    sibling, folder = cascade.at("fast"), cascade.bundle.folder
    assert folder != copy
    del cascade
    gc.collect()
    assert (folder / "weights.bin").is_file()
    del sibling
    gc.collect()
    assert not folder.parent.exists()


def test_where_there_is_no_room_for_a_copy_it_is_said_and_the_files_themselves_are_run(copy, tmp_path, monkeypatch):
    monkeypatch.setattr("offramp.runtime.bundle.private_places", lambda: iter([tmp_path / "nowhere"]))
    with pytest.warns(UserWarning, match="no private copy could be made .*nowhere.*TMPDIR"):
        cascade = Cascade.load(copy, operating_point="fast")
    assert cascade.bundle.folder == copy
    assert len(cascade.predict({"x": sample.heldout()[0][:3]})) == 3
    cascade.close()


@pytest.mark.parametrize("name", ["manifest.json", "calibration.json"])
def test_another_schema_is_refused_by_name(copy, name, nothing_runs):
    edit(copy, lambda d: d.update(schema="offramp/99"), name)
    assert "'offramp/99'" in refusal(copy)


@pytest.mark.parametrize("name", ["manifest.json", "calibration.json"])
@pytest.mark.parametrize("depth", [900, 2_000, 100_000])
def test_a_document_that_is_nested_too_deeply_is_named(copy, name, depth, nothing_runs):
    schema = json.loads((copy / name).read_text())["schema"]
    (copy / name).write_text(json.dumps({"schema": schema})[:-1] + ', "provenance": ' + "[" * depth + "]" * depth + "}")
    assert name in refusal(copy)


def test_calibration_of_another_bundle_is_refused(copy, nothing_runs):
    edit(copy, lambda m: m.update(name="other"))
    assert "belongs to another bundle" in refusal(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p.pop("calibrators", None), p["thresholds"].insert(0, 1.0)), "4 thresholds for 3 exits"),
        (lambda p: p["thresholds"].__setitem__(0, "high"), "'high' is not a number"),
        (lambda p: p["thresholds"].__setitem__(2, 1.0), "last threshold is 1.0, expected -inf"),
        (lambda p: p.update(abstain_below=None), "abstain_below"),
        (lambda p: p.update(calibrators=[{"name": "magic"}] * 3), "magic"),
        (lambda p: p["expected"].update(exit_shares=5), "expected.exit_shares is 5, expected a list of numbers"),
        (lambda p: p["expected"].update(exit_shares=["a", 0, 1]), r"expected.exit_shares is \['a', 0, 1\]"),
        (lambda p: p["expected"].update(exit_shares="0.5"), "expected.exit_shares is '0.5'"),
        (lambda p: p["expected"].update(accuracy="high"), "expected.accuracy is 'high', expected a number"),
    ],
)
def test_an_operating_point_that_makes_no_sense_is_refused(copy, change, message, nothing_runs):
    edit(copy, lambda d: change(d["operating_points"]["balanced"]), "calibration.json")
    with pytest.raises(BundleError, match=message):
        Cascade.load(copy)


def test_without_a_calibration_only_full_is_there(copy):
    (copy / "calibration.json").unlink()
    bundle = read_bundle(copy)
    assert list(read_calibration(copy, bundle.manifest).points) == ["full"]
    with pytest.raises(InputError, match=r"operating_point is 'fast', this bundle has \['full'\]"):
        Cascade.load(copy, operating_point="fast")


@pytest.mark.parametrize("where", ["nowhere", "file"])
def test_what_is_no_bundle_at_all_is_said_so(tmp_path, where):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="no such folder"):
        Cascade.load(tmp_path / where)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
@pytest.mark.parametrize("name", ["manifest.json", "calibration.json", "weights.bin"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(copy, name, nothing_runs):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert name in refusal(copy)


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(BundleError, match="expected the path of a folder"):
        Cascade.load(path)
