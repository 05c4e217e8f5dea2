"""Records are opened once, whoever works on them after that."""

import shutil
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_records import routed, saved
from offramp.export import export_bundle
from offramp.runtime import Cascade, InputError, Records, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.cli import main
from offramp.runtime.jobs.data.opened import open_records
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.records import INDEX, read_index, read_records
from toys import Everything, make


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


@pytest.fixture(scope="module")
def routes(tmp_path_factory):
    """A bundle whose second exit has seen two routing layers, its first one."""
    return export_bundle(make(Everything), {"x": torch.randn(7, 8)}, tmp_path_factory.mktemp("routes") / "b")


def test_what_a_cascade_records_is_what_its_folder_holds_routing_included(routes, tmp_path):
    x, y = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32), np.arange(60) % 4
    np.savez(tmp_path / "d.npz", x=x, labels=y)
    with Cascade.load(routes) as cascade:
        recorded = replace(cascade.record({"x": x}), truth=y)
        read = read_records(record(cascade, tmp_path / "d.npz", tmp_path / "r"))
    assert read.routing_seen == recorded.routing_seen == ((0,), (0, 1))
    for field in fields(Records):
        for one, other in zip(getattr(read, field.name), getattr(recorded, field.name), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_records_that_are_too_old_to_say_what_an_exit_has_seen_are_told_by_their_own_bundle(routes, tmp_path):
    x, manifest = np.zeros((20, 8), np.float32), read_bundle(routes).manifest
    with Cascade.load(routes) as cascade:
        old = replace(cascade.record({"x": x}), routing_seen=None)
    mine, anybodys = saved(old, tmp_path / "mine", manifest.digest), saved(old, tmp_path / "anybodys")
    assert open_records(mine).records.routing_seen is None
    for given in (mine, open_records(mine), old):
        assert open_records(given, manifest).records.routing_seen == ((0,), (0, 1))
    assert open_records(anybodys, manifest).records.routing_seen is None


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
