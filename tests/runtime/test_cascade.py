"""A cascade answers as the slow oracle does, whatever the batch, the thread, the process or the row."""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.runtime import BundleError, Cascade, CascadeClosed, InputError, OperatingPoint, Stopped, sample
from offramp.runtime.execution.cpu.executor import CpuExecutor
from offramp.runtime.files import seal
from offramp.runtime.scores import LARGEST
from offramp.runtime.thresholds.rule import reached


@pytest.fixture(scope="module")
def cascade():
    with Cascade.load(sample.BUNDLE, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def images():
    return sample.heldout()[0]


@pytest.fixture(scope="module")
def records(cascade, images):
    return cascade.record({"x": images})


def oracle(records, point, i):
    """What the design says happens to row i, in plain Python."""
    for j, threshold in enumerate(point.thresholds):
        score = float(records.score[j, i])
        if j == len(point.thresholds) - 1 or score >= threshold:
            return {
                "exit": j,
                "label": int(records.label[j, i]),
                "confidence": 1 / (1 + math.exp(-score)),
                "abstain": not score >= point.abstain_below,
                "flops": int(records.flops[j, i]),
            }
    raise AssertionError


def assert_same(answer, expected, records, point):
    """Equal, but for rows within float noise of a threshold, which another batch may push to either side."""
    for i, want in enumerate(expected):
        bars = [*point.thresholds[:-1], point.abstain_below]
        if any(abs(float(records.score[j, i]) - bar) < 1e-3 for j in range(len(records.score)) for bar in bars):
            continue
        assert answer.exit[i] == want["exit"], i
        assert answer.label[i] == want["label"]
        assert answer.confidence[i] == pytest.approx(want["confidence"], abs=1e-5)
        assert answer.abstain[i] == want["abstain"]
        assert answer.flops[i] == want["flops"]


@pytest.mark.parametrize("batch", [1, 7, 64, 497])
@pytest.mark.parametrize("seed", range(3))
def test_predict_equals_the_oracle_at_random_thresholds(cascade, images, records, batch, seed):
    rng = np.random.default_rng(seed)
    bars = [float(np.quantile(records.score[j], rng.uniform(0, 1))) for j in range(2)]
    point = OperatingPoint((*bars, -math.inf), abstain_below=float(rng.uniform(0, 6)))
    at = cascade.at(point)
    rows = min(len(images), 20 * batch)
    for start in range(0, rows, batch):
        stop = min(start + batch, rows)
        answer = at.predict({"x": images[start:stop]})
        part = type(records)(
            logits=(), score=records.score[:, start:stop], label=records.label[:, start:stop],
            flops=records.flops[:, start:stop],
        )  # fmt: skip
        assert_same(answer, [oracle(part, point, i) for i in range(stop - start)], part, point)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_rows_in_any_order_and_piece_size_get_their_own_answers(data):
    images = sample.heldout()[0]
    picked = data.draw(st.lists(st.integers(0, len(images) - 1), max_size=40))
    size = data.draw(st.sampled_from([1, 2, 3, 16, 128]))
    with Cascade.load(sample.BUNDLE, threads=1, operating_point="balanced", batch_rows=size) as cascade:
        alone = cascade.predict({"x": images})
        answer = cascade.predict({"x": images[picked].reshape(-1, 8, 8)})
        assert (answer.label == alone.label[picked]).all()
        near = np.abs(alone.score[picked] - answer.score) > 1e-3 * np.maximum(1, np.abs(answer.score))
        assert not near[answer.exit == alone.exit[picked]].any()
        assert (answer.exit == alone.exit[picked]).mean() >= 0.9 if picked else True


def test_no_rows_one_row_and_ten_thousand_rows(cascade, images):
    empty = cascade.predict({"x": images[:0]}, fetch=("probabilities", "routing"))
    assert (len(empty), empty.probabilities.shape, empty.executed) == (0, (0, 10), (0, 0, 0))
    assert empty.flops.dtype == np.int64
    assert cascade.record({"x": images[:0]}).logits.shape == (3, 0, 10)
    assert len(cascade.predict({"x": images[:1]})) == 1
    many = np.resize(images, (10_000, 8, 8))
    answer = cascade.at("balanced").predict({"x": many})
    first = cascade.at("balanced").predict({"x": images})
    assert (answer.label == np.resize(first.label, 10_000)).all()
    assert answer.exit.max() == 2


def test_full_runs_every_block_for_every_row_and_never_abstains():
    with Cascade.load(sample.BUNDLE, operating_point=OperatingPoint((math.inf, math.inf, -math.inf))) as cascade:
        answer = cascade.predict({"x": sample.heldout()[0]})
    assert set(answer.exit.tolist()) == {2}
    assert not answer.abstain.any()
    assert (answer.flops == cascade.row_flops({"batch": 1})[-1]).all()


def test_probabilities_come_with_the_answer_or_when_somebody_asks(cascade, images):
    at = cascade.at("balanced")
    asked = at.predict({"x": images}, fetch=("probabilities",))
    later = at.predict({"x": images})
    np.testing.assert_allclose(asked.probabilities, later.probabilities, atol=1e-6)
    np.testing.assert_allclose(asked.probabilities.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(asked.probabilities.max(axis=1), asked.confidence, atol=1e-5)
    assert (asked.probabilities.argmax(axis=1) == asked.label).all()
    with pytest.raises(InputError, match="fetch has 'gradients'"):
        at.predict({"x": images}, fetch=("gradients",))


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("point", ["full", "fast"])
@pytest.mark.parametrize("options", [{}, {"max_exit": 1}, {"allow_nonfinite": True}, {"fetch": "times"}], ids=str)
def test_overwritten_inputs_are_found_when_somebody_asks_late(cascade, images, rows, point, options):
    """A camera's buffer holds the next picture by then."""
    at, held = cascade.at(point), images[:rows].copy()
    fetched = at.predict({"x": images[:rows]}, **options | {"fetch": ("times", "probabilities")})
    untouched = at.predict({"x": held}, **options)
    np.testing.assert_allclose(untouched.probabilities, fetched.probabilities, atol=1e-6)
    late = at.predict({"x": held}, **options)
    held[-1:] = images[400]
    with pytest.raises(InputError, match=r"probabilities can't be got any more: .*fetch=\('probabilities',\)"):
        _ = late.probabilities
    held[:] = images[:rows]
    np.testing.assert_allclose(late.probabilities, fetched.probabilities, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 2, 4])
def test_so_is_another_array_in_the_callers_dictionary(cascade, images, rows):
    inputs = {"x": images[:3]}
    out = cascade.at("fast").predict(inputs)
    inputs["x"] = images[3 : 3 + rows]
    with pytest.raises(InputError, match="probabilities can't be got any more"):
        _ = out.probabilities


def test_logits_are_fetched_only_when_somebody_asks(cascade, images):
    class Watching(CpuExecutor):
        fetched: ClassVar[list[str]] = []

        def run(self, graph, state, outputs):
            self.fetched.extend(outputs)
            return super().run(graph, state, outputs)

    executor = Watching(cascade.bundle, threads=1, providers=["CPUExecutionProvider"], cascade_graph=False)
    point = cascade.calibration.point("balanced")
    answer = Cascade(cascade.bundle, cascade.calibration, point, executor).predict({"x": images})
    fetched = executor.fetched
    logits = {e.logits for e in cascade.manifest.exits}
    assert not logits & set(fetched)
    assert answer.probabilities.shape == (len(images), 10)
    assert logits <= set(fetched)


def test_rows_that_left_are_not_computed_on(cascade, images):
    answer = cascade.at("balanced").predict({"x": images})
    blocks = np.diff(cascade.row_flops({"batch": 1}), prepend=0)
    went_on = [int((answer.exit >= k).sum()) for k in range(3)]
    assert went_on[2] < went_on[1] < went_on[0]
    for executed, flops, rows in zip(answer.executed, blocks, went_on, strict=True):
        # Rows may ride along where copying the rest would cost more; for these blocks it never does.
        assert executed == flops * rows


def test_several_threads_share_one_cascade(cascade, images):
    expected = cascade.at("balanced").predict({"x": images})

    def ask(k):
        at = cascade.at("balanced") if k % 2 else shared
        return at.predict({"x": images}, fetch=("probabilities",) if k % 3 else ())

    shared = cascade.at("balanced")
    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(ask, range(32)):
            assert (answer.label == expected.label).all()
            assert (answer.exit == expected.exit).all()


def test_two_cascades_of_different_bundles_live_side_by_side(images):
    with Cascade.load(sample.BUNDLE) as one, Cascade.load(sample.BUNDLE, operating_point="fast") as other:
        first = one.predict({"x": images[:5]})
        other.predict({"x": images[:5]})
        other.close()
        assert (one.predict({"x": images[:5]}).label == first.label).all()


def test_a_closed_cascade_says_so_and_calls_under_way_finish(images):
    cascade = Cascade.load(sample.BUNDLE)
    sibling = cascade.at("fast")
    many, results, started = np.resize(images, (4000, 8, 8)), [], threading.Event()

    def ask():
        started.set()
        try:
            results.append(len(cascade.predict({"x": many})))
        except CascadeClosed:
            results.append("closed")

    thread = threading.Thread(target=ask)
    thread.start()
    started.wait()
    cascade.close()
    cascade.close()
    thread.join()
    assert results
    assert results[0] in (4000, "closed")
    for closed in (cascade, sibling):
        with pytest.raises(CascadeClosed, match="closed"):
            closed.predict({"x": images[:1]})


@pytest.mark.parametrize("cascade_graph", [True, False])
def test_a_call_of_several_batches_finishes_though_its_cascade_is_closed_after_the_first(images, cascade_graph):
    class Closing(CpuExecutor):
        def run(self, graph, state, outputs):
            made = super().run(graph, state, outputs)
            self.close()
            return made

        def run_cascade_graph(self, inputs, thresholds, **more):
            made = super().run_cascade_graph(inputs, thresholds, **more)
            self.close()
            return made

    with Cascade.load(sample.BUNDLE, operating_point="balanced") as whole:
        executor = Closing(whole.bundle, threads=1, providers=["CPUExecutionProvider"], cascade_graph=cascade_graph)
        closing = Cascade(whole.bundle, whole.calibration, whole.operating_point, executor, batch_rows=64)
        assert (closing.predict({"x": images}).label == whole.predict({"x": images}).label).all()
    with pytest.raises(CascadeClosed, match="closed"):
        closing.predict({"x": images[:1]})
    assert not executor.opened


ASK = {
    "record": lambda cascade, x: cascade.record({"x": x}),
    "a deadline": lambda cascade, x: cascade.predict({"x": x}, deadline=60),
    "anytime": lambda cascade, x: list(cascade.anytime({"x": x})),
    "run_graph": lambda cascade, x: cascade.run_graph(cascade.manifest.blocks[0], {"x": x}, ["logits_0"]),
}


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_whatever_runs_graphs_finishes_though_its_cascade_is_closed_meanwhile_and_is_refused_later(
    images, monkeypatch, device, ask
):
    if device != "cpu":
        pytest.importorskip("torch")
    cascade = Cascade.load(sample.BUNDLE, device=device, operating_point="balanced", batch_rows=16)
    executor, run = cascade.executor, cascade.executor.run

    def run_and_close(graph, state, outputs):
        made = run(graph, state, outputs)
        cascade.close()
        return made

    expected = ask(cascade, images[:40])
    monkeypatch.setattr(executor, "run", run_and_close)
    found = ask(cascade, images[:40])
    if hasattr(found, "logits"):
        np.testing.assert_array_equal(found.logits, expected.logits)
    with pytest.raises(CascadeClosed, match="closed"):
        ask(cascade, images[:1])
    assert device != "cpu" or not executor.opened


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("options", [{}, {"deadline": 60}, {"fetch": "probabilities"}, {"max_exit": 1}], ids=str)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_call_that_is_told_to_stop_begins_no_other_batch(images, device, options, after):
    if device != "cpu":
        pytest.importorskip("torch")
    asked = 0

    def stop():
        nonlocal asked
        asked += 1
        return asked > after

    with Cascade.load(sample.BUNDLE, device=device, operating_point="balanced", batch_rows=16) as cascade:
        with pytest.raises(Stopped):
            cascade.predict({"x": images[:200]}, stop=stop, **options)
        assert asked == after + 1
        whole = cascade.predict({"x": images[:40]}, stop=lambda: False)
        assert (whole.label == cascade.predict({"x": images[:40]}).label).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("end", ["cascade.close()", "del cascade", "pass", "cascade = None; gc.collect()"])
def test_a_forked_child_that_lets_go_of_its_parents_sessions_ends_with_its_own_exit_code(end):
    program = f"""if True:
        import gc, os, sys, time
        from offramp.runtime import Cascade, sample
        images = sample.heldout()[0]
        cascade = Cascade.load(sample.BUNDLE, operating_point="balanced")
        child = os.fork()
        if child == 0:
            {end}
            sys.exit(7)
        for _ in range(600):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            sys.exit("the child never ended")
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert (cascade.at("full").predict({{"x": images}}).exit == 2).all()  # its files are still there
    """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_told_to_load_its_own_and_can(images):
    cascade = Cascade.load(sample.BUNDLE)
    expected = cascade.predict({"x": images[:3]}).label.tolist()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking with threads: that's the case
        child = os.fork()
    if child == 0:
        try:
            cascade.predict({"x": images[:3]})
            said = "no error"
        except CascadeClosed as error:
            with Cascade.load(sample.BUNDLE) as own:
                said = f"{error} {own.predict({'x': images[:3]}).label.tolist()}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 10_000).decode()
    os.waitpid(child, 0)
    assert "Cascade.load in the process that predicts" in said
    assert said.endswith(str(expected))
    assert cascade.predict({"x": images[:3]}).label.tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operating_point": "turbo"}, r"operating_point is 'turbo', this bundle has \['full', 'balanced', 'fast'\]"),
        ({"threads": 0}, "threads is 0, expected a whole number from 1 to"),
        ({"threads": 100_000}, "threads is 100000"),
        ({"threads": True}, "threads is True"),
        ({"providers": "CPUExecutionProvider"}, "providers is 'CPUExecutionProvider', expected a list"),
        ({"threads": "2"}, "threads is '2'"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"batch_rows": "x"}, "batch_rows is 'x', expected a whole number of at least 1"),
        ({"batch_rows": 2.5}, "batch_rows is 2.5"),
        ({"batch_rows": True}, "batch_rows is True"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"recalibration": "kept.db"}, r"recalibration is 'kept.db', expected Online\(path\)"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        Cascade.load(sample.BUNDLE, **options)


