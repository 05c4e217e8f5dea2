"""Drawings inside a page: in its colours, of one size, with a caption; what can't be drawn is said, not drawn empty."""

import re

import pytest
from offramp.runtime import plots
from offramp.runtime.errors import InputError
from offramp.runtime.jobs.pages.figures import CYCLE, Figure, figures
from pages import Page

pytest.importorskip("matplotlib")
NAME = "<b>$x_1$ & “ünï” 中文"


def line(ax):
    for k, _ in enumerate(CYCLE):
        ax.plot([0, 1], [k, 1], label=NAME if not k else f"line {k}")
    ax.bar([0], [1], color=[plots.PALE])
    ax.legend()


def nothing(ax):
    raise InputError("there is no test row.")


def test_a_drawing_has_only_the_colours_of_the_page_and_a_users_letters():
    text = figures([Figure("a <title>", "and a caption & more.", line)])
    assert "<b>$x" not in text
    assert "&lt;b&gt;$x_1$ &amp; “ünï” 中文" in text
    assert "<b>a &lt;title&gt;.</b> and a caption &amp; more." in text
    assert set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r"light-dark\([^)]*\)", "", text))) <= {"#000000"}
    assert "var(--ink)" in text
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not Page(text).unclosed


def test_all_are_of_one_size_and_their_ids_are_their_own():
    text = figures([Figure("a", "", line), Figure("b", "", line)])
    boxes = re.findall(r'viewBox="([^"]*)"', text)
    assert len(boxes) == 2
    assert len(set(boxes)) == 1
    ids = re.findall(r'\bid="([^"]*)"', text)
    clips = [one for one in ids if not re.match(r"(figure|axes|patch|line2d|matplotlib|xtick|ytick|text|legend)", one)]
    assert len(clips) == len(set(clips))
    again = figures([Figure("a", "", line), Figure("b", "", line)])
    assert again == text, "the same bytes for the same drawing"


def test_what_is_not_defined_is_said_in_a_line():
    text = figures([Figure("a", "", nothing), Figure("b", "", line)])
    assert text.count("<svg") == 1
    assert "Not drawn: a: there is no test row." in text
    assert figures([Figure("a", "", nothing)]).startswith("<p")
