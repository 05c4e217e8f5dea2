"""The short way answers what the general way answers, and takes nothing that has to be looked at more closely."""

import copy
import math
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.export import export_bundle
from offramp.runtime import Cascade, CascadeClosed, InputError, OperatingPoint, calibration
from offramp.runtime.execution.cpu.prepared import all_finite
from toys import SEQUENCE, CrossRow, Everything, Masked, Plain, make

TOKENS = {"ids": torch.randint(1, 40, (3, 6)), "mask": torch.ones(3, 6, dtype=torch.int64)}
MODELS = {
    "plain": (Plain, torch.randn(4, 8), None),
    "sequences": (Masked, TOKENS, SEQUENCE),
    "everything": (Everything, torch.randn(4, 8), None),
    "rows that mix": (CrossRow, torch.randn(4, 6), None),
    "one exit": (lambda: Plain(8, 4, 1), torch.randn(4, 8), None),
}
POINTS = {"all closed": math.inf, "all open": 0.5, "everybody at once": -1e30}
FIELDS = ("label", "score", "exit", "abstain", "flops", "involuntary", "confidence", "log_odds")


@pytest.fixture(scope="module", params=MODELS)
def cascade(request, tmp_path_factory):
    kind, example, axes = MODELS[request.param]
    bundle = export_bundle(make(kind), example, tmp_path_factory.mktemp("short") / "b", dynamic_axes=axes)
    with Cascade.load(bundle, threads=1, batch_rows=16) as cascade:
        yield cascade


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    bundle = export_bundle(make(Plain), torch.randn(4, 8), tmp_path_factory.mktemp("plain") / "b")
    with Cascade.load(bundle, threads=1, batch_rows=16, operating_point=OperatingPoint((0.5, 0.5, -math.inf))) as made:
        yield made


def inputs_of(cascade, rows, seed=0):
    rng, made = np.random.default_rng(seed), {}
    for want in cascade.manifest.inputs:
        shape = [{"batch": rows, "seq": 9}.get(d, d) for d in want.shape]
        made[want.name] = rng.standard_normal(shape).astype(want.dtype)
        if want.dtype == "int64":
            made[want.name] = rng.integers(1, 2 if want.name == "mask" else 40, shape)
    return made


class generally:
    """The same cascade by the general way, which any wish makes it take."""

    def __init__(self, cascade):
        self.cascade = cascade

    def predict(self, inputs):
        return self.cascade.predict(inputs, fetch=("probabilities",))


def check(one, two):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
        assert getattr(one, name).dtype == getattr(two, name).dtype, name
    assert one.executed == two.executed
    assert one.class_name == two.class_name


@pytest.mark.parametrize("bar", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 40])
def test_it_answers_as_the_general_way(cascade, bar, rows):
    early = len(cascade.exits) - 1
    at = cascade.at(OperatingPoint((*[bar] * early, -math.inf), abstain_below=0.3))
    inputs = inputs_of(cascade, rows, seed=rows)
    check(at.predict(inputs), generally(at).predict(inputs))


@pytest.mark.parametrize("name", ["temperature", "cwmcs"])
@pytest.mark.parametrize("rows", [1, 9])
def test_calibrators_that_want_logits_get_them(plain, name, rows):
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((200, 4)).astype(np.float32), rng.integers(0, 4, 200)
    fitted = calibration.get(name).fit(logits, labels)
    at = plain.at(OperatingPoint((0.5, 0.5, -math.inf), abstain_below=0.0, calibrators=(fitted,) * 3))
    inputs = inputs_of(plain, rows)
    check(at.predict(inputs), generally(at).predict(inputs))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.tolist(),
        lambda x: x.astype(np.float64),
        lambda x: x.astype(np.float16).astype(np.float32)[:, ::-1][:, ::-1],
        lambda x: np.asfortranarray(x),
        lambda x: x.astype(x.dtype.newbyteorder()),
        lambda x: x[:0],
    ],
    ids=["a list", "float64", "a view", "columns first", "other bytes", "no rows"],
)
def test_what_has_to_be_converted_is(plain, change):
    x = np.float32(np.random.default_rng(0).integers(-4, 5, (3, 8)))
    changed = change(x)
    answer = plain.predict({"x": changed})
    assert answer.label.tolist() == plain.predict({"x": x}).label.tolist()[: len(changed)]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": np.full((1, 8), np.nan, np.float32)}, "NaN or infinity"),
        ({"x": np.array([[0, 1, 2, 3, 4, 5, 6, np.inf]], np.float32)}, "NaN or infinity"),
        ({"x": np.array([[0, 1, 2, 3, 4, 5, 6, -np.inf]], np.float32)}, "NaN or infinity"),
        ({"x": np.zeros((1, 7), np.float32)}, "axis 1 is 7"),
        ({"x": np.zeros(8, np.float32)}, "has the shape"),
        ({"x": np.zeros((1, 8), np.complex64)}, "has the dtype"),
        ({"y": np.zeros((1, 8), np.float32)}, "'y'"),
        ({"x": np.zeros((1, 8), np.float32), "y": np.zeros(1)}, "'y'"),
        ({}, "lacks 'x'"),
        ([("x", 1)], "expected a mapping"),
    ],
)
def test_what_is_refused_is_refused_as_ever(plain, inputs, message):
    with pytest.raises(InputError, match=message):
        plain.predict(inputs)


