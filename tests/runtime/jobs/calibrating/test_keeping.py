"""What was there before a calibration: a bundle's own isn't replaced by a stranger's, and no bytes are lost."""

import shutil

import pytest
from made_records import made_up
from offramp.runtime import BundleError, InputError, sample
from offramp.runtime.cli import main
from offramp.runtime.jobs import calibrate
from offramp.runtime.jobs.calibrating.history import History


@pytest.fixture
def rows():
    return made_up(rows=200, exits=3)


def in_force(folder):
    return (folder / "calibration.json").read_bytes()


@pytest.mark.parametrize("has_calibration", [True, False])
def test_a_calibration_of_no_bundle_does_not_go_into_a_bundle(tmp_path, rows, has_calibration):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    if not has_calibration:
        (bundle / "calibration.json").unlink()
    before = sorted(bundle.rglob("*")), has_calibration and in_force(bundle)
    with pytest.raises(InputError, match=r"--out.*is a bundle"):
        calibrate(None, rows, out=bundle)
    assert (sorted(bundle.rglob("*")), has_calibration and in_force(bundle)) == before


def test_out_beside_a_bundle_is_refused_before_anything_is_measured(capsys, tmp_path, rows):
    with pytest.raises(InputError, match=r"--out.*calibrations of no bundle"):
        calibrate(sample.BUNDLE, rows, out=tmp_path / "o")
    assert main(["calibrate", str(sample.BUNDLE), "--logits", "a.npy", "--labels", "b.npy", "--out", "o"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "unreadable",
    [b'{"schema": "offramp-calibration/9"}', b"", b"not JSON", b'{"schema": "offramp-calibration/1", "version": 7}'],
)
def test_a_calibration_that_cannot_be_read_is_kept_byte_for_byte_and_it_is_said(tmp_path, rows, unreadable):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "calibration.json").write_bytes(unreadable)
    found = calibrate(None, rows, out=tmp_path / "o", calibrators="none", report=False)
    kept = [file for file in (tmp_path / "o" / "history").iterdir() if file.name.startswith("unreadable")]
    assert [file.read_bytes() for file in kept] == [unreadable]
    assert any(str(kept[0]) in note for note in found.notes)
    assert History(tmp_path / "o").current().version == 1


def test_a_damaged_one_is_kept_when_a_version_is_put_back(tmp_path, rows):
    out = tmp_path / "o"
    calibrate(None, rows, out=out, calibrators="none", report=False)
    damaged = in_force(out)[:-40]
    (out / "calibration.json").write_bytes(damaged)
    home = History(out)
    with home.locked():
        home.put_back("1", "promote")
    assert home.current().version == 1
    assert [file.read_bytes() for file in (out / "history").glob("unreadable-*")] == [damaged]


def test_what_cannot_even_be_copied_is_not_replaced(tmp_path, rows):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "calibration.json").symlink_to("elsewhere")
    with pytest.raises(BundleError, match=r"calibration\.json"):
        calibrate(None, rows, out=tmp_path / "o", calibrators="none", report=False)
    assert (tmp_path / "o" / "calibration.json").is_symlink()
