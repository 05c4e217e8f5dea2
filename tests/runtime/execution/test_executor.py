"""Both executors keep the whole protocol, and rows of several requests can meet in front of a block."""

import gc
import math
import weakref

import numpy as np
import pytest
from offramp.runtime import Cascade, CascadeClosed, InputError, OperatingPoint, sample
from offramp.runtime.cli import main
from offramp.runtime.execution.cpu.survivors import Scratch
from offramp.runtime.gate import Gate
from offramp.runtime.jobs.bundles.timing import time_cascade_graph

DEVICES = ["cpu", "torch:cpu"]


@pytest.fixture(params=DEVICES)
def cascade(request, monkeypatch):
    if request.param != "cpu":
        pytest.importorskip("torch", reason="the device path runs on torch's memory")
        pytest.importorskip("onnx", reason="the torch executor reads ONNX graphs")
        monkeypatch.setenv("TRITON_INTERPRET", "0")  # its interpreter has its own tests
    with Cascade.load(sample.BUNDLE, request.param, "balanced") as loaded:
        yield loaded


def test_every_public_method_works(cascade):
    x, y = sample.heldout()
    cascade.warm_up()
    assert cascade.fingerprint
    assert cascade.row_flops({})[-1] > 0
    out = cascade.predict({"x": x}, fetch=("probabilities",))
    assert (out.label == y).mean() > 0.97
    np.testing.assert_allclose(1 / (1 + np.exp(-out.log_odds)), out.confidence)
    records = cascade.record({"x": x[:9]})
    assert records.logits.shape == (3, 9, 10)
    block = cascade.manifest.blocks[0]
    made = cascade.run_graph(block, {"x": x[:9]}, block.outputs)
    np.testing.assert_allclose(made[cascade.manifest.exits[0].logits], records.logits[0], atol=1e-5)
    assert (
        cascade.at("fast").predict({"x": x[:9]}).exit.tolist() == cascade.at("fast").predict({"x": x[:9]}).exit.tolist()
    )
    with pytest.raises(InputError, match="takes arrays only"):
        cascade.preprocess(["a text"])
    cascade.close()
    with pytest.raises(CascadeClosed):
        cascade.predict({"x": x[:1]})
    with pytest.raises(CascadeClosed):
        cascade.record({"x": x[:1]})


def test_rows_of_several_requests_meet_in_front_of_a_block(cascade):
    """Each request has thresholds of its own, and each row is answered when it leaves, as if it were alone."""
    x, _ = sample.heldout()
    executor, manifest = cascade.executor, cascade.manifest
    score = cascade.record({"x": x}).score
    middle = [float(np.median(s)) for s in score]
    points = [
        OperatingPoint((middle[0], middle[1], -math.inf)),
        OperatingPoint((math.inf, middle[1] + 1, -math.inf), abstain_below=3.0),
        OperatingPoint((middle[0] - 2, math.inf, -math.inf)),
    ]
    requests = [x[:7], x[20:50], x[90:91]]
    owner = np.repeat(np.arange(3), [len(r) for r in requests])
    gates = [Gate(point, 3) for point in points]
    waiting = [(executor.put({"x": rows}), np.arange(len(rows))) for rows in requests]
    axes = {"x": 0}
    ids, exits, labels, abstains = np.arange(len(owner)), *(np.full(len(owner), -2) for _ in range(3))
    for j, block in enumerate(manifest.blocks):
        state = executor.gather(waiting, axes)
        made = executor.run(block, state, block.outputs)
        exit_ = manifest.exits[j]
        seen = executor.fetch({name: made[name] for name in (exit_.label, exit_.score)})
        stays = np.ones(len(ids), bool)
        for request, gate in enumerate(gates):
            here = np.flatnonzero(owner[ids] == request)
            if gate.point.thresholds[j] == math.inf:
                continue
            decision = gate.decide(j, seen[exit_.label][here], seen[exit_.score][here])
            gone = here[decision.leave]
            exits[ids[gone]], labels[ids[gone]] = j, seen[exit_.label][gone]
            abstains[ids[gone]] = decision.abstain[decision.leave]
            stays[gone] = False
        if j + 1 == len(manifest.blocks):
            break
        axes = {name: manifest.tensors[name].batch_axis for name in manifest.blocks[j + 1].inputs if name != "x"}
        positions = np.flatnonzero(stays)
        ids = ids[positions]
        waiting = [({**state, **made}, positions[:3]), ({**state, **made}, positions[3:])]
    for request, (rows, point) in enumerate(zip(requests, points, strict=True)):
        want = cascade.at(point).predict({"x": rows})
        assert exits[owner == request].tolist() == want.exit.tolist()
        assert labels[owner == request].tolist() == want.label.tolist()
        assert abstains[owner == request].astype(bool).tolist() == want.abstain.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_the_commands_that_measure_take_every_device(device, tmp_path, capsys, monkeypatch):
    if device != "cpu":
        pytest.importorskip("torch", reason="the device path runs on torch's memory")
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    x, y = sample.heldout()
    np.savez(tmp_path / "rows.npz", x=x[:60], labels=y[:60])
    bundle = str(sample.BUNDLE)
    assert main(["record", bundle, str(tmp_path / "rows.npz"), "--out", str(tmp_path / "r"), "--device", device]) == 0
    assert main(["inspect", bundle, "--device", device]) == 0
    found = capsys.readouterr().out
    assert "block_0.onnx" in found
    assert found.count("ms at 1") == (3 if device == "cpu" else 2), "only the CPU has times inside the cascade graph"
    auto = ["repack", bundle, "--auto", "--records", str(tmp_path / "r"), "--out", str(tmp_path / "b")]
    assert main([*auto, "--device", device]) == 0
    assert main(["predict", bundle, str(tmp_path / "rows.npz"), "--device", device]) == 0


def test_a_device_that_nobody_knows_is_one_line(capsys):
    assert main(["inspect", str(sample.BUNDLE), "--device", "abacus"]) == 2
    assert "device is 'abacus', expected cpu, cuda" in capsys.readouterr().err


def test_no_cascade_graph_is_timed_where_none_is_run(cascade):
    if cascade.executor.runs_cascade_graph:
        pytest.skip("it is run here")
    with pytest.raises(InputError, match="no cascade graph is run here"):
        time_cascade_graph(cascade, {})
    with pytest.raises(InputError, match="isn't run on a device"):
        cascade.executor.run_cascade_graph({}, {})


def test_gathered_rows_live_in_the_executors_memory_and_go_with_it(monkeypatch):
    x, _ = sample.heldout()
    made = []
    original = Scratch.__init__
    monkeypatch.setattr(Scratch, "__init__", lambda self: (original(self), made.append(weakref.ref(self)))[0])
    loaded = Cascade.load(sample.BUNDLE, operating_point="balanced")
    loaded.predict({"x": x}, fetch=("routing",))  # from block to block
    first = made[0]
    loaded.close()
    gc.collect()
    assert first() is None


def test_warming_up_wants_axes_that_the_model_has(cascade):
    with pytest.raises(InputError, match="names the axis 'seq', this model's are"):
        cascade.warm_up({"seq": 4})
