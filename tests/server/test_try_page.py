"""The page where one types a sentence, in a real browser."""

import html
import re
import urllib.parse

import pytest
from offramp.runtime import Cascade, sample
from pages import BROWSER, Page, dumped_by_browser

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def intents(tmp_path_factory):
    folder = sample.intents(tmp_path_factory.mktemp("try") / "intents")
    with Cascade.load(folder, operating_point="fast") as cascade:
        yield cascade


@pytest.fixture
def shown(tmp_path):
    """What the page shows for a text: its words, and its elements by id."""

    def shown(server, text, **more):
        query = urllib.parse.urlencode({"text": text, **more})
        dumped = dumped_by_browser(f"{server.url}/try?{query}", tmp_path / "profile", 20)
        found = dict(re.findall(r'<\w+ id="(\w+)"[^>]*>([^<]*)', dumped))
        shares = re.findall(r'<span class="share">([^<]*)</span>', dumped)
        return Page(dumped), {name: html.unescape(value) for name, value in found.items()}, shares

    return shown


def test_a_sentence_leaves_where_it_is_sure_enough(intents, serve, shown):
    with serve(intents) as server:
        _, found, steps = shown(server, "what is my account balance")
        assert found["answer"] == "balance"
        assert found["abstained"].startswith("Answered, ")
        assert steps[0].endswith("leaves here")
        assert steps[1:] == ["not run"] * 3
        assert float(found["flops"].rstrip("%")) < 30
        assert found["took"].endswith(" ms")
        assert found["whole"].endswith(" ms")


def test_one_that_is_hard_goes_through_every_exit_and_may_abstain(intents, serve, shown):
    texts = sample.sentences()[1]
    hard = next(t for t in texts if (out := intents.predict(intents.preprocess([t]))).exit[0] == 3 and out.abstain[0])
    with serve(intents) as server:
        _, found, steps = shown(server, hard)
    assert found["abstained"].startswith("Abstains: ")
    assert [step.rpartition(" · ")[2] for step in steps] == ["goes on"] * 3 + ["leaves here"]
    assert found["flops"] == "100.0%"


def test_markup_is_text_and_another_point_can_be_chosen(intents, serve, shown):
    with serve(intents) as server:
        page, found, steps = shown(server, '<img src=x onerror="document.title=1">&', point="full")
        assert found["answer"]
        assert steps[:3] == ["isn't asked at this point"] * 3
        assert not [tag for tag, _ in page.tags if tag == "img"]


def test_a_bundle_that_takes_no_texts_says_so(rows_server, shown):
    _, found, _ = shown(rows_server, "hello")
    assert "says nothing about raw rows" in found["state"]
