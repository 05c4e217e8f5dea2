"""Sizes are recognised as formulas, and costs print as formulas that evaluate to the same number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offramp.export.dims import Cost, Dim, fit
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
