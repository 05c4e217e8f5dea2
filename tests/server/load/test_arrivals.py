"""When requests come: rates as they are asked for, traces as they were recorded."""

import numpy as np
import pytest
from offramp.runtime.errors import InputError
from offramp.server.load.arrivals import Poisson, poisson, rate, read_trace


def test_gaps_are_exponential_and_the_same_for_the_same_seed():
    arrivals = poisson(1000, 20, [3, 1])
    assert len(arrivals) == pytest.approx(20_000, abs=6 * 20_000**0.5)
    gaps = np.diff(arrivals, prepend=0)
    assert gaps.mean() == pytest.approx(1e-3, rel=0.05)
    assert gaps.std() == pytest.approx(1e-3, rel=0.05)
    assert arrivals[-1] < 20
    np.testing.assert_array_equal(arrivals, poisson(1000, 20, [3, 1]))
    assert not np.array_equal(arrivals[:10], poisson(1000, 20, [3, 2])[:10])


def test_a_rate_is_a_number_or_a_share():
    assert rate("120") == Poisson(rate=120)
    assert rate("70%") == Poisson(share=0.7)
    for text in ("0", "-1", "fast", "%", "nan", "inf"):
        with pytest.raises(ValueError):  # noqa: PT011
            rate(text)


def test_a_trace_begins_at_its_first_arrival_and_is_put_in_order(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("# recorded on a Monday\n10.5\n10\n\n12e0\n")
    trace = read_trace(path)
    assert trace.offsets == (0.0, 0.5, 2.0)
    assert trace.seconds == 2.0
    assert trace.name == "trace trace.txt"


@pytest.mark.parametrize(
    ("text", "message"),
    [("1\nsoon\n", r"line 2 is 'soon', expected an arrival"), ("-1\n", "line 1 is '-1'"), ("\n", "has no arrivals")],
)
def test_a_line_that_is_no_arrival_is_named(tmp_path, text, message):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)
    with pytest.raises(InputError, match=r"none.txt: can't be read"):
        read_trace(tmp_path / "none.txt")
