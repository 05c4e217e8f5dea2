"""The demo runs by itself and prints what it promises."""

import re
import subprocess
import sys

import pytest
from offramp.runtime.cli import main

pytest.importorskip("tokenizers")


def percent(output, line, column):
    (found,) = [text for text in output.splitlines() if text.startswith(line)]
    return float(found.removeprefix(line).split()[column].rstrip("%"))


def test_demo_once_prints_the_numbers_and_ends():
    done = subprocess.run(
        [sys.executable, "-m", "offramp.runtime.cli", "demo", "--once"], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert len(re.findall(r"^  plain +[\d.,]+ (?:ms|rows/s) +█+$", out, re.MULTILINE)) == 3
    assert len(re.findall(r"^  offramp +[\d.,]+ (?:ms|rows/s) +█+$", out, re.MULTILINE)) == 3
    assert percent(out, "accuracy", 0) > 95
    lost = percent(out, "points lost", 1)
    assert lost == pytest.approx(percent(out, "accuracy", 0) - percent(out, "accuracy", 1), abs=1e-9)
    assert lost <= 0.5
    assert percent(out, "error among the answered", 1) <= 2
    assert percent(out, "abstains on other topics", 1) > 80
    assert percent(out, "FLOPs", 1) < 30
    assert "http" not in out.replace("over HTTP", ""), "what nobody can open any more isn't offered"


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999999999999"])
def test_a_port_that_is_none_is_one_sentence_at_once(capsys, port):
    assert main(["demo", "--port", port]) == 2
    assert capsys.readouterr() == ("", f"offramp: --port is {port}, expected 0 to 65535.\n")
