"""What the documentation points at is there: sections, files, pages, names."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = ("export", "kernels", "runtime", "server")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_every_section_of_the_methods_that_code_names_is_there():
    headings = re.findall(r"^## (\d+)\. ", (DOCS / "methods.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {
        (path.relative_to(ROOT).as_posix(), number)
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"methods\.md,? (?:section |§)(\d+)", path.read_text(encoding="utf-8"))
    }
    assert named
    assert {number for _, number in named} <= set(headings), named


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_is_there(page):
    folders = "|".join((*SOURCES, "benchmarks", "deploy", "docs", "examples", "tests"))
    spans = code_spans(page.read_text(encoding="utf-8"))
    named = [span for span in spans if re.fullmatch(rf"({folders})/[\w./-]*", span)]
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_between_files_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(navigation) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.glob("**/*.md"))


@pytest.mark.parametrize("page", sorted((DOCS / "reference").glob("*.md")), ids=lambda p: p.stem)
def test_what_the_reference_names_can_be_imported(page):
    if page.stem == "export":
        pytest.importorskip("torch")
    names = re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    for name in names:
        assert pkgutil.resolve_name(name) is not None