def test_operating_points_can_be_keys_and_one_kind_can_be_fetched_by_its_name(cascade):
    one = OperatingPoint((1, 2, -math.inf), expected={"accuracy": 1})
    assert {one: 1}[OperatingPoint((1, 2, -math.inf))] == 1
    assert cascade.predict({"x": sample.heldout()[0][:2]}, fetch="probabilities").probabilities.shape == (2, 10)


def test_a_point_for_another_number_of_exits_is_refused(cascade):
    with pytest.raises(InputError, match="2 thresholds, the model has 3 exits"):
        cascade.at(OperatingPoint((1.0, -math.inf)))


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("bar", [3.5e38, 1e39, 1e308])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_threshold_beyond_float32_is_infinity_for_gate_and_graph(images, device, bar, sign):
    beyond = OperatingPoint((sign * bar, 3.0, -math.inf))
    assert beyond == OperatingPoint((sign * math.inf, 3.0, -math.inf))
    assert reached(np.array([LARGEST, np.nan]), sign * bar).tolist() == [sign < 0] * 2
    with Cascade.load(sample.BUNDLE, device=device, operating_point=beyond) as cascade:
        answer = cascade.predict({"x": images}, fetch="probabilities")
        alone = cascade.predict({"x": images[:1]})
        assert cascade.operating_point.exits == ((1, 2) if sign > 0 else (0, 1, 2))
    assert set(answer.exit.tolist()) == ({1, 2} if sign > 0 else {0})
    assert alone.exit.tolist() == answer.exit[:1].tolist()


