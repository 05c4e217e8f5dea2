"""Columns line up whatever the script, and a name can't break a table."""

import pytest
from offramp.runtime.jobs.plain_text import aligned, columns, one_line, ranged


@pytest.mark.parametrize(("text", "wide"), [("abc", 3), ("猫", 2), ("é", 1), ("e\u0301", 1), ("", 0)])
def test_a_wide_letter_takes_two_columns_and_an_accent_none(text, wide):
    assert columns(text) == wide


def test_columns_line_up_behind_wide_letters():
    lines = aligned([("猫", "1"), ("abc", "22")])
    assert lines == ["猫   1", "abc  22"]


def test_a_name_cannot_break_a_line_or_colour_it():
    assert one_line("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert columns(one_line("猫" * 50)) <= 40
    assert one_line("x" * 40) == "x" * 40


def test_what_is_not_known_is_a_dash():
    assert ranged(None, None, None) == "-"
    assert ranged(0.5, 0.4, 0.6, 0) == "50% [40%, 60%]"
