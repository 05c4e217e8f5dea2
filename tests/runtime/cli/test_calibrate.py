"""`offramp calibrate`: files that can't be read are one line."""

import json

import numpy as np
import pytest
from made_records import made_up
from offramp.runtime.cli import main
from offramp.runtime.records import SCHEMA, Index, RecordsWriter


@pytest.fixture
def records(tmp_path):
    made, folder = made_up(rows=200, exits=2), tmp_path / "r"
    folder.mkdir()
    writer = RecordsWriter(folder, Index(schema=SCHEMA, manifest="", exits=2, rows=200, classes=5, labelled=True))
    writer.append(made)
    writer.close()
    return folder


def damaged(path, kind):
    np.savez(path, sex=np.arange(200) % 2)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"sex,age", "cut short": whole[: len(whole) // 2]}[kind])
    return path


@pytest.mark.parametrize("kind", ["empty", "text", "cut short"])
def test_a_subgroup_file_that_cannot_be_read_is_one_line(capsys, tmp_path, records, kind):
    group = damaged(tmp_path / "g.npz", kind)
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(main(["calibrate", str(records), "--out", str(tmp_path / "o"), "--subgroup", f"{group}:sex"]))
    assert f"--subgroup: {group} can't be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--abstain-risk", "0.1%"], 3, "--abstain-risk isn't promised at full"),
        (["--abstain-risk", "0.1%", "--abstain-all-if-infeasible"], 0, "every answer is flagged as an abstention"),
        (["--abstain-risk", "none"], 0, ""),
    ],
)
def test_a_risk_that_was_asked_for_and_cannot_be_promised_is_exit_code_3(
    capsys, tmp_path, records, options, code, said
):
    assert main(["calibrate", str(records), "--out", str(tmp_path / "o"), "--calibrator", "none", *options]) == code
    assert said in capsys.readouterr().err


def test_the_default_risk_only_warns(capsys, tmp_path, records):
    assert main(["calibrate", str(records), "--out", str(tmp_path / "o"), "--calibrator", "none"]) == 0
    assert "nothing is promised and no row abstains" in capsys.readouterr().err


def test_points_that_lost_more_on_the_test_rows_than_was_asked_are_noted_and_no_others(capsys, tmp_path, records):
    asked = [f"{k}%" for k in range(5, 40, 3)]
    flags = [text for drop in asked for text in ("--max-drop", drop)]
    out = tmp_path / "o"
    assert main(["calibrate", str(records), "--out", str(out), "--calibrator", "none", "--no-times", *flags]) == 0
    noted = {line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines() if "decided nothing" in line}
    assert noted == beyond(out, asked)
    assert noted
    assert len(noted) < len(asked)


def beyond(folder, asked):
    """The points of a calibration whose drop on the test rows is above what was asked."""
    points = json.loads((folder / "calibration.json").read_text())["operating_points"]
    share = {f"max-drop-{drop}": float(drop.removesuffix("%")) / 100 for drop in asked}
    return {name for name, most in share.items() if points[name]["expected"]["drop"] > most}