def test_an_exit_that_can_never_be_reached_is_warned_of(cascade):
    with pytest.warns(UserWarning, match="exit 1 has the threshold 50"):
        cascade.at(OperatingPoint((3.0, 50.0, -math.inf), expected={"exit_shares": [0.5, 0, 0.5]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cascade.at(OperatingPoint((math.inf, 3.0, -math.inf), expected={"exit_shares": [0, 0.5, 0.5]}))


def test_answers_pickle_with_what_came_with_them(cascade, images):
    at = cascade.at("balanced")
    for rows in (images[:1], images[:40]):
        answer = at.predict({"x": rows}, fetch="probabilities")
        same = pickle.loads(pickle.dumps(answer))
        for name in ("label", "score", "exit", "abstain", "flops", "confidence", "log_odds", "probabilities"):
            np.testing.assert_array_equal(getattr(same, name), getattr(answer, name))
        assert same.executed == answer.executed
    with pytest.raises(InputError, match=r"probabilities didn't come with these answers: .*fetch="):
        _ = pickle.loads(pickle.dumps(at.predict({"x": images[:1]}))).probabilities


def test_a_cascade_pickles_as_its_path_and_answers_alike_in_another_process(images, tmp_path, monkeypatch):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    with Cascade.load("bundle", threads=1, batch_rows=50) as own:
        at = own.at(OperatingPoint((2.0, math.inf, -math.inf), name="mine"))
        packed, expected = pickle.dumps(at), at.predict({"x": images})
    (tmp_path / "packed").write_bytes(packed)
    program = """if True:
        import pickle, sys
        from offramp.runtime import sample
        with pickle.load(open(sys.argv[1], "rb")) as cascade:
            assert (cascade.batch_rows, cascade.operating_point.name) == (50, "mine")
            print(cascade.predict({"x": sample.heldout()[0]}).exit.tolist())
    """
    command = [sys.executable, "-c", program, str(tmp_path / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert json.loads(done.stdout) == expected.exit.tolist()
    document = json.loads((bundle / "manifest.json").read_text())
    del document["digest"]
    (bundle / "manifest.json").write_bytes(seal({**document, "name": "other"}))
    (bundle / "calibration.json").unlink()
    with pytest.raises(BundleError, match="another bundle than when the cascade was pickled"):
        pickle.loads(packed)


def test_a_cascade_that_load_did_not_make_says_that_it_cannot_be_pickled(cascade):
    made = Cascade(cascade.bundle, cascade.calibration, cascade.operating_point, cascade.executor)
    with pytest.raises(InputError, match="can't be pickled"):
        pickle.dumps(made)


@pytest.mark.parametrize("rows", [0, 1, 200])
def test_times_say_when_each_row_and_each_exit_had_its_answer(images, rows):
    with Cascade.load(sample.BUNDLE, operating_point="balanced", batch_rows=64) as cascade:
        before = time.perf_counter()
        out = cascade.predict({"x": images[:rows]}, fetch=("times", "probabilities"))
        took = time.perf_counter() - before
        check = cascade.predict({"x": images[:rows]})
    assert out.exit.tolist() == check.exit.tolist()
    assert out.times.shape == (rows,)
    assert out.exit_times.shape == (3,)
    assert ((out.times > 0) & (out.times <= took)).all()
    assert out.times.tolist() == out.exit_times[out.exit].tolist()
    asked = out.exit_times[: out.exit.max(initial=0) + 1]
    assert (np.diff(asked) > 0).all(), "one exit after the other"
    assert np.isnan(out.exit_times[len(asked) :]).all()
    assert out.probabilities.shape == (rows, 10)


def test_times_come_with_deadlines_and_cut_short_rows_but_never_afterwards(images):
    with Cascade.load(sample.BUNDLE, operating_point="balanced") as cascade:
        out = cascade.predict({"x": images}, fetch="times", deadline=0.0)
        assert np.isfinite(out.times).all()
        assert np.isnan(out.exit_times[1:]).all()
        assert out.involuntary.any()
        assert np.isfinite(cascade.predict({"x": images}, fetch="times", max_exit=1).times).all()
        for answer in (out, cascade.predict({"x": images}), cascade.predict({"x": images[:1]})):
            with pytest.raises(InputError, match="fetch"):
                answer.fetched("nothing" if answer is out else "times")
