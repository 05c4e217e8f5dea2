"""stdout in an encoding that lacks letters: drawings become plainer, names are escaped, nothing is a traceback."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from offramp.runtime import sample
from offramp.runtime.cli import COMMANDS, main
from offramp.runtime.cli.output import output

CLI = [sys.executable, "-m", "offramp.runtime.cli"]
PLAIN_STDOUT = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "the C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
# Every --help in one process: each command's imports are paid for once.
ALL_HELP = """
from offramp.runtime.cli import COMMANDS, main
for asked in ([], *([command] for command in COMMANDS)):
    try:
        main([*asked, "--help"])
    except SystemExit as stop:
        assert not stop.code, asked
"""


def run(command, environment, **options):
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    return subprocess.run(command, env={**given, **environment}, capture_output=True, check=False, **options)


@pytest.mark.parametrize("environment", PLAIN_STDOUT.values(), ids=PLAIN_STDOUT)
def test_every_help_is_printed(environment):
    done = run([sys.executable, "-c", ALL_HELP], environment)
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode("ascii")
    assert said.count("usage: offramp ") == 1 + len(COMMANDS)
    assert "--flops N,N,..." in said


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["bench", "BUNDLE", "DATA", "--seconds", "1"], "###"),
        (["evaluate", "BUNDLE", "DATA"], "balanced"),
        (["inspect", "BUNDLE"], "exit"),
        pytest.param(["demo", "--once"], "###", marks=pytest.mark.slow),
    ],
    ids=["bench", "evaluate", "inspect", "demo"],
)
def test_tables_and_bars_are_printed(tmp_path, arguments, shown):
    if arguments[0] == "demo":
        pytest.importorskip("fastapi")
    x, labels = sample.heldout()
    np.savez(tmp_path / "d.npz", x=x[:100], labels=labels[:100])
    meant = {"BUNDLE": str(sample.BUNDLE), "DATA": str(tmp_path / "d.npz")}
    done = run([*CLI, *(meant.get(one, one) for one in arguments)], PLAIN_STDOUT["the C locale"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert shown in done.stdout.decode("ascii")


@pytest.fixture
def printed(monkeypatch, tmp_path):
    """printed(text, encoding) -> how a command's print leaves it on a stdout with this encoding."""

    def through(text, encoding):
        with open(tmp_path / "said", "w", encoding=encoding) as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            with output():
                print(text)
        return (tmp_path / "said").read_text(encoding=encoding).rstrip("\n")

    return through


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("ascii", "##... \\u00e9 \\ud83d\\udc36 \\udcff"),
        ("latin-1", "##... é \\ud83d\\udc36 \\udcff"),
        ("utf-8", "█▌▎… é 🐶 \\udcff"),
    ],
)
def test_what_an_encoding_lacks_is_spelled_out_and_nothing_else(printed, encoding, said):
    assert printed("█▌▎… é 🐶 \udcff", encoding) == said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_stays_what_it_is(printed, encoding):
    found = {"größte": ['🐶 "quoted" \\', "naïve – €"]}
    assert json.loads(printed(json.dumps(found, ensure_ascii=False), encoding)) == found


@pytest.mark.parametrize(("where", "said"), [("nowhere/x.json", "nowhere isn't there"), (".", "which is a folder")])
def test_a_json_file_that_cannot_be_is_refused_before_the_work(tmp_path, monkeypatch, capsys, where, said):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", str(tmp_path / "no bundle"), "no data", "--json", where]) == 2
    assert said in capsys.readouterr().err
