"""The command line: help for every command, one line and exit code 2 for bad input."""

import argparse
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import sample
from offramp.runtime.cli import COMMANDS, EXAMPLES, main
from offramp.runtime.errors import how_to_install


def run(capsys, *arguments) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "usage: offramp" in out
    assert f"Example: offramp {command}" in " ".join(out.split())


@pytest.mark.parametrize(("command", "line"), EXAMPLES.items())
def test_an_example_is_one_that_its_parser_takes(command, line):
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    assert line.split()[:2] == ["offramp", command]
    parser.parse_args(line.replace("%%", "%").split()[2:])


def test_help_lists_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_the_installed_command_and_the_module_print_the_version():
    for command in ([str(Path(sys.executable).with_name("offramp"))], [sys.executable, "-m", "offramp.runtime.cli"]):
        assert (
            subprocess.run([*command, "version"], capture_output=True, text=True, check=True).stdout.strip() == "0.1.0"
        )


def test_record_calibrate_predict_in_a_row(capsys, tmp_path):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    x, y = sample.heldout()
    np.savez(tmp_path / "d.npz", x=x, labels=y)
    assert run(capsys, "record", bundle, tmp_path / "d.npz", "--out", tmp_path / "r")[0] == 0
    code, out, _ = run(capsys, "calibrate", bundle, tmp_path / "r", "--budget", "half=50%", "--abstain-risk", "0.1")
    assert code == 0
    assert "half" in out
    code, out, err = run(capsys, "predict", bundle, tmp_path / "d.npz", "--operating-point", "half", "--probabilities")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == len(y)
    assert np.mean([line["label"] == label for line, label in zip(lines, y, strict=True)]) > 0.95
    assert abs(sum(lines[0]["probabilities"]) - 1) < 1e-5
    assert "497 rows" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "nowhere", "x.npz"], "nowhere: no such folder"),
        (["predict", str(sample.BUNDLE), "x.npz"], "x.npz: no such file"),
        (["predict", str(sample.BUNDLE), "x.npz", "--operating-point", "warp"], "operating_point is 'warp'"),
        (["record", str(sample.BUNDLE), "x.npz", "--out", "r"], "x.npz: no such file"),
        (["calibrate", str(sample.BUNDLE), "nowhere"], "records.json: can't be read"),
        (["calibrate", str(sample.BUNDLE), "r", "--budget", "half"], "or NAME=NUMBER, such as balanced=0.5"),
        (["calibrate", str(sample.BUNDLE), "r", "--delta", "7"], "expected a number in (0, 1)"),
        (["export", "m.py:build", "--out", "b"], "--example is missing"),
        (["export", "m.py:build", "--example", "m.py:e", "--out", "b"], "m.py: no such file"),
        (["export", "m.onnx", "--out", "b"], "m.onnx: not an ONNX model"),
        (["fly"], "no command 'fly'. There are export, attach"),
        (["calibarte", "b"], "no command 'calibarte'. Did you mean calibrate?"),
        (["--sideways"], "required"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def takes_overwrite(command):
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    return "--overwrite" in parser.format_usage()


def test_overwrite_is_named_where_it_helps_and_only_there(capsys, tmp_path):
    np.savez(tmp_path / "d.npz", x=sample.heldout()[0])
    lines = {
        "record": (["record", sample.BUNDLE, tmp_path / "d.npz"], "records.json"),
        "repack": (["repack", sample.BUNDLE, "--exits", "0"], "manifest.json"),
        "export": (["export", tmp_path / "m.onnx"], "manifest.json"),
        "attach": (["attach", tmp_path], "attached.json"),
        "train": (["train", tmp_path, tmp_path / "d.npz"], "attached.json"),
        "make": (["make", tmp_path, "--train", tmp_path / "d.npz", "--val", tmp_path / "d.npz"], "manifest.json"),
    }
    (tmp_path / "attached.json").touch()
    # tests/runtime/jobs/auditing has the audit, which needs a model with routing.
    assert {*lines, "audit"} == {command for command in COMMANDS if takes_overwrite(command)}
    for command, (line, marker) in lines.items():
        out = tmp_path / command
        out.mkdir()
        (out / "thesis.txt").write_text("years")
        code, _, err = run(capsys, *line, "--out", out)
        assert code == 2, command
        assert f"already exists, and has no {marker}" in err, command
        assert "--overwrite" not in err, command
        (out / marker).write_text("{}")
        code, _, err = run(capsys, *line, "--out", out)
        assert code == 2, command
        assert "already exists: choose another place, or replace it by --overwrite" in err, command
        assert (out / "thesis.txt").read_text() == "years"


def test_the_help_of_export_says_what_its_functions_return(capsys):
    code, out, _ = run(capsys, "export", "--help")
    assert code == 0
    for function in ("build", "example_inputs", "dynamic_axes", "classes"):
        assert f"def {function}():" in out
    assert '{"input_ids": {0: "batch", 1: "seq"}' in out
    said = " ".join(out.split())
    assert "{name: tensor or array}" in said
    assert "{input: {axis: name}}" in said
    assert "a list of one string a logit" in said
    assert "Example: offramp export model.py:build" in said


@pytest.mark.parametrize("out", ["/dev/null/x", "/proc/x"])
def test_a_place_that_cannot_be_written_is_one_line(capsys, tmp_path, out):
    np.savez(tmp_path / "d.npz", x=sample.heldout()[0][:2])
    code, _, err = run(capsys, "record", sample.BUNDLE, tmp_path / "d.npz", "--out", out)
    assert code == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("offramp: /")


def test_a_full_disk_is_one_line(tmp_path):
    np.savez(tmp_path / "d.npz", x=sample.heldout()[0][:50])
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "offramp.runtime.cli", "predict", str(sample.BUNDLE), str(tmp_path / "d.npz")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the output couldn't be written (No space left on device)" in done.stderr


CLI = [sys.executable, "-m", "offramp.runtime.cli"]


@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
@pytest.mark.parametrize("arguments", [["version"], ["history", "BUNDLE"], ["--help"]])
def test_output_that_nobody_takes_is_one_line_and_exit_code_1(tmp_path, stdout, arguments):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    command = shlex.join([*CLI, *(str(bundle) if one == "BUNDLE" else one for one in arguments)])
    done = subprocess.run(["sh", "-c", f"{command} {stdout}"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("offramp: the output couldn't be written (")


def test_a_calibration_in_force_whose_output_is_lost_says_that_it_stands(tmp_path):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((300, 3)).astype(np.float32)
    for j in range(2):
        np.save(tmp_path / f"{j}.npy", logits * (j + 1))
    np.save(tmp_path / "y.npy", logits.argmax(1))
    own = ["--logits", "0.npy", "1.npy", "--labels", "y.npy", "--out", "o", "--calibrator", "none"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*CLI, "calibrate", *own], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False
        )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("what the command did before that stands.")
    assert (tmp_path / "o" / "calibration.json").is_file()


def test_offramp_by_itself_prints_its_help_with_an_example(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert "Example: offramp calibrate" in " ".join(out.split())
    assert all(command in out for command in COMMANDS)


def test_options_may_stand_between_positionals(capsys, tmp_path):
    for order in (["B", "--seed", "1", "R"], ["--seed", "1", "B", "R"], ["B", "R", "--seed", "1"]):
        code, _, err = run(capsys, "calibrate", *(tmp_path / one if one in ("B", "R") else one for one in order))
        assert code == 2
        assert f"{tmp_path / 'R'}/records.json: can't be read" in err, order


def test_doctor_says_what_is_here(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["offramp"] == "0.1.0"
    assert "CPUExecutionProvider" in lines["providers"]
    assert {"python", "numpy", "onnxruntime", "cores", "affinity", "quota", "threads", "copies"} <= set(lines)


@pytest.mark.parametrize(
    ("tried", "code", "said"),
    [
        ({"AExecutionProvider": "no device", "BExecutionProvider": ""}, 0, "BExecutionProvider\nnot working     AExec"),
        ({"AExecutionProvider": "no device"}, 1, "none of those that are installed works"),
    ],
)
def test_doctor_tells_providers_that_work_from_those_that_are_only_installed(capsys, monkeypatch, tried, code, said):
    monkeypatch.setattr("offramp.runtime.cli.doctor.tried_providers", lambda: tried)
    ended, out, _ = run(capsys, "doctor")
    assert ended == code
    assert f"providers       {said}" in out
    assert "not working     AExecutionProvider: no device" in out


def test_doctor_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert out.splitlines()[-1].endswith("Run: pip install onnxruntime (or onnxruntime-gpu on a machine with CUDA)")


@pytest.mark.parametrize("extra", [extra for _, _, extra in COMMANDS.values() if extra])
def test_a_hint_works_from_a_clone_and_brings_no_cuda_build(extra):
    hint = how_to_install(extra)
    assert f'pip install ".[{extra}]"' in hint
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"][extra]
    if any(re.match(r"torch\b", one) for one in wanted):
        torch = re.search(r"pip install torch --index-url https://download\.pytorch\.org/whl/cpu", hint)
        assert torch is not None
        assert torch.start() < hint.index(f".[{extra}]"), "torch first"


def test_a_missing_extra_is_named_with_the_command_that_installs_it(capsys, tmp_path, monkeypatch):
    bundle = shutil.copytree(sample.BUNDLE, tmp_path / "b")
    np.savez(tmp_path / "d.npz", x=sample.heldout()[0], labels=sample.heldout()[1])
    assert run(capsys, "record", bundle, tmp_path / "d.npz", "--out", tmp_path / "r")[0] == 0
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    code, _, err = run(capsys, "calibrate", bundle, tmp_path / "r")
    assert code == 2
    assert 'needs scipy. In offramp\'s clone run: pip install ".[jobs]"' in err


def test_inspect_shows_and_draws(capsys, tmp_path):
    code, out, _ = run(capsys, "inspect", sample.BUNDLE, "--html", tmp_path / "p.html", "--svg", tmp_path / "p.svg")
    assert code == 0
    for word in ("block_2.onnx", "segment_0_2.onnx", "relu_2", "12,288", "ms at 32", "5.32 M"):
        assert word in out
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert "http:" not in (tmp_path / "p.html").read_text().replace("http://www.w3.org/2000/svg", "")
    code, out, _ = run(capsys, "inspect", sample.BUNDLE, "--json", "--no-times")
    assert json.loads(out)["blocks"][1]["flops"] == 5323776
    assert run(capsys, "inspect", sample.BUNDLE, "--size", "seq=3")[0] == 2


MODEL = """
import torch
def build():
    class M(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)
        def forward(self, x):
            y = self.a(x)
            return [y, self.b(torch.relu(y))]
    return M().eval()
def example_inputs(): return {"x": torch.zeros(2, 4)}
def dynamic_axes(): return {"x": {0: "batch"}}
def classes(): return ["eins", "zwei", "drei €"]
def broken(): raise RuntimeError("no weights")
"""


def test_export_takes_a_model_from_a_file(capsys, tmp_path):
    file = tmp_path / "my model.py"
    file.write_text(MODEL)
    arguments = ["--example", f"{file}:example_inputs", "--dynamic", f"{file}:dynamic_axes"]
    code, out, _ = run(
        capsys, "export", f"{file}:build", *arguments, "--classes", f"{file}:classes", "--out", tmp_path / "b"
    )
    assert code == 0
    assert "2 blocks, 3 classes" in out
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["classes"][2] == "drei €"
    for source, message in (
        (f"{file}:broken", "broken failed: RuntimeError: no weights"),
        (f"{file}:x", "no function 'x'"),
    ):
        code, _, err = run(capsys, "export", source, *arguments, "--out", tmp_path / "c")
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["calibrate", "x", "--budgte", "3"], "--budgte is no argument of it. Did you mean --budget?"),
        (["serve", "--zzz=1"], "--zzz=1 is no argument of it. `offramp serve --help`"),
        (["history", "a", "b", "c"], "b is no argument of it."),
        (["predict", "a"], "the following arguments are required: data"),
        (["calibrate", "x", "y", "--budget", "7"], "argument --budget: '7': expected a number in (0, 1]"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(capsys, arguments, said):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("offramp: ")
    assert said in err
    assert err.count("\n") == 1