def test_values_that_the_graph_cannot_run_on_are_refused_as_ever(tmp_path):
    bundle = export_bundle(make(Masked), TOKENS, tmp_path / "b", dynamic_axes=SEQUENCE)
    with Cascade.load(bundle) as cascade, pytest.raises(InputError, match="outside the vocabulary"):
        cascade.predict({"ids": np.full((1, 9), 10**6), "mask": np.ones((1, 9), np.int64)})


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("value", [50, 10**6, -51])
def test_a_number_that_no_table_has_a_row_for_is_named_with_its_input(tmp_path, rows, value):
    bundle = export_bundle(make(Masked), TOKENS, tmp_path / "b", dynamic_axes=SEQUENCE)
    ids = np.full((rows, 9), 7)
    ids[-1, 4] = value
    said = f"^input 'ids' has {value}, which is outside the vocabulary: expected 0 to 49.$"
    with Cascade.load(bundle) as cascade, pytest.raises(InputError, match=said):
        cascade.predict({"ids": ids, "mask": np.ones((rows, 9), np.int64)})


def test_where_it_may_be_a_rows_length_no_input_is_blamed(tmp_path):
    bundle = export_bundle(make(Masked), TOKENS, tmp_path / "b", dynamic_axes=SEQUENCE)
    with Cascade.load(bundle) as cascade, pytest.raises(InputError, match=r"can't run on these .*, or a row longer"):
        cascade.predict({"ids": np.full((1, 90), 60), "mask": np.ones((1, 90), np.int64)})


def test_a_closed_cascade_answers_nothing_more(tmp_path):
    bundle = export_bundle(make(Plain), torch.randn(4, 8), tmp_path / "b")
    cascade = Cascade.load(bundle)
    x = {"x": np.zeros((1, 8), np.float32)}
    before = cascade.predict(x)
    cascade.close()
    with pytest.raises(CascadeClosed):
        cascade.predict(x)
    assert before.exit.tolist() == [2], "an answer that was given can still be looked at"


def test_answers_are_made_out_once_whoever_looks_first(plain):
    for _ in range(20):
        answer, seen = plain.predict(inputs_of(plain, 8)), []
        start = threading.Barrier(8)

        def look(name, answer=answer, seen=seen, start=start):
            start.wait()
            seen.append(getattr(answer, name) is getattr(answer, name))

        threads = [threading.Thread(target=look, args=(name,)) for name in FIELDS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] * 8


def test_answers_can_be_copied_pickled_and_asked_for_more_before_anybody_looked(plain):
    inputs = inputs_of(plain, 3)
    whole = generally(plain).predict(inputs)
    check(pickle.loads(pickle.dumps(plain.predict(inputs))), whole)
    check(copy.deepcopy(plain.predict(inputs)), whole)
    np.testing.assert_array_equal(plain.predict(inputs).probabilities, whole.probabilities)
    assert len(plain.predict(inputs)) == 3
    assert repr(plain.predict(inputs)) == repr(whole)


def test_answers_are_read_only_and_know_no_other_name(plain):
    answer = plain.predict(inputs_of(plain, 1))
    with pytest.raises(AttributeError, match="read only"):
        answer.label = np.zeros(1)
    with pytest.raises(AttributeError, match="'labels'"):
        answer.labels  # noqa: B018
    assert not hasattr(answer, "__array__")


@given(
    st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.sampled_from(["float16", "float32", "float64"]),
    st.one_of(st.none(), st.tuples(st.integers(0, 199), st.sampled_from([math.nan, math.inf, -math.inf, -math.nan]))),
)
@settings(max_examples=300, deadline=None)
def test_every_number_counts(values, dtype, bad):
    array = np.array([values], dtype)
    if bad is not None:
        array[0, bad[0] % len(values)] = bad[1]
    assert all_finite(array) == bool(np.isfinite(array).all())
