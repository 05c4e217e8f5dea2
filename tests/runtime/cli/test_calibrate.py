"""`offramp calibrate`: files that can't be read are one line."""

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
