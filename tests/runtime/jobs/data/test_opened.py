"""Records are opened once, whoever works on them after that."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_records import routed, saved
from offramp.runtime import Cascade, InputError, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.cli import main
from offramp.runtime.jobs.data.opened import open_records
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.records import INDEX, read_index, read_records


@pytest.fixture
def opens(monkeypatch):
    """How often each file is opened, by name: JSON by Path.read_bytes, arrays by np.load."""
    counted = Counter()
    read_bytes, load = Path.read_bytes, np.load

    def counting_read(path):
        counted[path.name] += 1
        return read_bytes(path)

    def counting_load(file, *arguments, **options):
        counted[Path(file).name] += isinstance(file, str | Path)
        return load(file, *arguments, **options)

    monkeypatch.setattr(Path, "read_bytes", counting_read)
    monkeypatch.setattr(np, "load", counting_load)
    return counted


@pytest.mark.parametrize("routing", [True, False])
@pytest.mark.parametrize("options", [["--budget", "b=0.9"], ["--max-ms", "quick=1000"], ["--no-times"]])
def test_calibrate_opens_the_index_once_and_each_array_at_most_once(tmp_path, opens, capsys, routing, options):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    digest = read_bundle(bundle).manifest.digest
    folder = saved(routed(200, classes=10, routing=routing), tmp_path / "r", digest)
    opens.clear()
    assert main(["calibrate", str(bundle), str(folder), "--force", *options]) == 0
    assert ("audit of the routing" in capsys.readouterr().err) is routing
    assert opens[INDEX] == 1
    arrays = {path.name: opens[path.name] for path in folder.glob("*.npy")}
    assert set(arrays.values()) <= {1}, arrays


def test_what_a_cascade_records_is_what_its_folder_holds(tmp_path):
    x, y = sample.heldout()
    np.savez(tmp_path / "d.npz", x=x[:60], labels=y[:60])
    with Cascade.load(sample.BUNDLE) as cascade:
        read = read_records(record(cascade, tmp_path / "d.npz", tmp_path / "r"))
        assert read.routing_seen == cascade.record({"x": x[:60]}).routing_seen
    assert (read.truth == y[:60]).all()


def test_a_folder_says_what_it_is_and_opened_records_are_taken_as_they_are(tmp_path):
    folder = saved(routed(40, classes=10), tmp_path / "r", "0" * 64)
    opened = open_records(folder)
    assert (opened.folder, opened.manifest) == (folder, read_index(folder).manifest)
    assert opened.records.routing_seen == ((), (0,), (0, 1))
    assert open_records(opened).records is opened.records
    with pytest.raises(InputError, match=r"r: recorded from another bundle than this one"):
        open_records(opened, read_bundle(sample.BUNDLE).manifest)
    with pytest.raises(InputError, match="records have 3 classes, the bundle has 10"):
        open_records(routed(40), read_bundle(sample.BUNDLE).manifest)
