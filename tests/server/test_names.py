"""Models with names that mean something in a URL, and servers that are mounted below another path."""

import json
import re
import shutil
from urllib.parse import quote, urljoin

import numpy as np
import pytest
from offramp.runtime import BundleError, Cascade
from offramp.runtime.files import seal
from offramp.server import create_app
from pages import BROWSER, dumped_by_browser
from starlette.applications import Starlette
from starlette.routing import Mount

NAMES = [
    "org/model", "org/", "/model", "a//b", "", "v2/models/infer", "a/ready", "a/infer", "a/versions/1", "two words",
    "100%", "%2F", "a%20b", "a+b", "a?b#c", "модель", "é", "e\u0301", "{model}", "(.*)", "line\nbreak", ".hidden",
    "a..b",
]  # fmt: skip
VERSIONS = ["", "1.0", "2024/01", "1/ready", "β", "a b", "ready", "infer"]


@pytest.fixture
def named(rows_bundle, tmp_path):
    """named(name, version): the rows bundle under that name, loaded."""
    opened = []

    def rename(name, version="1"):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        shutil.copytree(rows_bundle, folder, ignore=shutil.ignore_patterns("calibration*", "history*"))
        about = json.loads((folder / "manifest.json").read_bytes())
        (folder / "manifest.json").write_bytes(seal({**about, "name": name, "version": version}))
        opened.append(Cascade.load(folder, threads=1))
        return opened[-1]

    yield rename
    for cascade in opened:
        cascade.close()


def check(client, name, version, x):
    """Every path of the model, its name as clients write it: escaped but for the slash, or altogether."""
    body = {"inputs": [{"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}]}
    for safe in ("/", ""):
        model = f"/v2/models/{quote(name, safe=safe)}"
        for path in (model, f"{model}/versions/{quote(version, safe=safe)}"):
            described = client.get(path)
            assert described.status_code == 200, (path, described.text)
            assert (described.json()["name"], described.json()["versions"]) == (name, [version])
            assert client.get(f"{path}/ready").json() == {"name": name, "ready": True}, path
            answer = client.post(f"{path}/infer", json=body)
            assert answer.status_code == 200, (path, answer.text)
            assert (answer.json()["model_name"], answer.json()["model_version"]) == (name, version)
        assert client.get(f"{model}x").status_code == 404
        assert client.get(f"{model}/versions/{quote(version, safe=safe)}x/ready").status_code == 404
        assert client.post(f"{model}x/infer", json=body).status_code == 404


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_reached_by_its_name_whatever_it_is(named, serve, x, name):
    with serve(named(name)) as server, server.client() as client:
        check(client, name, "1", x)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["model", "org/model"])
def test_and_by_its_version(named, serve, x, name, version):
    with serve(named(name, version)) as server, server.client() as client:
        check(client, name, version, x)


@pytest.mark.parametrize("text", ["..", ".", "a/../b", "./a", "a/."])
def test_a_name_that_no_client_would_send_is_refused_as_the_bundle_is_loaded(named, text):
    for name, version, field in ((text, "1", "name"), ("model", text, "version")):
        with pytest.raises(BundleError, match=rf"manifest\.json: the model's {field} is .*clients take the dots out"):
            named(name, version)


def test_tritons_client_reaches_a_name_with_a_slash(named, serve, x):
    http = pytest.importorskip("tritonclient.http")
    with (
        serve(named("org/model", "2024")) as server,
        http.InferenceServerClient(server.url.removeprefix("http://")) as client,
    ):
        given = http.InferInput("x", x.shape, "FP32").set_data_from_numpy(x, binary_data=False)
        for version in ("", "2024"):
            assert client.is_model_ready("org/model", version)
            assert client.get_model_metadata("org/model", version)["name"] == "org/model"
            assert client.infer("org/model", [given], model_version=version).as_numpy("label").shape == (len(x),)


def mounted(cascade):
    inner = create_app(cascade)
    outer = Starlette(routes=[Mount("/p", inner), Mount("/deep/er", inner)])
    outer.state = inner.state
    return outer


@pytest.mark.parametrize("below", ["/p", "/deep/er"])
@pytest.mark.parametrize("page", ["/", "/try", "/docs"])
def test_pages_of_a_mounted_server_find_all_that_they_link_and_fetch(rows, listen, below, page):
    with listen(mounted(rows)) as server, server.client() as client:
        address = f"{server.url}{below}{page}"
        text = client.get(address).text
        links = re.findall(r'(?:src|href)="([^"]+)"', text)
        script = next(link for link in links if link.endswith(".js"))
        code = client.get(urljoin(address, script)).text
        fetched = re.findall(r'(?<!\.)\b(?:get|json|fetch)\("([^"]+)"', code)
        assert fetched
        for link in links + fetched:
            assert urljoin(address, link).startswith(f"{server.url}{below}/"), link
            assert client.get(urljoin(address, link)).status_code in (200, 405), link  # 405: it is posted to
        document = client.get(f"{below}/openapi.json").json()
        assert document["servers"] == [{"url": below}]
        assert f"{below}/docs" in client.get(f"{below}/none").json()["error"]


def test_a_mounted_server_answers_and_its_model_may_have_a_slash(named, listen, x):
    with listen(mounted(named("org/model", ""))) as server, server.client() as client:
        client.base_url = f"{server.url}/p"
        check(client, "org/model", "", x)
        assert len(client.post("/v1/predict", json={"instances": np.zeros((2, 8)).tolist()}).json()["predictions"]) == 2
        assert client.head("/v2/health/ready").status_code == 200


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize(("page", "shown"), [("/", "live, since the server"), ("/docs", "/v1/predict")])
def test_a_browser_shows_a_mounted_servers_pages(rows, listen, tmp_path, page, shown):
    with listen(mounted(rows)) as server:
        dumped = dumped_by_browser(f"{server.url}/p{page}", tmp_path, 3)
    assert shown in dumped
