"""Tables say what a value is, and nothing where there is none."""

import math

import pytest
from offramp.runtime.jobs.pages import tables
from offramp.runtime.jobs.pages.tables import Column, plain_table, table
from pages import Page


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        (tables.threshold, -1.5, "−1.500"),
        (tables.threshold, "inf", "off"),
        (tables.threshold, "-inf", "all"),
        (tables.threshold, -3.4028234663852886e38, "all"),
        (tables.abstains, "-inf", "never"),
        (tables.abstains, -3.4028234663852886e38, "never"),
        (tables.abstains, math.inf, "always"),
        (tables.abstains, 1.25, "1.250"),
        (tables.percent, -0.001, "−0.10%"),
        (tables.count, 1234, "1,234"),
        (tables.held, None, "not shown"),
        (tables.four, 0.123456, "0.1235"),
    ],
)
def test_values_are_written_for_people(form, value, shown):
    assert form(value) == shown


@pytest.mark.parametrize(
    "form", [tables.text, tables.name, tables.percent, tables.four, tables.count, tables.threshold]
)
def test_what_is_not_known_is_a_dash(form):
    assert form(None) == tables.NONE


def test_intervals_stand_behind_their_values_and_names_are_escaped():
    lines = [{"a": 0.5, "a_low": 0.25, "a_high": 0.75, "n": "<i>'\""}, {"a": 0.5, "a_low": None, "a_high": 0.75}]
    text = table([Column("share", "a", tables.percent), Column("who", "n", tables.name)], lines)
    rows = Page(text).table("share", "who")
    assert [row["share"] for row in rows] == ["50.00% [25.00%, 75.00%]", "50.00%"]
    assert [row["who"] for row in rows] == ["<i>'\"", tables.NONE]
    assert "<i>" not in text
    assert Page(plain_table(["<b>", "x"], [["1", "&"]])).table("<b>") == [{"<b>": "1", "x": "&"}]
    assert "Nothing" in table([], [])
