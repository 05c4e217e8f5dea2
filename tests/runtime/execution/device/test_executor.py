"""The device path on CPU: buckets, padding, compaction and two batches in flight change no answer."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device path runs on torch's memory")
pytest.importorskip("onnx", reason="the torch executor reads ONNX graphs")

from offramp.export import export_bundle  # noqa: E402
from offramp.runtime import (  # noqa: E402  # noqa: E402
    BundleError,
    Cascade,
    CascadeClosed,
    InputError,
    OperatingPoint,
    RuntimeUnavailable,
    calibration,
    sample,
)
from offramp.runtime.execution.device.buckets import bucket, buckets  # noqa: E402
from offramp.runtime.execution.device.executor import DeviceExecutor  # noqa: E402
from offramp.runtime.execution.device.ort_graphs import OrtGraphs  # noqa: E402
from toys import BatchSecond, Everything, HalfLogits, LastToken, Masked, MultiScale, Plain, make  # noqa: E402

RNG = np.random.default_rng(0)
TOYS = {
    "plain": (Plain, {"x": RNG.standard_normal((40, 8), np.float32)}, {"x": {0: "batch"}}),
    "half logits": (HalfLogits, {"x": RNG.standard_normal((40, 8), np.float32)}, {"x": {0: "batch"}}),
    "batch second": (BatchSecond, {"x": RNG.standard_normal((40, 8), np.float32)}, {"x": {0: "batch"}}),
    "everything": (Everything, {"x": RNG.standard_normal((40, 8), np.float32)}, {"x": {0: "batch"}}),
    "multi-scale": (MultiScale, {"x": RNG.standard_normal((40, 1, 8, 8), np.float32)}, {"x": {0: "batch"}}),
    "masked": (
        Masked,
        {"ids": RNG.integers(1, 50, (40, 7)), "mask": (np.arange(7) < RNG.integers(2, 8, (40, 1))).astype(np.int64)},
        {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}},
    ),
    "last token": (
        LastToken,
        {"ids": RNG.integers(1, 50, (40, 7)), "mask": (np.arange(7) < RNG.integers(2, 8, (40, 1))).astype(np.int64)},
        {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}},
    ),
}


@pytest.fixture(autouse=True)
def numpys_kernels(monkeypatch):
    """Triton's interpreter takes milliseconds a launch: one test below is run in it, the others by numpy and torch."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture(scope="module", params=list(TOYS))
def toy(request, tmp_path_factory):
    """(bundle, inputs of 40 rows)"""
    kind, inputs, axes = TOYS[request.param]
    example = {name: torch.from_numpy(values[:4]) for name, values in inputs.items()}
    folder = tmp_path_factory.mktemp("toy") / "bundle"
    return export_bundle(make(kind), example, folder, dynamic_axes=axes), inputs


def on_ort(bundle, point, batch_rows: int) -> Cascade:
    """The ONNX Runtime executor over its CPU provider: bindings, buckets and order as on a GPU."""
    cpu = Cascade.load(bundle)
    graphs = OrtGraphs(cpu.bundle, torch.device("cpu"), ["CPUExecutionProvider"])
    executor = DeviceExecutor(cpu.bundle, graphs)
    return Cascade(cpu.bundle, cpu.calibration, point, executor, batch_rows=batch_rows)


def between(score: np.ndarray, share: float) -> float:
    """A threshold halfway between two scores, so that rounding decides nothing."""
    ordered = np.unique(score)
    k = min(max(1, round((1 - share) * len(ordered))), len(ordered) - 1)
    return float(ordered[k - 1] + (ordered[k] - ordered[k - 1]) / 2)


