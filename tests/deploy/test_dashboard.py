"""What the dashboard and the scrape configuration name is what a server exports."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from offramp.runtime import Cascade, Online
from offramp.server import create_app
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def app(digits, tmp_path_factory):
    """One that learns, with figures of a labelled row."""
    pytest.importorskip("sqlalchemy")
    kept = Online(tmp_path_factory.mktemp("kept") / "kept.db")
    with Cascade.load(digits, threads=1, recalibration=kept) as cascade:
        app = create_app(cascade)
        out = cascade.predict({"x": np.zeros((1, 8, 8), np.uint8)})
        cascade.feedback(out.ids, [0])
        app.state.follower.look(measure=True)
        yield app


@pytest.fixture(scope="module")
def exported(app):
    """The labels of every sample name of ours that /metrics gives."""
    from prometheus_client import generate_latest

    text = generate_latest(app.state.metrics.registry).decode()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in (one for one in family.samples if one.name.startswith("offramp_")):
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((DEPLOY / "grafana/offramp.json").read_text())


def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_that_a_panel_names_is_exported(dashboard, exported):
    named = {name for expression in expressions(dashboard) for name in re.findall(r"\bofframp_\w+", expression)}
    assert named
    assert named <= exported.keys()


def test_every_kind_of_number_that_is_exported_is_on_the_dashboard(dashboard, exported):
    text = " ".join(expressions(dashboard))
    for name in exported:
        if not name.endswith(("_created", "_sum", "_count", "_bucket")):
            assert name in text, name


def test_selectors_and_groupings_use_exported_labels_only(dashboard, exported):
    for expression in expressions(dashboard):
        there = set()
        for name, selector in re.findall(r"\b(offramp_\w+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert used <= exported[name], expression
            there |= exported[name]
        for group in re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right) \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",") if label.strip()} <= there, expression


def test_legends_use_labels_that_their_expression_keeps(dashboard):
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            kept = {n for group in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for n in group.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_outcomes_in_selectors_are_outcomes_that_are_counted(dashboard):
    from offramp.server.metrics import OUTCOMES

    for expression in expressions(dashboard):
        for choice in re.findall(r'outcome!?[=~]+"([^"]*)"', expression):
            assert set(choice.split("|")) <= set(OUTCOMES)


def test_every_expression_is_promql(dashboard):
    promql = pytest.importorskip("promql_parser")
    for expression in expressions(dashboard):
        promql.parse(expression.replace("$__rate_interval", "5m"))


def test_variables_read_exported_labels_and_are_used(dashboard, exported):
    text = json.dumps(dashboard["panels"])
    for variable in dashboard["templating"]["list"]:
        assert f"${variable['name']}" in text or f"${{{variable['name']}}}" in text
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()
            assert label in exported[metric]


def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_scrape_path_is_a_route_and_the_port_the_default(app):
    from offramp.server import Settings

    config = (DEPLOY / "prometheus.yml").read_text()
    assert re.search(r"metrics_path: (\S+)", config)[1] in app.openapi()["paths"]
    assert re.search(r"localhost:(\d+)", config)[1] == str(Settings.model_fields["port"].default)
    assert not re.search(r"\bofframp_", config)


def test_the_readme_names_exported_metrics_and_all_of_them(exported):
    text = (DEPLOY / "README.md").read_text()
    families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in exported if not name.endswith("_created")}
    assert set(re.findall(r"`(offramp_\w+)", text)) == families
