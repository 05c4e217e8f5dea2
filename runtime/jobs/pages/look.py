"""A page of a job: one file that fetches nothing, in the look that the server's pages have, too."""

from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources

LOOK = "look.css"
# Nothing runs and nothing is fetched, whatever a name in the data tries.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@cache
def look() -> str:
    """The look that all pages share; the server hands out the same file."""
    return _read(LOOK)


def _read(name: str) -> str:
    return (resources.files("offramp.runtime") / "jobs" / "pages" / name).read_text(encoding="utf-8")


def document(title: str, body: Iterable[str]) -> str:
    """The whole page. title: plain text; body: HTML, empty parts are left out."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>\n{look()}{_read('page.css')}</style></head><body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A card with a heading (HTML); nothing where there are no parts."""
    found = "\n".join(part for part in parts if part)
    return f"<section><h2>{title}</h2>\n{found}</section>" if found else ""


def folded(title: str, *parts: str) -> str:
    """A card that is opened by who wants it; nothing where there are no parts."""
    found = "\n".join(part for part in parts if part)
    return f"<details class='card'><summary>{title}</summary>\n{found}</details>" if found else ""


def warning(title: str, sentences: Iterable[str]) -> str:
    """Plain sentences that must be seen; nothing where there are none."""
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<section class='warn'><h2>{escape(title)}</h2><ul>{said}</ul></section>" if said else ""


def pairs(found: Iterable[tuple[str, str]]) -> str:
    """Names and values, as plain text."""
    return f"<dl class='pairs'>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in found)}</dl>"
