"""An operating point runs the fewest graphs its exits need, and answers as the blocks in series do."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import BundleError, Cascade, OperatingPoint, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.execution.stages import plan
from offramp.runtime.files import seal
from toys import Everything, Masked, make


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    ids = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    axes = {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}
    inputs = {"ids": ids, "mask": torch.ones_like(ids)}
    return export_bundle(make(Masked, 16, 2, 50, 5, 5), inputs, tmp_path_factory.mktemp("m") / "b", dynamic_axes=axes)


def spans(bundle, exits):
    return [stage.blocks for stage in plan(read_bundle(bundle).manifest, exits)]


def test_full_is_one_graph_and_every_exit_open_is_one_graph_a_block(masked):
    assert spans(masked, []) == [(0, 4)]
    assert spans(masked, [4]) == [(0, 4)]
    assert spans(masked, range(5)) == [(k, k) for k in range(5)]
    assert spans(masked, [1, 2]) == [(0, 1), (2, 2), (3, 4)]


def test_without_a_segment_the_fewest_of_those_there_are_serve(masked, tmp_path):
    bundle = shutil.copytree(masked, tmp_path / "b")
    document = json.loads((bundle / "manifest.json").read_text())
    document["segments"] = [s for s in document["segments"] if (s["first"], s["last"]) in {(0, 1), (2, 4), (1, 2)}]
    document.pop("digest")
    (bundle / "manifest.json").write_bytes(seal(document))
    assert spans(bundle, []) == [(0, 1), (2, 4)]
    assert spans(bundle, [3]) in ([(0, 0), (1, 2), (3, 3), (4, 4)], [(0, 1), (2, 2), (3, 3), (4, 4)])
    document["segments"] = []
    (bundle / "manifest.json").write_bytes(seal(document))
    assert spans(bundle, []) == [(k, k) for k in range(5)]
    with Cascade.load(bundle) as chain, Cascade.load(masked) as whole:
        x = {"ids": np.ones((4, 6), np.int64), "mask": np.ones((4, 6), np.int64)}
        np.testing.assert_allclose(chain.predict(x).score, whole.predict(x).score, atol=1e-4)


def test_heads_of_exits_that_are_off_are_not_in_the_graph(masked):
    manifest = read_bundle(masked).manifest
    whole = next(s for s in manifest.segments if (s.first, s.last) == (0, 4))
    assert not [name for name in whole.outputs if name.startswith("logits") and name != manifest.exits[4].logits]
    # Four heads of 16 x 5 + 5 fewer; the mask's constants, which every block repeats, are there once.
    heads, shared = 4 * (16 * 5 + 5), sum(b.params for b in manifest.blocks) - whole.params
    assert heads <= shared <= heads + 4 * 4


@pytest.mark.parametrize("off", list(itertools.product([False, True], repeat=4)))
def test_any_set_of_exits_answers_as_the_oracle_says(masked, off):
    rng = np.random.default_rng(0)
    ids, lengths = rng.integers(1, 50, (24, 9)), rng.integers(2, 10, (24, 1))
    x = {"ids": ids, "mask": (np.arange(9) < lengths).astype(np.int64)}
    with Cascade.load(masked, threads=1) as cascade:
        records = cascade.record(x)
        bars = [math.inf if off[j] else float(np.quantile(records.score[j], 0.6)) for j in range(4)]
        point = OperatingPoint((*bars, -math.inf), abstain_below=1.0)
        at = cascade.at(point)
        answer = at.predict(x)
    assert len(at.route.stages) == 1 + off.count(False)
    for i in range(24):
        if any(abs(records.score[j, i] - bars[j]) < 1e-3 for j in range(4)):
            continue
        j = next(j for j in range(5) if j == 4 or records.score[j, i] >= bars[j])
        assert (answer.exit[i], answer.label[i]) == (j, records.label[j, i])
        assert answer.score[i] == pytest.approx(records.score[j, i], abs=1e-3)
        assert answer.flops[i] == records.flops[j, i]


def test_one_graph_still_gives_every_layers_routing(tmp_path):
    bundle = export_bundle(make(Everything), torch.randn(4, 8), tmp_path / "b")
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    with Cascade.load(bundle, threads=1) as cascade:
        assert len(cascade.route.stages) == 1
        routing = cascade.predict({"x": x}, fetch=("routing",)).routing
        np.testing.assert_allclose(routing, cascade.record({"x": x}).routing, atol=1e-6)


def test_only_the_graphs_that_are_needed_are_opened():
    with Cascade.load(sample.BUNDLE) as cascade:
        assert cascade.executor.opened == {"segment_0_2.onnx"}
        cascade.at("balanced").predict({"x": sample.heldout()[0][:2]})
        assert cascade.executor.opened == {"segment_0_2.onnx", "cascade.onnx"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(first=3, last=1), "spans 3..1"),
        (lambda s: s.update(last=9), "spans 0..9"),
        (lambda s: s.update(exit=0), "exit is not that of its last block"),
        (lambda s: s["inputs"].append("ghost"), "names 'ghost'"),
        (lambda s: s["outputs"].clear(), "outputs lacks"),
        (lambda s: s.update(file="ghost.onnx"), "'ghost.onnx' is not in files"),
    ],
)
def test_a_segment_that_makes_no_sense_is_refused(masked, tmp_path, change, message):
    bundle = shutil.copytree(masked, tmp_path / "b")
    document = json.loads((bundle / "manifest.json").read_text())
    change(document["segments"][0])
    document.pop("digest")
    (bundle / "manifest.json").write_bytes(seal(document))
    with pytest.raises(BundleError, match=message):
        Cascade.load(bundle)
