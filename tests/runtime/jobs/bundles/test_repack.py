"""A repacked bundle answers as the old one with those exits switched off, and --auto never picks a slower set."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade, InputError, OperatingPoint, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.cli import main
from offramp.runtime.jobs.bundles.repack import choose_exits, repack
from offramp.runtime.jobs.bundles.timing import Timings, sizes_costing, time_cascade_graph, time_graphs, time_parts
from offramp.runtime.jobs.recording.record import record
from offramp.runtime.records import read_records
from toys import Masked, make


@pytest.fixture(scope="module")
def images():
    return sample.heldout()[0]


@pytest.fixture(scope="module")
def records_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    x, y = sample.heldout()
    np.savez(folder / "d.npz", x=x, labels=y)
    with Cascade.load(sample.BUNDLE) as cascade:
        return record(cascade, folder / "d.npz", folder / "r")


@pytest.mark.parametrize("kept", [[0], [1], [0, 1], []])
def test_the_same_answers_as_with_those_exits_switched_off(tmp_path, images, kept):
    repack(sample.BUNDLE, tmp_path / "b", kept)
    with Cascade.load(sample.BUNDLE) as old, Cascade.load(tmp_path / "b") as new:
        assert len(new.manifest.exits) == len(kept) + 1
        for name, point in old.calibration.points.items():
            bars = tuple(t if j in kept else math.inf for j, t in enumerate(point.thresholds[:-1]))
            want = old.at(replace(point, thresholds=(*bars, -math.inf), expected={})).predict({"x": images})
            got = new.at(name).predict({"x": images})
            assert (np.array([*kept, 2])[got.exit] == want.exit).all()
            assert (got.label == want.label).all()
            assert (got.abstain == want.abstain).all()
            assert (got.flops <= want.flops).all()


def test_it_is_a_bundle_of_its_own_that_can_be_repacked_again(tmp_path):
    repack(sample.BUNDLE, tmp_path / "a", [1])
    repack(tmp_path / "a", tmp_path / "b", [])
    manifest = read_bundle(tmp_path / "b").manifest
    assert [b.file for b in manifest.blocks] == ["segment_0_2.onnx"]
    assert set(manifest.files) == {"segment_0_2.onnx", "weights.bin"}
    assert manifest.tensors == {}
    calibration = json.loads((tmp_path / "b" / "calibration.json").read_text())
    assert calibration["operating_points"]["fast"]["thresholds"] == ["-inf"]


def test_expected_figures_are_measured_again_or_left_out(tmp_path, records_folder):
    repack(sample.BUNDLE, tmp_path / "without", [0])
    repack(sample.BUNDLE, tmp_path / "with", [0], records=read_records(records_folder))
    for name, there in (("without", False), ("with", True)):
        points = json.loads((tmp_path / name / "calibration.json").read_text())["operating_points"]
        assert bool(points["balanced"]["expected"]) is there
        assert points["balanced"]["provenance"]["exits_kept"] == [0, 2]


def test_promises_go_with_the_exits_they_were_made_with(tmp_path, capsys):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    assert main(["repack", str(bundle), "--exits", "1", "--out", str(tmp_path / "c")]) == 0
    said = capsys.readouterr()
    assert "kept the exits 1, 2 of 3" in said.out
    assert "balanced, fast: left at exits that are gone" in said.err
    points = json.loads((tmp_path / "c" / "calibration.json").read_text())["operating_points"]
    assert set(points["fast"]["provenance"]) == {"method", "seed", "repacked_from", "exits_kept"}
    assert "abstention" in points["full"]["provenance"], "the whole network is what it was"


@pytest.mark.parametrize("exits", [[3], [-1]])
def test_an_exit_that_is_not_there_is_refused(tmp_path, exits):
    with pytest.raises(InputError, match="this bundle's are 0 to 2"):
        repack(sample.BUNDLE, tmp_path / "b", exits)
    assert list(tmp_path.iterdir()) == []


def made_up_times(manifest, head: float) -> Timings:
    """A machine on which a block takes as long as its FLOPs say, and every exit costs `head` of the whole."""
    whole = 16_000_000
    flops = {g.file: int(g.flops.split("(")[1].rstrip(")")) / whole for g in [*manifest.blocks, *manifest.segments]}
    return Timings((1, 32), {file: (value + head, 32 * (value + head)) for file, value in flops.items()})


def test_exits_that_cost_more_than_they_save_go(records_folder):
    manifest, records = read_bundle(sample.BUNDLE).manifest, read_records(records_folder)
    point = {"half": OperatingPoint((5.0, 4.0, -math.inf))}
    cheap = choose_exits(manifest, point, records, made_up_times(manifest, 0.0))
    assert cheap[0].exits == (0, 1, 2), "free exits all stay"
    dear = choose_exits(manifest, point, records, made_up_times(manifest, 0.4))
    assert len(dear[0].exits) < 3
    assert dear[0].mean < 1
    ruinous = choose_exits(manifest, point, records, made_up_times(manifest, 5.0))
    assert ruinous[0].exits == (2,), "where every exit costs more than the network, none stays"
    for choices in (cheap, dear, ruinous):
        assert max(choices[0].time.values()) <= 1, "no operating point gets slower"


@pytest.mark.parametrize("measure", [time_graphs, time_cascade_graph])
def test_times_are_measured_for_every_graph(measure):
    with Cascade.load(sample.BUNDLE, threads=1) as cascade:
        graphs = [*cascade.manifest.blocks, *cascade.manifest.segments]
        given = (graphs,) if measure is time_graphs else ()
        timings = measure(cascade, *given, {}, rows=(1, 4), rounds=5, seconds=1)
    assert set(timings.seconds) == {g.file for g in graphs}
    assert all(len(s) == 2 and min(s) > 0 for s in timings.seconds.values())
    file = graphs[0].file
    assert timings.at(file, 1) == timings.seconds[file][0]
    assert timings.at(file, 0.5) == pytest.approx(timings.seconds[file][0] / 2)


def test_inside_one_graph_the_parts_add_up():
    with Cascade.load(sample.BUNDLE, threads=1) as cascade:
        found = time_parts(cascade, {}, seconds=2).seconds
        assert cascade.manifest.cascade is not None
    assert found["segment_0_2.onnx"][0] <= sum(found[f"block_{k}.onnx"][0] for k in range(3)), "heads cost something"


def test_a_repacked_bundle_still_runs_as_one_graph(tmp_path):
    images, _ = sample.heldout()
    repack(sample.BUNDLE, tmp_path / "b", [1])
    with Cascade.load(tmp_path / "b", threads=1) as fewer, Cascade.load(sample.BUNDLE, threads=1) as every:
        assert fewer.manifest.cascade.exits == [1, 2]
        one = fewer.at(OperatingPoint((4.0, -math.inf))).predict({"x": images})
        two = every.at(OperatingPoint((math.inf, 4.0, -math.inf))).predict({"x": images})
        assert fewer.executor.opened == {"segment_0_2.onnx", "cascade.onnx"}
        assert fewer.executor.gives_every_exit
    np.testing.assert_array_equal(one.label, two.label)
    np.testing.assert_array_equal(one.score, two.score)
    np.testing.assert_array_equal(one.exit + 1, two.exit)
    assert 0 < (one.exit == 0).mean() < 1


def test_the_command_repacks_by_hand_and_by_measurement(tmp_path, records_folder, capsys):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    assert main(["repack", str(bundle), "--exits", "1", "--out", str(tmp_path / "c")]) == 0
    assert "kept the exits 1, 2 of 3" in capsys.readouterr().out
    assert main(["repack", str(bundle), "--exits", "2,0,0", "--out", str(tmp_path / "f")]) == 0
    assert "kept the exits 0, 2 of 3" in capsys.readouterr().out
    assert main(["repack", str(bundle), "--auto", "--records", str(records_folder), "--out", str(tmp_path / "d")]) == 0
    assert "expected time against all exits" in capsys.readouterr().out
    assert main(["repack", str(bundle), "--auto", "--out", str(tmp_path / "e")]) == 2
    assert main(["repack", str(bundle), "--exits", "1", "--out", str(bundle), "--overwrite"]) == 2
    assert read_bundle(bundle).manifest.exits[2].block == 2


def test_times_are_taken_at_the_size_of_the_rows(tmp_path):
    tokens = {"ids": torch.ones(3, 6, dtype=torch.int64), "mask": torch.ones(3, 6, dtype=torch.int64)}
    axes = {name: {0: "batch", 1: "seq"} for name in tokens}
    bundle = export_bundle(make(Masked), tokens, tmp_path / "b", dynamic_axes=axes)
    with Cascade.load(bundle, threads=1) as cascade:
        for size in (1, 5, 23, 60):
            (axis,) = cascade.manifest.axes[1:]
            found = sizes_costing(cascade, float(cascade.row_flops({axis: size})[-1]))
            assert found == {axis: size}
