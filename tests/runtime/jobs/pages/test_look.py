"""One look for the report, inspect, audit and the server's pages: one file, and no second rule for what it says."""

import re
from importlib import resources
from pathlib import Path

from offramp.runtime import sample
from offramp.runtime.bundle import read_bundle
from offramp.runtime.jobs.bundles.inspect import inspect
from offramp.runtime.jobs.bundles.inspect_page import page
from offramp.runtime.jobs.pages.look import document, folded, look, section, warning
from pages import Page

ROOT = Path(__file__).parents[4]


def test_a_page_fetches_and_runs_nothing_and_its_title_is_escaped():
    text = document("<i>&", ["<p>x</p>", "", section("A", ""), folded("B"), warning("C", [])])
    assert "<title>&lt;i&gt;&amp;</title>" in text
    assert text.endswith("<body>\n<p>x</p>\n</body></html>\n"), "what is empty isn't there"
    policy = next(a["content"] for t, a in Page(text).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "<li>&lt;b&gt;</li>" in warning("C", ["<b>"])


def test_the_pages_of_the_jobs_have_the_look_inside():
    inspected = page(inspect(read_bundle(sample.BUNDLE), {}))
    assert look() in inspected
    assert not Page(inspected).unclosed
    for name in ("report/page.py", "../auditing/page.py", "../bundles/inspect_page.py"):
        source = (ROOT / "runtime" / "jobs" / "calibrating" / name).read_text(encoding="utf-8")
        assert "pages.look import document" in source, name
        assert "<style" not in source, name


def test_the_servers_pages_load_it_and_say_nothing_of_it_again():
    static = resources.files("offramp.server") / "static"
    own = (static / "offramp.css").read_text(encoding="utf-8")
    for name in ("live.html", "docs.html", "try.html"):
        sheets = re.findall(r'rel="stylesheet" href="([^"]+)"', (static / name).read_text(encoding="utf-8"))
        assert sheets == ["static/look.css", "static/offramp.css"]
    tokens = set(re.findall(r"^\s*(--[\w-]+):|; (--[\w-]+):", look(), re.MULTILINE))
    shared = {a or b for a, b in tokens}
    assert {"--ink", "--paper", "--card", "--accent", "--bad"} <= shared
    assert not shared & set(re.findall(r"(--[\w-]+):", own)), "a colour has one place"
    used = set(re.findall(r"var\((--[\w-]+)\)", own))
    assert used <= shared | set(re.findall(r"(--[\w-]+):", own))


def test_every_colour_of_the_light_look_has_one_in_the_dark():
    light, dark = look().split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"(--[\w-]+):", light))
    assert names == set(re.findall(r"(--[\w-]+):", dark.split("* {")[0]))
