"""How docstrings are shown: a line that begins with `name: …` describes an argument or a field, and starts a line
of its own on the page."""

import re
from typing import Any

from griffe import Extension, Object

NAMES = r"(?P<names>[a-zA-Z_]\w*(?:, [a-zA-Z_]\w*)*)"
FIELD = re.compile(NAMES + r": (?=\S)")
BEHIND_ANOTHER = re.compile(r"(?<=[.;]) " + NAMES + r"(?=: \S)")


def listed(text: str, names: set[str]) -> str:
    """The docstring with a list item for each line that describes some of these names."""

    def known(found: re.Match[str]) -> bool:
        return set(found["names"].split(", ")) <= names

    lines: list[str] = []
    for line in BEHIND_ANOTHER.sub(lambda m: f"\n{m['names']}" if known(m) else m[0], text).splitlines():
        found = FIELD.match(line)
        if found and known(found):
            if lines and lines[-1] and not lines[-1].startswith("- "):
                lines.append("")
            line = f"- `{found['names']}`: {line[found.end() :]}"
        elif lines and lines[-1].startswith("- ") and line and not line.startswith(" "):
            line = "  " + line
        lines.append(line)
    return "\n".join(lines)


class Fields(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        names: set[str] = set()
        if obj.is_function:
            names = {parameter.name.lstrip("*") for parameter in obj.parameters}  # type: ignore[attr-defined]
        elif obj.is_class:
            names = set(obj.members)
            if "__init__" in obj.members:
                names |= {p.name for p in obj.members["__init__"].parameters}  # type: ignore[union-attr]
        if names:
            obj.docstring.value = listed(obj.docstring.value, names)
