"""What the README and the guides show is what happens: programs print what stands below them, commands exist."""

import argparse
import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
SERVER = "127.0.0.1:8000"  # where the README's program asks; here the server takes a free port
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FLOAT = re.compile(r"\d+\.\d+")


@dataclass(frozen=True)
class Program:
    """A python block, and the block that follows it at once: what it prints, None if nothing is shown."""

    page: str
    number: int
    text: str
    shown: str | None

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def programs() -> Iterator[Program]:
    for page in PAGES:
        if page.parent.name == "tutorials":  # their programs need one another: tests/integration/test_tutorials.py
            continue
        text = page.read_text(encoding="utf-8")
        blocks = [*FENCED.finditer(text), None]
        found = [(a, b) for a, b in pairwise(blocks) if a is not None and a[1] == "python"]
        for number, (block, after) in enumerate(found):
            follows = after is not None and after[1] == "" and not text[block.end() : after.start()].strip()
            yield Program(page.name, number, block[2], after[2] if after is not None and follows else None)


@pytest.fixture
def server() -> Iterator[str]:
    """Where the server answers that the README starts."""
    line = next(c for c in commands(ROOT / "README.md") if c[:2] == ["offramp", "serve"])
    command = [sys.executable, "-m", "offramp.runtime.cli", *line[1:], "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        address = re.search(r"http://(127\.0\.0\.1:\d+)", greeting)
        assert address is not None, greeting
        yield address[1]
    finally:
        process.terminate()
        process.communicate(timeout=30)


def environment() -> dict[str, str]:
    """Programs run elsewhere, so what PYTHONPATH says is made absolute."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in paths if p)}


@pytest.mark.parametrize("program", list(programs()), ids=str)
def test_a_program_prints_what_stands_below_it(program, tmp_path, request):
    if "offramp.export" in program.text:
        pytest.importorskip("torch")
    text = program.text
    if SERVER in text:
        text = text.replace(SERVER, request.getfixturevalue("server"))
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if program.shown is not None:
        # Another processor may add up in another order: numbers with a point agree to a ten-thousandth.
        assert FLOAT.sub("#", done.stdout) == FLOAT.sub("#", program.shown), done.stdout
        printed, shown = (np.array(FLOAT.findall(t), float) for t in (done.stdout, program.shown))
        np.testing.assert_allclose(printed, shown, rtol=1e-4)


def test_the_three_ways_in_are_shown_with_what_they_print():
    readme = [p for p in programs() if p.page == "README.md"]
    assert len(readme) == 3
    assert all(p.shown is not None for p in readme)


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of sh blocks, continued ones joined; and code in a line of text."""
    text = page.read_text(encoding="utf-8")
    for block in FENCED.finditer(text):
        if block[1] == "sh":
            yield from block[2].replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", FENCED.sub("", text))


def commands(page: Path) -> Iterator[list[str]]:
    """What is run: ["offramp", "serve", …]; without comments, and up to what a shell would do with the result."""
    for line in shell_lines(page):
        if not re.match(r"\s*(\S*/)?(offramp|make|python|pip) ", line):
            continue
        for part in re.split(r"&&|\|\|", line):
            words = shlex.split(part, comments=True)
            if words:
                yield [words[0].rpartition("/")[2], *words[1:]]


def every(program: str) -> list[object]:
    found = {(page.name, shlex.join(c)): c for page in PAGES for c in commands(page) if c[0] == program}
    assert found, f"no page says {program!r}: does the pattern still fit?"
    return [pytest.param(c, id=f"{page}: {line}") for (page, line), c in found.items()]


@functools.cache
def parser(command: str) -> argparse.ArgumentParser:
    """The real one of a subcommand."""
    made = argparse.ArgumentParser(prog=f"offramp {command}", exit_on_error=False)
    importlib.import_module(COMMANDS[command][0]).add_arguments(made)
    return made


@pytest.mark.parametrize("line", every("offramp"))
def test_an_offramp_command_is_one_that_its_parser_takes(line, capsys):
    command, arguments = line[1], line[2:]
    if command == "…":  # "offramp …" stands for all of them
        return
    assert command in COMMANDS
    if not arguments or arguments == ["--help"]:  # the command's name in a sentence
        return
    try:
        parser(command).parse_args(arguments)
    except (argparse.ArgumentError, SystemExit) as error:
        pytest.fail(f"{shlex.join(line)}: {error} {capsys.readouterr().err}")


@pytest.mark.parametrize("line", every("make"))
def test_a_make_target_exists(line):
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert all(word in targets or "=" in word for word in line[1:])


@pytest.mark.parametrize("line", every("python"))
def test_a_script_exists(line):
    assert line[1] == "-m" or (ROOT / line[1]).is_file() or line[1] in given()


def given() -> set[str]:
    """Scripts that a tutorial has its reader write."""
    pages = ROOT.glob("docs/tutorials/*.md")
    return {name for page in pages for name in re.findall(r"^# (\w+\.py)$", page.read_text(encoding="utf-8"), re.M)}


@pytest.mark.parametrize("line", every("pip"))
def test_an_extra_exists(line):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = [name for word in line for group in re.findall(r"\[([\w,]+)\]", word) for name in group.split(",")]
    assert set(named) <= set(extras)
