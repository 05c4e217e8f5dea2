"""Fixtures that several folders share: shared files where they are, and bundles exported once a session."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

# Kernels run in Triton's interpreter, on CPU, unless `TRITON_INTERPRET=0 pytest -m cuda` asks for a real GPU. It has
# to be said before anything imports triton, which torch.export does.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Beside as many other workers as there are cores, torch's threads wait for each other by spinning: single tests took
# 27 times longer.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"


def shared_path(relative: str) -> Path:
    """A file of ../shared, or a skip with the reason."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"../shared/{relative} isn't here: real models and golden values are kept beside the project")
    return path


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    return shared_path


def load_model_file(name: str) -> Any:
    """The module of a shared model, imported from its file as a user would."""
    path = shared_path(f"models/{name}/model.py")
    spec = importlib.util.spec_from_file_location(f"shared_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def minilm() -> Any:
    return load_model_file("minilm_clinc150")


@pytest.fixture(scope="session")
def ar_vit() -> Any:
    return load_model_file("ar_vit_cifar10")


def exported_once(factory: pytest.TempPathFactory, name: str, model: Any) -> Path:
    """The bundle of a shared model, which the first of the workers that needs it exports."""
    from offramp.export import export_bundle

    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that all workers have theirs in
    bundle = folder / name
    with FileLock(f"{bundle}.lock"):
        if not bundle.exists():
            export_bundle(
                model.build(),
                model.example_inputs(),
                bundle,
                dynamic_axes=model.dynamic_axes(),
                classes=model.classes(),
            )
    return bundle


@pytest.fixture(scope="session")
def minilm_bundle(minilm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_once(tmp_path_factory, "minilm", minilm)


@pytest.fixture(scope="session")
def ar_vit_bundle(ar_vit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_once(tmp_path_factory, "ar_vit", ar_vit)


@pytest.fixture(scope="session")
def clinc_test(shared: Callable[[str], Path]) -> dict[str, np.ndarray]:
    with np.load(shared("data/clinc150/test.npz")) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="session")
def digits() -> Path:
    """The bundle that ships with the package."""
    from offramp.runtime import sample

    return sample.BUNDLE
