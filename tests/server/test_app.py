import subprocess
import sys

import pytest
from offramp.runtime import InputError
from offramp.server import Settings, create_app


def test_an_app_can_be_made_from_a_cascade_a_folder_or_settings(rows, rows_bundle, monkeypatch, listen, x):
    settings = Settings(bundle=rows_bundle, operating_point="fast")
    monkeypatch.setenv("OFFRAMP_BUNDLE", str(rows_bundle))
    made = {"balanced": create_app(rows), "full": create_app(rows_bundle), "fast": create_app(settings)}
    for point, app in made.items():
        with listen(app) as server, server.client() as client:
            reply = client.post("/v1/predict", json={"instances": x.tolist()})
            assert reply.json()["operating_point"] == point
    assert create_app().state.operating_points.default == "full"


def test_a_cascade_that_was_handed_in_stays_open(rows, listen, x):
    with listen(create_app(rows)) as server, server.client() as client:
        client.post("/v1/predict", json={"instances": x.tolist()})
    assert len(rows.predict({"x": x})) == 40


def test_without_a_bundle_the_error_says_how_to_name_one(monkeypatch):
    monkeypatch.delenv("OFFRAMP_BUNDLE", raising=False)
    with pytest.raises(InputError, match="name the bundle's folder: offramp serve BUNDLE, or OFFRAMP_BUNDLE"):
        create_app()


def test_every_setting_says_what_it_is():
    assert all(field.description for field in Settings.model_fields.values())


def test_the_server_loads_neither_torch_nor_onnx_nor_scipy():
    code = "import sys, offramp.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "onnx", "scipy", "matplotlib", "pandas"} & set(loaded)
