"""Sizes are recognised as formulas, and costs print as formulas that evaluate to the same number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offramp.export.dims import Cost, Dim, fit, next_size
from offramp.runtime import cost

SIZES = [{"batch": 3, "seq": 8}, {"batch": 5, "seq": 8}, {"batch": 2, "seq": 11}, {"batch": 2, "seq": 9}]


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (lambda s: 384, "384"),
        (lambda s: s["batch"], "batch"),
        (lambda s: 12 * s["batch"], "12*batch"),
        (lambda s: s["seq"] + 2, "seq+2"),
        (lambda s: 2 * s["seq"] - 1, "2*seq-1"),
        (lambda s: s["batch"] * s["seq"], "batch*seq"),
        (lambda s: (s["seq"] + 1) // 2, "(seq+1)//2"),
        (lambda s: s["batch"] ** 3 + 1, None),
    ],
)
def test_a_size_is_named_by_the_simplest_formula_that_fits(formula, text):
    found = fit([(s, formula(s)) for s in SIZES])
    assert (None if found is None else str(found)) == text


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), min_size=1, max_size=5))
def test_a_cost_prints_as_an_expression_of_the_same_value(terms):
    dims = [Dim(1, ("batch",)), Dim(3, ("seq",)), Dim(1, ("seq",), 1, 2), Dim(offset=7), Dim(2, ("seq",), 5)]
    total, expected, sizes = Cost(), 0, {"batch": 3, "seq": 10}
    for coefficient, count in terms:
        total.add(coefficient, *dims[: count + 1])
        product = coefficient
        for dim in dims[: count + 1]:
            product *= dim.at(sizes)
        expected += product
    assert cost.evaluate(str(total), sizes) == expected


def observed(formula, sizes):
    return [(s, formula(s)) for s in sizes]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 7, 10, 20, 48, 100, 320, 512]), st.integers(-400, 400), st.integers(1, 4000))
def test_any_stride_and_padding_is_found_in_a_few_sizes_more(divisor, offset, size):
    def windows(sizes):
        return (sizes["time"] + offset) // divisor

    size += max(0, -offset) + 4 * divisor
    tried = [{"batch": 3, "time": n} for n in (size, size + 3, size + 1, 2 * size, size - 1, 4 * size)]
    tried[1:] = [{**s, "batch": 2} for s in tried[1:]]
    for _ in range(24):
        more = next_size(observed(windows, tried), "time", size)
        if more is None:
            break
        tried.append({"batch": 3, "time": more})
    found = fit(observed(windows, tried))
    assert found is not None
    for n in range(size, size + 3 * divisor):
        assert found.at({"batch": 1, "time": n}) == windows({"time": n})


def test_a_size_may_be_a_product_of_quotients():
    sizes = [
        {"batch": b, "h": h, "w": w} for b, h, w in [(3, 16, 24), (2, 19, 24), (2, 32, 24), (2, 16, 29), (5, 16, 24)]
    ]
    quotients = [Dim(1, ("h",), 0, 4), Dim(1, ("w",), 0, 4)]
    found = fit(observed(lambda s: (s["h"] // 4) * (s["w"] // 4) + 1, sizes), quotients)
    assert str(found) == "((h)//4)*((w)//4)+1"
    assert found.involved == ("h", "w")
    folded = fit(observed(lambda s: s["batch"] * ((s["h"] // 4) * (s["w"] // 4) + 1), sizes), [*quotients, found])
    assert str(folded) == "batch*(((h)//4)*((w)//4)+1)"
    assert folded.involved == ("batch", "h", "w")
    rows = fit(observed(lambda s: 2 * s["batch"] * (s["h"] // 4) * (s["w"] // 4), sizes), quotients)
    assert cost.evaluate(str(rows), {"batch": 2, "h": 11, "w": 9}) == 16
    total = Cost()
    total.add(3, rows, found)
    assert cost.evaluate(str(total), {"batch": 2, "h": 11, "w": 9}) == 3 * 16 * 5
