"""Tables from flat lines: what a column is called, which value it has, how that is written, which term explains it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from offramp.runtime.jobs.pages.terms import Terms

Line = Mapping[str, Any]
Format = Callable[[Any], str]
NONE = "–"


def text(value: Any) -> str:
    return NONE if value is None else escape(str(value))


def long(value: Any) -> str:
    """Text that may be broken into lines."""
    return text(value)


def name(value: Any) -> str:
    """A user's name for something, perhaps a long one: cut off by the page, whole on hover."""
    return NONE if value is None else f"<span title='{escape(str(value))}'>{escape(str(value))}</span>"


def percent(value: Any) -> str:
    return NONE if value is None else f"{value:.2%}".replace("-", "−")


def four(value: Any) -> str:
    return NONE if value is None else f"{value:.4g}".replace("-", "−")


def count(value: Any) -> str:
    return NONE if value is None else f"{value:,}"


def held(value: Any) -> str:
    """Yes and no where rows show it, else that they don't."""
    return {True: "<span class='good'>yes</span>", False: "<span class='bad'>no</span>"}.get(value, "not shown")


def flag(value: Any) -> str:
    return "<span class='bad'>yes</span>" if value else "no"


def threshold(value: Any) -> str:
    """A threshold as JSON has it: infinities are words there."""
    return _beyond(value, "all", "off")


# Thresholds beyond any score are infinite: float32's lowest number is one.
_ENDLESS = 1e30


def _beyond(value: Any, low: str, high: str) -> str:
    if value is None:
        return NONE
    number = float(value)
    if abs(number) >= _ENDLESS:
        return high if number > 0 else low
    return f"{number:.3f}".replace("-", "−")


def abstains(value: Any) -> str:
    """An abstain_below as JSON has it."""
    return _beyond(value, "never", "always")


_CLASSES: dict[Format, str] = {text: "text", long: "text long", name: "text name"}


@dataclass(frozen=True)
class Column:
    """title: its heading. field: of the lines; …_low and …_high are shown behind it where they are there.

    term: the glossary's, where the heading isn't one itself.
    """

    title: str
    field: str
    form: Format = text
    term: str = ""


def table(columns: Sequence[Column], lines: Sequence[Line], terms: Terms | None = None, caption: str = "") -> str:
    """A table that scrolls by itself where it is wider than the page. caption: HTML."""
    if not lines:
        return "<p class='quiet'>Nothing.</p>"
    head = "".join(f"<th{_kind(c)} scope='col'>{_heading(c, terms)}</th>" for c in columns)
    rows = []
    for line in lines:
        cells = "".join(f"<td{_kind(c)}>{_cell(line, c)}</td>" for c in columns)
        rows.append(f"<tr>{cells}</tr>")
    # Beside the table, not in it: it is read without scrolling.
    below = f"<p class='quiet'>{caption}</p>" if caption else ""
    return (
        "<div class='scroll' tabindex='0' role='region' aria-label='table'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{below}"
    )


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], terms: Terms | None = None) -> str:
    """A table of cells that are text already."""
    found = [Column(title, str(k)) for k, title in enumerate(head)]
    return table(found, [{str(k): cell for k, cell in enumerate(row)} for row in rows], terms)


def _heading(column: Column, terms: Terms | None) -> str:
    return escape(column.title) if terms is None else terms.of(column.title, column.term or column.title)


def _kind(column: Column) -> str:
    found = _CLASSES.get(column.form)
    return f" class='{found}'" if found else ""


def _cell(line: Line, column: Column) -> str:
    value = column.form(line.get(column.field))
    low, high = line.get(f"{column.field}_low"), line.get(f"{column.field}_high")
    if low is None or high is None:
        return value
    return f"{value} <small>[{column.form(low)}, {column.form(high)}]</small>"
