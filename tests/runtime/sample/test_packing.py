"""Packed weights come back bit for bit, and damaged ones are refused."""

import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import BundleError, InputError
from offramp.runtime.sample.packing import PACKED, WeightPacker, unpack


def made(folder, matrices, between, seed=0):
    """A folder with a weight file of such matrices, turned or not, and other bytes between; and who knows them."""
    rng, packer, parts = np.random.default_rng(seed), WeightPacker(), []
    for k, (rows, columns, turned) in enumerate(matrices):
        small = rng.integers(-127, 128, (rows, columns), np.int8)
        whole = packer.know(small, rng.random((rows, 1), np.float32))
        data = (whole.T.copy() if turned else whole).tobytes()
        parts += [rng.bytes(between[k % len(between)] if between else 0), data]
        parts.append(bytes(-sum(map(len, parts)) % 64))
        if between:  # what is written begins at a multiple of 64
            parts[-3] += bytes(-len(b"".join(parts[:-2])) % 64)
    (folder / "weights.bin").write_bytes(b"".join(parts))
    return packer


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.booleans()), min_size=1, max_size=4),
    st.lists(st.integers(0, 200), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_a_weight_file_comes_back_bit_for_bit(tmp_path_factory, matrices, between):
    folder = tmp_path_factory.mktemp("packing")
    source, packed = folder / "source", folder / "packed"
    source.mkdir()
    packed.mkdir()
    (packed / "manifest.json").write_text("{}")
    made(source, matrices, between).pack(source, packed)
    back = unpack(packed, folder / "back")
    assert (back / "weights.bin").read_bytes() == (source / "weights.bin").read_bytes()
    assert sorted(file.name for file in back.iterdir()) == ["manifest.json", "weights.bin"]


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_known_takes_a_quarter(tmp_path, turned):
    (tmp_path / "packed").mkdir()
    made(tmp_path, [(256, 512, turned)], []).pack(tmp_path, tmp_path / "packed")
    whole, packed = (file.stat().st_size for file in (tmp_path / "weights.bin", tmp_path / "packed" / PACKED))
    assert packed < 0.27 * whole


@pytest.mark.parametrize("there", ["folder", "bundle", "file", "dead link"])
def test_nothing_that_is_there_is_touched(tmp_path, there):
    (tmp_path / "packed").mkdir()
    made(tmp_path, [(8, 8, False)], []).pack(tmp_path, tmp_path / "packed")
    back = tmp_path / "back"
    if there == "file":
        back.write_text("mine")
    elif there == "dead link":
        back.symlink_to(tmp_path / "nowhere")
    else:
        back.mkdir()
        if there == "bundle":
            (back / "weights.bin").write_text("mine")
    with pytest.raises(InputError, match=r"back already exists, expected one that isn't there yet"):
        unpack(tmp_path / "packed", back)
    assert there != "bundle" or (back / "weights.bin").read_text() == "mine"


def test_what_cannot_be_written_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "packed").mkdir()
    made(tmp_path, [(8, 8, False)], []).pack(tmp_path, tmp_path / "packed")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"folder: .*back can't be written \(Not a directory\)"):
        unpack(tmp_path / "packed", tmp_path / "file" / "back")

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "packed" / "manifest.json").write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfile", full)
        with pytest.raises(InputError, match=r"folder: .*back can't be written \(No space left on device\)"):
            unpack(tmp_path / "packed", tmp_path / "back")
    assert unpack(tmp_path / "packed", tmp_path / "back").is_dir(), "it can be tried again"


@pytest.mark.parametrize("harm", [lambda b: b[:-30], lambda b: b"", lambda b: b"PK" + b[5:], None])
def test_a_damaged_file_is_named(tmp_path, harm):
    (tmp_path / "packed").mkdir()
    made(tmp_path, [(8, 8, False)], []).pack(tmp_path, tmp_path / "packed")
    file = tmp_path / "packed" / PACKED
    if harm is None:
        np.savez(file, other=np.zeros(1))
    else:
        file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(BundleError, match=r"weights\.npz: not packed weights"):
        unpack(tmp_path / "packed", tmp_path / "back")
    assert not (tmp_path / "back").exists()