def points(cascade: Cascade, inputs) -> list[OperatingPoint]:
    """Everybody to the end, exits at several shares, everybody out at once, an exit switched off."""
    score = cascade.record(inputs).score
    exits = len(score)
    found = [OperatingPoint((*[1e9] * (exits - 1), -math.inf)), OperatingPoint((-math.inf,) * exits)]
    for share in (0.2, 0.5, 0.9):
        bars = [between(score[j], share) for j in range(exits - 1)]
        found.append(OperatingPoint((*bars, -math.inf), abstain_below=between(score[-1], 0.7)))
    if exits > 2:
        found.append(OperatingPoint((between(score[0], 0.5), *[math.inf] * (exits - 2), -math.inf)))
    return found


def same(got, want):
    assert got.label.tolist() == want.label.tolist()
    assert got.exit.tolist() == want.exit.tolist()
    assert got.abstain.tolist() == want.abstain.tolist()
    assert got.flops.tolist() == want.flops.tolist()
    np.testing.assert_allclose(got.score, want.score, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got.confidence, want.confidence, atol=2e-5)


def test_the_triton_kernels_give_the_answers_too(toy, monkeypatch):
    pytest.importorskip("triton", reason="triton isn't installed: pip install triton (Linux)")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    bundle, inputs = toy
    with Cascade.load(bundle) as cpu:
        for point in points(cpu, inputs)[2:4]:
            want = cpu.at(point).predict(inputs)
            with Cascade.load(bundle, "torch:cpu", point, batch_rows=16) as device:
                same(device.predict(inputs), want)


@pytest.mark.parametrize("executor", ["torch", "onnxruntime"])
def test_answers_are_those_of_the_cascade_at_every_operating_point_and_batch_size(toy, executor):
    bundle, inputs = toy
    with Cascade.load(bundle) as cpu:
        for point in points(cpu, inputs):
            want = cpu.at(point).predict(inputs)
            for rows in (5, 16, 64):
                if executor == "torch":
                    device = Cascade.load(bundle, "torch:cpu", point, batch_rows=rows)
                else:
                    device = on_ort(bundle, point, rows)
                with device:
                    same(device.predict(inputs), want)


def test_fetched_probabilities_and_routing_are_those_of_the_cascade(toy):
    bundle, inputs = toy
    with Cascade.load(bundle) as cpu:
        kinds = ("probabilities", "routing") if cpu.manifest.routing else ("probabilities",)
        for point in points(cpu, inputs)[2:4]:
            want = cpu.at(point).predict(inputs, fetch=kinds)
            with Cascade.load(bundle, "torch:cpu", point, batch_rows=16) as device:
                got = device.predict(inputs, fetch=kinds)
                np.testing.assert_allclose(got.probabilities, want.probabilities, atol=2e-5)
                if cpu.manifest.routing:
                    np.testing.assert_allclose(got.routing, want.routing, atol=2e-5)
                later = device.predict(inputs)
                np.testing.assert_allclose(later.probabilities, want.probabilities, atol=2e-5)


