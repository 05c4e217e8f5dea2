"""One command makes a bundle of a classifier with one exit, and goes on where it was killed."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import layers, rows
from offramp.export.making.steps import Steps
from offramp.runtime import Cascade, InputError
from offramp.runtime.cli import main


@pytest.fixture
def home(tmp_path):
    """A model's file, and rows that it answers, train and val."""
    (tmp_path / "model.py").write_text(
        "from classifiers import layers as build, rows\n\n\ndef example():\n    return {'x': rows()}\n"
    )
    for name, count, seed in (("train", 600, 1), ("val", 400, 2)):
        x = rows(count, seed)
        with torch.no_grad():
            labels = layers()(x).argmax(1).numpy()
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), labels=labels)
    return tmp_path


def arguments(home, out="bundle", **options):
    given = {"train": home / "train.npz", "val": home / "val.npz", "out": home / out, "epochs": 10, "seconds": 0}
    given |= {"example": f"{home}/model.py:example", "max-drop": "10%", "exits": "0"} | options
    flat = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return ["make", f"{home}/model.py:build", *flat]


def contents(bundle):
    """What a bundle says, but for its dates."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    calibration = json.loads((bundle / "calibration.json").read_text())
    weights = (bundle / "weights.bin").read_bytes() if (bundle / "weights.bin").exists() else b""
    points = {name: point["thresholds"] for name, point in calibration["operating_points"].items()}
    return [exit_["name"] for exit_ in manifest["exits"]], manifest["classes"], points, calibration["version"], weights


def test_one_command_makes_a_calibrated_bundle(home, capsys):
    assert main(arguments(home)) == 0
    said = capsys.readouterr()
    assert "max-drop-10%" in said.out
    with Cascade.load(home / "bundle", operating_point="max-drop-10%") as cascade, np.load(home / "val.npz") as val:
        assert len(cascade.manifest.exits) == 2
        answers = cascade.predict({"x": val["x"]})
        assert (answers.label == val["labels"]).mean() > 0.85
    assert not list(home.glob(".bundle*"))


def refused(capsys, *arguments):
    """What is said, of a run that is refused before its first step."""
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert "training the heads" not in said
    return said


def test_what_cannot_be_done_is_said_before_anything_is(home, capsys):
    x = rows(60, 3).numpy()
    np.savez(home / "few.npz", x=x[:30], labels=np.zeros(30, int))
    np.savez(home / "wrong.npz", x=x, labels=np.full(60, 9))
    assert "has 30 labelled rows, expected at least 50" in refused(capsys, *arguments(home, val=home / "few.npz"))
    assert "labels[0] is 9" in refused(capsys, *arguments(home, test=home / "wrong.npz"))
    assert "exits has 9, the model's are 0 to" in refused(capsys, *arguments(home, exits="9"))
    twice = ["--max-drop", "5%", "--max-drop", "5%"]
    assert "the same drop is given twice" in refused(capsys, *arguments(home), *twice)
    assert not (home / "bundle").exists()


@pytest.mark.parametrize("command", ["make", "attach", "export"])
def test_a_folder_that_is_not_there_is_said_to_be_none(home, capsys, command):
    given = ["--train", str(home / "train.npz"), "--val", str(home / "val.npz")] if command == "make" else []
    said = refused(capsys, command, str(home / "nowhere"), *given, "--out", str(home / "o"))
    assert "nowhere: no such file or folder" in said


def test_points_that_lost_more_on_the_test_rows_than_was_asked_are_noted_when_a_stopped_run_goes_on_too(
    home, monkeypatch, capsys
):
    asked = ["2%", "14%", "38%"]
    flags = [text for drop in asked[1:] for text in ("--max-drop", drop)]
    options = {"max-drop": asked[0], "seconds": 0.2}
    do = Steps.do

    def refusing(self, name, *rest):
        if name == "times.json":
            raise InputError("no.")
        return do(self, name, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Steps, "do", refusing)
        assert main([*arguments(home, **options), *flags]) == 2
    assert capsys.readouterr().err.endswith("the same command goes on from there.\n")
    assert main([*arguments(home, **options), *flags]) == 0
    said = capsys.readouterr()
    assert "repacking and calibrating: done before" in said.err
    noted = {line.split(":")[1].strip() for line in said.err.splitlines() if "that decided nothing" in line}
    points = json.loads((home / "bundle" / "calibration.json").read_text())["operating_points"]
    most = {f"max-drop-{drop}": float(drop.removesuffix("%")) / 100 for drop in asked}
    assert noted == {name for name, drop in most.items() if points[name]["expected"]["drop"] > drop}
    assert noted
    assert "note: these are the rows of --val, which also chose exits and thresholds" in said.out


def test_rows_of_their_own_to_measure_on_need_no_word(home, capsys):
    assert main(arguments(home, test=home / "train.npz", seconds=0.2)) == 0
    said = capsys.readouterr().out
    assert "verdict: " in said
    assert "--val" not in said


@pytest.mark.parametrize(("step", "kept"), [("trained", False), ("exported", True)])
def test_an_interrupted_run_says_where_finished_steps_are_if_there_are_any(home, monkeypatch, capsys, step, kept):
    do = Steps.do

    def stopped(self, name, *rest):
        if name == step:
            raise KeyboardInterrupt
        return do(self, name, *rest)

    monkeypatch.setattr(Steps, "do", stopped)
    assert main(arguments(home)) == 130
    said = capsys.readouterr().err
    where = f"offramp: interrupted. What is finished is kept in {home}/.bundle.unfinished: the same command goes on"
    assert (where in said) is kept
    assert ("interrupted; nothing half-written was left" in said) is not kept


class Killed(BaseException):
    pass


@pytest.mark.slow
def test_a_run_that_ends_before_each_of_its_steps_goes_on_there_to_the_same_result(home, monkeypatch, capsys):
    options = {"max-drop": "0.01%"}  # which can't be had, and that is noted
    assert main(arguments(home, "expected", **options)) == 0
    noted = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert any("can be had only from the full model" in line for line in noted)
    do = Steps.do
    for step in ("exported", "records", "bundle", "times.json"):

        def dying(self, name, *rest, step=step):
            if name == step:
                raise Killed
            return do(self, name, *rest)

        with monkeypatch.context() as once:
            once.setattr(Steps, "do", dying)
            with pytest.raises(Killed):
                main(arguments(home, **options))
    capsys.readouterr()
    assert main(arguments(home, **options)) == 0
    said = capsys.readouterr().err.splitlines()
    assert "training the heads: done before" in said
    assert [line for line in said if line.startswith("note: ")] == noted
    assert contents(home / "bundle") == contents(home / "expected")


def test_a_step_is_done_again_when_it_or_one_before_it_changed(tmp_path):
    said = []

    def run(first, second):
        made = []
        steps = Steps(tmp_path / "steps", said.append)
        for name, given in (("first", first), ("second", second)):
            steps.do(name, name, given, lambda path, name=name: (made.append(name), path.write_text(name)))
        return made

    assert run(1, 1) == ["first", "second"]
    assert run(1, 1) == []
    assert run(1, 2) == ["second"]
    assert run(2, 2) == ["first", "second"]
    (tmp_path / "steps" / "second").unlink()
    assert run(2, 2) == ["second"]
    assert "first: done before" in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"train": "nowhere.csv"}, "--train nowhere.csv: no such file"),
        ({"seconds": -1}, "--seconds is -1.0"),
        ({"exits": 7}, "exits has 7"),
        ({"at": "layers.9"}, "at names 'layers.9'"),
        ({"held-out": 0.7}, "held_out is 0.7"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(home, capsys, options, named):
    assert main(arguments(home, **options)) == 2
    assert named in capsys.readouterr().err
    assert not (home / "bundle").exists()


def test_rows_to_calibrate_on_need_labels(home, capsys):
    with np.load(home / "val.npz") as val:
        np.savez(home / "bare.npz", x=val["x"])
    assert main(arguments(home, val=home / "bare.npz")) == 2
    assert "has no labels" in capsys.readouterr().err


# Says before each step how often the disk was touched until then; every pass of a training is a checkpoint.
DYING = """
import sys
import torch
torch.set_num_threads(1)
from killing import die_at
from offramp.export.making.steps import Steps
from offramp.export.training import features, fit, joint
from offramp.runtime.cli import main
features._CHECKPOINT_SECONDS = fit._CHECKPOINT_SECONDS = joint._CHECKPOINT_SECONDS = 0.0
do = Steps.do
def counted(self, name, *rest):
    print(name, done(), flush=True)
    return do(self, name, *rest)
