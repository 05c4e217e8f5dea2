"""Cost expressions are arithmetic and nothing else."""

import pytest
from offramp.runtime import BundleError, cost


def test_an_expression_is_evaluated_at_axis_sizes():
    assert (
        cost.evaluate("batch*(160 + 2048*seq + 64*seq*seq) + 7", {"batch": 2, "seq": 10})
        == 2 * (160 + 20480 + 6400) + 7
    )
    assert cost.evaluate("(height+1)//2 - 3", {"height": 9}) == 2
    assert cost.axes_of("batch*seq + 1") == {"batch", "seq"}


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "batch.real",
        "batch**9999999",
        "1.5",
        "'a'",
        "[1]",
        "batch if 1 else 2",
        "-1",
        "",
        "1 +",
        "x" * 30_000,
        "(" * 500,
    ],
)
def test_anything_else_is_refused(expression):
    with pytest.raises(BundleError, match="cost expression"):
        cost.evaluate(expression, {"batch": 1})


def test_an_unknown_axis_and_a_division_by_zero_are_named():
    with pytest.raises(BundleError, match="needs the axis 'seq'"):
        cost.evaluate("seq", {"batch": 1})
    with pytest.raises(BundleError, match="divides by zero"):
        cost.evaluate("1//batch", {"batch": 0})