@pytest.mark.parametrize("executor", ["torch", "onnxruntime"])
def test_records_are_those_of_the_cascade(toy, executor):
    bundle, inputs = toy
    with Cascade.load(bundle) as cpu:
        want = cpu.record(inputs)
        full = cpu.operating_point
        device = Cascade.load(bundle, "torch:cpu", batch_rows=16) if executor == "torch" else on_ort(bundle, full, 16)
        with device:
            got = device.record(inputs)
        np.testing.assert_allclose(got.logits, want.logits, atol=2e-3 if want.logits.dtype == np.float16 else 2e-5)
        assert got.flops.tolist() == want.flops.tolist()
        for mine, theirs in zip(got.features or (), want.features or (), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_calibrated_confidence_is_the_hosts_whatever_the_calibrator_needs():
    x, y = sample.heldout()
    with Cascade.load(sample.BUNDLE) as cpu:
        records = cpu.record({"x": x})
        for name in (
            "temperature",
            "classwise_temperature",
            "rank_preserving_power",
            "nw_confidence_entropy",
            "isotonic",
            "cwmcs",
        ):
            fitted = tuple(calibration.get(name).fit(z, y) for z in records.logits)
            bars = (between(records.score[0], 0.4), between(records.score[1], 0.6), -math.inf)
            point = OperatingPoint(bars, abstain_below=1.234, calibrators=fitted)
            want = cpu.at(point).predict({"x": x}, fetch=("probabilities",))
            with Cascade.load(sample.BUNDLE, "torch:cpu", point, batch_rows=100) as device:
                same(device.predict({"x": x}), want)
                got = device.predict({"x": x}, fetch=("probabilities",))
                np.testing.assert_allclose(got.probabilities, want.probabilities, atol=2e-5)


def test_a_row_without_a_score_runs_to_the_end_and_abstains(tmp_path):
    kind, inputs, axes = TOYS["plain"]
    bundle = export_bundle(make(kind), {"x": torch.from_numpy(inputs["x"][:4])}, tmp_path / "b", dynamic_axes=axes)
    x = inputs["x"].copy()
    x[[3, 17]] = np.nan
    for thresholds in ((-1.0, 0.5, -math.inf), (-math.inf,) * 3):
        point = OperatingPoint(thresholds, abstain_below=0.0)
        with Cascade.load(bundle) as cpu, Cascade.load(bundle, "torch:cpu", point, batch_rows=16) as device:
            want = cpu.at(point).predict({"x": x}, allow_nonfinite=True)
            got = device.predict({"x": x}, allow_nonfinite=True)
            assert got.label[[3, 17]].tolist() == [-1, -1]
            same(got, want)


def test_no_rows_one_row_and_a_closed_cascade():
    device = Cascade.load(sample.BUNDLE, "torch:cpu")
    assert isinstance(device.executor, DeviceExecutor)
    x, _ = sample.heldout()
    assert len(device.predict({"x": x[:0]})) == 0
    assert len(device.predict({"x": x[:1]})) == 1
    device.close()
    with pytest.raises(CascadeClosed):
        device.predict({"x": x[:1]})


def test_an_index_outside_its_table_is_an_error_and_the_cascade_goes_on(tmp_path):
    kind, inputs, axes = TOYS["masked"]
    example = {name: torch.from_numpy(values[:4]) for name, values in inputs.items()}
    bundle = export_bundle(make(kind), example, tmp_path / "bundle", dynamic_axes=axes)
    with Cascade.load(bundle) as cpu, Cascade.load(bundle, "torch:cpu") as device:
        with pytest.raises(InputError, match="outside the vocabulary"):  # ONNX Runtime says so itself, on CPU
            on_ort(bundle, cpu.operating_point, 16).predict({**inputs, "ids": inputs["ids"] + 50})
        want = device.predict(inputs)
        for wrong in (50, 10**6, -51):
            bad = {**inputs, "ids": np.where(np.arange(40)[:, None] == 7, wrong, inputs["ids"])}
            for run in (device.predict, device.record):
                with pytest.raises(InputError, match="outside the vocabulary"):
                    run(bad)
        same(device.predict(inputs), want)


def test_many_threads_share_two_lanes():
    x, _ = sample.heldout()
    with Cascade.load(sample.BUNDLE) as cpu:
        point = cpu.calibration.point("balanced")
        want = cpu.at(point).predict({"x": x[:90]})
    with Cascade.load(sample.BUNDLE, "torch:cpu", point, batch_rows=16) as device:
        wrong: list[BaseException] = []

        def ask() -> None:
            try:
                for _ in range(3):
                    same(device.predict({"x": x[:90]}), want)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_two_batches_are_in_flight(monkeypatch):
    """The second batch's first graph is queued before the first batch's report is read."""
    from offramp.kernels.compact import Report

    x, _ = sample.heldout()
    happened: list[str] = []
    send, arrived = Report.send, Report.arrived
    monkeypatch.setattr(Report, "send", lambda self: (happened.append("sent"), send(self))[1])
    monkeypatch.setattr(Report, "arrived", lambda self: (happened.append("read"), arrived(self))[1])
    with Cascade.load(sample.BUNDLE, "torch:cpu", batch_rows=32) as device:
        device.predict({"x": x[:64]})
    assert happened == ["sent", "sent", "read", "read"]


def test_warming_up_prepares_every_bucket_and_changes_nothing():
    x, _ = sample.heldout()
    with Cascade.load(sample.BUNDLE, "torch:cpu", "balanced", batch_rows=12) as device:
        want = device.predict({"x": x[:50]})
        device.warm_up()
        graphs = device.executor.graphs
        assert graphs.prepared_rows == set(buckets(12))
        same(device.predict({"x": x[:50]}), want)
        assert graphs.prepared_rows == set(buckets(12))


def test_a_shrinking_batch_falls_from_bucket_to_bucket_and_what_ran_is_told():
    assert buckets(40) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
    assert [bucket(n, 40) for n in (1, 5, 13, 33, 40)] == [1, 6, 16, 40, 40]
    assert buckets(1) == (1,)
    x, _ = sample.heldout()
    with Cascade.load(sample.BUNDLE) as cpu:
        score = cpu.record({"x": x[:33]}).score
        point = OperatingPoint((between(score[0], 0.7), 1e9, -math.inf))
        with Cascade.load(sample.BUNDLE, "torch:cpu", point, batch_rows=40) as device:
            out = device.predict({"x": x[:33]})
            block = [int(f) for f in np.diff(device.row_flops({}), prepend=0)]
            stay = int((out.exit > 0).sum())
            assert 0 < stay < 16
            assert out.executed[0] == pytest.approx(40 * block[0], rel=0.05), "padding is run, and said to be"
            assert out.executed[1] == pytest.approx(bucket(stay, 40) * block[1], rel=0.05)


def test_a_machine_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(RuntimeUnavailable, match="no CUDA GPU can be used here"):
        Cascade.load(sample.BUNDLE, device="cuda")
    with pytest.raises(RuntimeUnavailable, match="no CUDA GPU can be used here"):
        Cascade.load(sample.BUNDLE, device="torch:cuda")
    with pytest.raises(InputError, match=r"device is 'torch:abacus'"):
        Cascade.load(sample.BUNDLE, device="torch:abacus")


def test_a_graph_with_an_operation_that_torch_lacks_is_refused_by_name(tmp_path):
    import onnx
    from offramp.runtime.execution.device.torch.program import Weights, read_program
    from onnx import helper

    float_ = onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Det", ["x"], ["y"]),
        helper.make_node("Wondrous", ["y"], ["z"], domain="com.example"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", float_, [2, 2])],
        [helper.make_tensor_value_info("z", float_, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.example", 1)])
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(BundleError, match=r"odd\.onnx: the torch executor lacks Det, com\.example\.Wondrous"):
        read_program(tmp_path / "odd.onnx", Weights(torch.device("cpu")), torch.device("cpu"))


def test_weights_are_kept_once_and_no_output_is_a_weight():
    with Cascade.load(sample.BUNDLE, "torch:cpu") as device:
        graphs = device.executor.graphs
        for graph in [*device.manifest.blocks, *device.manifest.segments]:
            graphs.open(graph)
        where = [t.data_ptr() for p in graphs.programs for t in p.weights.values()]
        assert len(set(where)) < len(where)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda", "torch:cuda"])
def test_a_real_gpu_answers_as_the_cpu_does(toy, device):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    torch.backends.cudnn.allow_tf32 = False
    bundle, inputs = toy
    with Cascade.load(bundle) as cpu:
        for point in points(cpu, inputs):
            want = cpu.at(point).predict(inputs)
            with Cascade.load(bundle, device, point, batch_rows=16) as gpu:
                for _ in range(4):  # eager at first, captured later
                    same(gpu.predict(inputs), want)
                gpu.warm_up({"seq": 7})
                same(gpu.predict(inputs), replace(want))