Steps.do = counted
done = die_at(int(sys.argv[1]))
code = main(sys.argv[2:])
print("end", done(), flush=True)
sys.exit(code)
"""


def dying_at(touch, command):
    """The command in a process that dies at a touch of the disk: its exit code, and (step, touches until then)."""
    paths = os.pathsep.join([str(Path(__file__).parents[2] / "support"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", DYING, str(touch), *command],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    said = [line.split() for line in run.stdout.splitlines()]
    return run.returncode, [(line[0], int(line[1])) for line in said if len(line) == 2 and line[1].isdecimal()]


@pytest.mark.slow
@pytest.mark.parametrize("joint", [[], ["--joint"]], ids=["frozen", "joint"])
def test_killed_inside_each_of_its_steps_it_ends_as_if_undisturbed(home, joint):
    """At three moments of every step, the last one in front of what makes the step count."""
    code, begun = dying_at(-1, [*arguments(home, "expected"), *joint])
    assert code == 0
    moments = []
    for (step, start), (_, end) in pairwise(begun):
        assert end - start >= 3, step
        moments += [(step, start + round(share * (end - start - 1))) for share in (0.3, 0.7, 1)]
    for step, touch in moments:
        out = f"killed-{touch}"
        assert dying_at(touch, [*arguments(home, out), *joint])[0] == 9, step
        if not (home / out).exists():
            assert dying_at(-1, [*arguments(home, out), *joint])[0] == 0, step
        assert contents(home / out) == contents(home / "expected"), step
