"""Pages as tests read them: parsed without a browser, and laid out by one where there is one."""

import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_VOID = {"meta", "br", "img", "link", "input", "hr", "path", "use", "circle", "rect"}

# Widths that matter, and what sticks out without being in a box that scrolls. Answered as JSON in the title.
_MEASURE = """
<!doctype html><meta charset=utf-8><body style="margin:0"><iframe style="border:0;width:WIDTHpx;height:4000px"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.srcdoc = new TextDecoder().decode(Uint8Array.from(atob("PAGE"), (c) => c.charCodeAt(0)));
frame.onload = () => {
  const doc = frame.contentDocument;
  for (const folded of doc.querySelectorAll("details")) folded.open = true;
  const out = [...doc.body.querySelectorAll("*")].filter(
    (e) => e.getBoundingClientRect().right > WIDTH + 0.5 && !e.closest(".scroll, svg, [popover]"));
  document.title = JSON.stringify({
    width: doc.documentElement.scrollWidth,
    out: out.map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 60)}`),
    scrolling: [...doc.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth).length,
    drawings: [...doc.querySelectorAll("figure svg")].map((e) => Math.round(e.getBoundingClientRect().width)),
  });
};
</script>
"""


class Page(HTMLParser):
    """tags: all, with their attributes. headings, tables (rows of cells) and text; unclosed: what was left open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.headings, self.tables, self.text, self.unclosed, self._open = [], [], [], [], [], []
        self.feed(text)
        self.close()
        self.unclosed += self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag in ("h1", "h2", "h3", "summary"):
            self.headings.append("")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            self.unclosed.append(f"/{tag}")

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.text.append(data)
        if {"h1", "h2", "h3", "summary"} & set(self._open[-3:]):
            self.headings[-1] += data
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data

    def table(self, *head):
        """The rows of the table whose headings begin so, as dicts."""
        (found,) = [t for t in self.tables if tuple(t[0][: len(head)]) == head]
        return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def dumped_by_browser(address, profile, seconds):
    """The document that a browser has made of a page so many of its own seconds later. profile: a folder for it."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += [f"--virtual-time-budget={1000 * seconds}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def laid_out(text, width, folder):
    """What a browser makes of a page that is so many pixels wide, everything unfolded."""
    page = _MEASURE.replace("PAGE", base64.b64encode(text.encode()).decode()).replace("WIDTH", str(width))
    (folder / "measure.html").write_text(page, encoding="utf-8")
    dumped = dumped_by_browser((folder / "measure.html").as_uri(), folder / "profile", 10)
    (title,) = re.findall(r"<title>(.*?)</title>", dumped, re.DOTALL)
    return json.loads(html.unescape(title))
