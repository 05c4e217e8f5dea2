"""What the container does, without a container: install from what the build sees, serve, ask, stop."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def build_context(folder):
    """The files that a container build is given: those that Dockerfile.dockerignore lets through."""
    for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], folder / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
    return folder


def clean_environment(**more):
    """This machine's, less what says which Python, packages or settings to use."""
    mine = ("VIRTUAL_ENV", "PYTHON", "OFFRAMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(mine)} | more


def run(*command, **more):
    return subprocess.run(command, env=clean_environment(**more), capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A fresh virtual environment, made by install.sh from the container's build context."""
    source = build_context(tmp_path_factory.mktemp("source") / "two words, [brackets] & more")
    target = tmp_path_factory.mktemp("opt") / "off ramp"
    done = run(source / "deploy/install.sh", target)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(source)  # the container leaves it behind as well
    return target


def python(installed, code):
    done = run(installed / "bin/python", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_clean_environment_serves_and_stops(installed):
    bundle = python(installed, "from offramp.runtime import sample; print(sample.BUNDLE)")
    assert bundle.startswith(str(installed))
    process = subprocess.Popen(
        [installed / "bin/offramp", "serve"],
        env=clean_environment(OFFRAMP_BUNDLE=bundle, OFFRAMP_PORT="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = re.search(r"http://\S+:\d+", process.stdout.readline())[0]
        with httpx.Client(base_url=address, timeout=60) as client:
            model = client.get("/v1/operating-points").json()["model"]
            (given,) = client.get(f"/v2/models/{model}").json()["inputs"]
            rows = np.zeros([2, *given["shape"][1:]], int).tolist()
            answer = client.post("/v1/predict", json={"instances": rows}).json()
            assert len(answer["predictions"]) == 2
            counted = f'offramp_rows_total{{model="{model}",operating_point="full",version="1"}} 2.0'
            assert counted in client.get("/metrics").text
            for page in ("/", "/docs", "/static/live.js", "/v2/health/ready"):
                assert client.get(page).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_serving_brings_no_training_library(installed):
    code = "from importlib.metadata import distributions; print(*(d.name.lower() for d in distributions()))"
    names = python(installed, code)
    assert not {"torch", "onnx", "scipy", "pandas", "matplotlib"} & set(names.split())


def test_the_health_check_is_a_command_that_the_container_has():
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert 'CMD ["python", "/opt/offramp/health.py"]' in dockerfile
    assert "COPY deploy/health.py /opt/offramp/health.py" in dockerfile
    assert "!deploy/health.py" in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()


def test_the_container_runs_as_nobody_in_particular():
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert re.search(r"^USER 10001$", dockerfile, re.MULTILINE)
    assert dockerfile.index("USER 10001") < dockerfile.index("ENTRYPOINT")


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        ([], {}, "TARGET"),
        (["a", "b", "c"], {}, "TARGET"),
        (["{tmp}/venv", "{tmp}/nowhere.whl"], {}, "nowhere.whl"),
        (["{tmp}/venv"], {"PYTHON": "false"}, "Python 3.11"),
    ],
)
def test_install_refuses_what_it_cannot_do_and_leaves_nothing(tmp_path, arguments, env, said):
    done = run(ROOT / "deploy/install.sh", *(a.format(tmp=tmp_path) for a in arguments), **env)
    assert done.returncode == 2
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []
