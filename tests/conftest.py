"""Fixtures that several folders share: shared files where they are, and bundles exported once a session."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Kernels run in Triton's interpreter, on CPU, unless `TRITON_INTERPRET=0 pytest -m cuda` asks for a real GPU. It has
# to be said before anything imports triton, which torch.export does.
os.environ.setdefault("TRITON_INTERPRET", "1")

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


@pytest.fixture(scope="session")
def minilm_bundle(minilm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from offramp.export import export_bundle

    return export_bundle(
        minilm.build(),
        minilm.example_inputs(),
        tmp_path_factory.mktemp("minilm") / "bundle",
        dynamic_axes=minilm.dynamic_axes(),
        classes=minilm.classes(),
    )


@pytest.fixture(scope="session")
def ar_vit_bundle(ar_vit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from offramp.export import export_bundle

    return export_bundle(
        ar_vit.build(),
        ar_vit.example_inputs(),
        tmp_path_factory.mktemp("ar_vit") / "bundle",
        dynamic_axes=ar_vit.dynamic_axes(),
        classes=ar_vit.classes(),
    )


@pytest.fixture(scope="session")
def clinc_test(shared: Callable[[str], Path]) -> dict[str, np.ndarray]:
    with np.load(shared("data/clinc150/test.npz")) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.fixture(scope="session")
def digits() -> Path:
    """The bundle that ships with the package."""
    from offramp.runtime import sample

    return sample.BUNDLE
