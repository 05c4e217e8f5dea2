"""The words that pages explain are the glossary's, and each explanation opens where its word is."""

import re
from pathlib import Path

import pytest
from offramp.runtime.jobs.pages.terms import TERMS, Terms
from pages import Page

GLOSSARY = Path(__file__).parents[4] / "docs" / "glossary.md"
ENTRIES = {
    names: " ".join(text.split())
    for names, text in re.findall(
        r"^- \*\*(.+?)\*\*: (.*(?:\n  .*)*)", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE
    )
}


@pytest.mark.parametrize("term", TERMS)
def test_a_page_says_what_the_glossary_says(term):
    (found,) = [text for names, text in ENTRIES.items() if term in (names, *names.split(", "))]
    assert found.startswith(" ".join(TERMS[term].split()))


def test_a_term_opens_its_explanation_by_mouse_finger_and_key_and_is_in_the_glossary_once():
    terms = Terms()
    shown = terms.of("drop") + terms.of("accuracy drop") + terms.of("at most", "promise") + terms.of("a & b")
    assert shown.endswith("a &amp; b"), "no term, only text"
    page = Page(shown + terms.explained() + terms.glossary())
    buttons = [attrs for tag, attrs in page.tags if tag == "button"]
    opened = {attrs["id"] for tag, attrs in page.tags if tag == "div" and "popover" in attrs}
    assert [button["title"] for button in buttons] == [TERMS["accuracy drop"]] * 2 + [TERMS["promise"]]
    assert {button["popovertarget"] for button in buttons} == opened
    assert [tag for tag, _ in page.tags].count("dt") == len(opened) == 2
    assert not page.unclosed
