"""How long a graph takes: what was measured, straight lines between, and sizes for a wanted cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.runtime import Cascade, InputError, sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.inputs import made_up_inputs
from offramp.runtime.jobs.bundles.timing import Timings, time_parts

MEASURED = Timings((1, 8, 32), {"a": (1.0, 2.4, 12.0), "b": (3.0, 3.0, 3.0)})


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (8, 2.4), (32, 12.0), (4.5, 1.7), (20, 7.2), (100, 12.0)])
def test_between_two_measurements_it_is_a_straight_line(rows, seconds):
    assert MEASURED.at("a", rows) == pytest.approx(seconds)


@given(st.floats(0, 1))
def test_less_than_a_row_is_the_chance_that_one_comes(rows):
    assert MEASURED.at("a", rows) == pytest.approx(rows * 1.0)
    assert MEASURED.at("b", rows) == pytest.approx(rows * 3.0)


@given(st.lists(st.floats(0, 40), min_size=2, max_size=2))
def test_more_rows_never_take_less(rows):
    low, high = sorted(rows)
    assert MEASURED.at("a", low) <= MEASURED.at("a", high) + 1e-12


def test_a_graph_that_was_not_measured_is_a_key_error():
    with pytest.raises(KeyError):
        MEASURED.at("c", 4)


def test_made_up_inputs_have_the_models_types_and_the_given_sizes():
    manifest = read_bundle(sample.BUNDLE).manifest
    made = made_up_inputs(manifest, {**manifest.typical_sizes, "batch": 5})
    for given_ in manifest.inputs:
        array = made[given_.name]
        assert array.dtype == given_.dtype
        assert array.shape[given_.shape.index("batch")] == 5
        assert np.isfinite(array).all()
    with pytest.raises(InputError, match=r"sizes lacks the axis 'batch' of input 'x': for example batch=32"):
        made_up_inputs(manifest, {})


def test_every_graph_of_a_bundle_has_a_time_at_every_number_of_rows():
    with Cascade.load(sample.BUNDLE, threads=1) as cascade:
        timings = time_parts(cascade, cascade.manifest.typical_sizes, rows=(1, 4), seconds=0.2)
        files = {graph.file for graph in (*cascade.manifest.blocks, *cascade.manifest.segments)}
    assert timings.rows == (1, 4)
    assert set(timings.seconds) == files
    for seconds in timings.seconds.values():
        assert len(seconds) == 2
        assert all(0 <= one < 1 for one in seconds)
