import io

import numpy as np
import pytest
from offramp.runtime import metrics, plots, scores
from offramp.runtime.errors import InputError


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    z = random.normal(0, 2, (500, 6))
    y = np.where(random.random(500) < scores.msr(z), z.argmax(1), z.argmin(1))
    return scores.softmax(z), y, scores.log_odds(z), z.argmax(1) != y


def drawn(ax):
    """Renders without a display, and isn't empty."""
    target = io.BytesIO()
    ax.figure.savefig(target, format="png")
    assert target.getbuffer().nbytes > 5000
    return ax


def test_a_reliability_diagram_has_bars_at_the_accuracy_and_a_curve(data):
    p, y, _, _ = data
    ax = drawn(plots.reliability_diagram(p, y, bins=10))
    table = metrics.reliability(p, y, 10)
    heights = [bar.get_height() for bar in ax.containers[0]]
    np.testing.assert_allclose(heights, table.accuracy[table.count > 0])
    assert f"{metrics.ece(p, y, 10):.4f}" in ax.get_title()
    assert [text.get_text() for text in ax.texts] == [f"{n:,}" for n in table.count[table.count > 0]]
    assert ", n = 500" in ax.get_title()
    bands = [band.get_paths()[0].vertices[:, 1] for band in ax.collections]
    wanted = [
        metrics.share_interval(round(a * n), int(n)) for a, n in zip(table.accuracy, table.count, strict=True) if n
    ]
    np.testing.assert_allclose([(band.min(), band.max()) for band in bands], wanted)
    assert len(ax.lines) == 2
    assert len(plots.reliability_diagram(p, y, smooth=False).lines) == 1


def test_risk_coverage_curves_carry_their_aurc(data):
    _, _, s, e = data
    ax = drawn(plots.risk_coverage({"log-odds": (s, e), "chance": (np.zeros(500), e)}))
    assert len(ax.lines) == 2
    assert f"{metrics.aurc(s, e):.4f}" in ax.get_legend().texts[0].get_text()


def test_operating_points_lie_where_they_are(data):
    random = np.random.default_rng(1)
    s = random.normal(size=(3, 300))
    curve = metrics.cost_accuracy(s, s > 0, [1.0, 2.0, 3.0])
    ax = drawn(plots.cost_accuracy(curve, {"balanced": (2.0, 0.7)}, unit="ms"))
    assert ax.lines[1].get_xydata().tolist() == [[2.0, 0.7]]
    assert ax.get_xlabel() == "ms"


def test_exit_shares_stack_to_one():
    ax = drawn(plots.exit_shares({"fast": [0.6, 0.3, 0.1], "full": [0.0, 0.0, 1.0]}))
    assert sum(container[0].get_width() for container in ax.containers) == pytest.approx(1.0)
    with pytest.raises(InputError, match="same number of exits"):
        plots.exit_shares({"a": [1.0], "b": [0.5, 0.5]})


def test_eefp_bars_leave_out_the_exit_that_has_none():
    random = np.random.default_rng(2)
    s = random.normal(size=(3, 200))
    correct = s + random.normal(size=(3, 200)) > 0
    ax = drawn(plots.eefp_bars(s, correct))
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], metrics.eefp(s, correct)[:2])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1"]
    assert not ax.texts


def test_classes_of_one_name_have_a_bar_each(data):
    p, y, _, _ = data
    assert len(drawn(plots.cwmcs_by_class(p, y, classes=["same"] * 6)).patches) == 6


def test_classes_are_sorted_by_miscalibration_and_thinned(data):
    p, y, _, _ = data
    ax = drawn(plots.cwmcs_by_class(p, y, classes=list("abcdef"), most=4))
    heights = [bar.get_height() for bar in ax.patches]
    assert len(heights) == 4
    assert heights == sorted(heights, reverse=True)
    with pytest.raises(InputError, match="classes"):
        plots.cwmcs_by_class(p, y, classes=["one"])


def test_matched_gaps_are_drawn_bin_by_bin(data):
    p, _, _, e = data
    gap = metrics.matched_gap(p.max(1), ~e, np.random.default_rng(3).random(500))
    ax = drawn(plots.matched_gaps(gap))
    assert len(ax.patches) == gap.shared_bins


def test_a_plot_can_share_an_axes_of_the_user(data):
    from matplotlib.figure import Figure

    p, y, _, _ = data
    ax = Figure().add_subplot()
    assert plots.reliability_diagram(p, y, ax=ax) is ax
