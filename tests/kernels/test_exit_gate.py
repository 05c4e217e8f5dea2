"""The Triton gate against the numpy reference: shapes, dtypes, strides, ties, extremes."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from offramp.kernels import exit_gate, reference
from offramp.runtime import scores
from offramp.runtime.metrics import auroc_f

torch = pytest.importorskip("torch", reason="kernels take torch tensors")

# The fixture is the session's device, the same for every example.
examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

extremes = st.sampled_from([0.0, 3e38, -3e38, math.inf, -math.inf, 88.5, -200.0, 1e-30])
values = st.one_of(st.floats(-60, 60, width=32), extremes, st.integers(-2, 2).map(float))


def matrices(most_classes: int = 40, elements=values):
    return hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, most_classes)), elements=elements)


def check(got, want, rtol=2e-6, atol=2e-6):
    """Labels and decisions to the bit, scores to float32, the rest as their float32 sums allow."""
    assert got.label.tolist() == want.label.tolist()
    assert got.leave.tolist() == want.leave.tolist()
    np.testing.assert_allclose(got.score.cpu().numpy(), want.score, rtol=rtol, atol=atol)
    for name in ("confidence", "entropy", "margin"):
        np.testing.assert_allclose(getattr(got, name).cpu().numpy(), getattr(want, name), rtol=1e-5, atol=1e-6)


@examples
@given(matrices(), st.sampled_from(DTYPES))
def test_it_agrees_with_the_reference_however_extreme_the_logits(device, z, dtype):
    tensor = torch.from_numpy(z).to(device, dtype)
    check(exit_gate(tensor), reference.exit_gate(tensor.double().cpu().numpy()))


@examples
@given(
    matrices(12, st.integers(-30, 30).map(float)),
    st.data(),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]),
    st.floats(-5, 5),
)
def test_scale_bias_temperature_and_threshold_are_those_of_the_reference(device, z, data, uniform, threshold):
    classes = z.shape[1]
    vector = hnp.arrays(np.float32, classes, elements=st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0]))
    scale, bias, by_class = (data.draw(vector) for _ in range(3))
    for inverse in (uniform, by_class):
        want = reference.exit_gate(z, scale, bias, inverse)
        # A threshold at a score itself is reached; hypothesis wouldn't find one by chance.
        for bar in (threshold, float(exit_gate(torch.from_numpy(z).to(device), scale, bias, inverse).score[0])):
            got = exit_gate(torch.from_numpy(z).to(device), scale, bias, inverse, bar)
            assert got.leave.tolist() == (got.score.double() >= bar).tolist()
        check(exit_gate(torch.from_numpy(z).to(device), scale, bias, inverse), want)


@pytest.mark.parametrize(
    ("rows", "classes"),
    [(1, 1), (3, 2), (33, 150), (4, 1000), (2, 8192), (2, 8193), (3, 32000), (1, 128256), (1, 262144)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_is_served(device, rows, classes, dtype):
    torch.manual_seed(rows + classes)
    z = (torch.randn(rows, classes) * 5).to(dtype).to(device)
    check(exit_gate(z, threshold=1.0), reference.exit_gate(z.double().cpu().numpy(), threshold=1.0))


def test_a_long_row_with_a_temperature_of_its_labels_own(device):
    torch.manual_seed(0)
    z, inverse = torch.randn(3, 20000, device=device) * 5, torch.rand(20000, device=device) + 0.5
    wide = inverse.double().cpu().numpy()
    check(exit_gate(z, inv_temperature=inverse), reference.exit_gate(z.double().cpu().numpy(), inv_temperature=wide))


@pytest.mark.parametrize("classes", [7, 9000])
def test_any_stride_is_taken(device, classes):
    torch.manual_seed(1)
    wide = torch.randn(12, classes + 5, device=device) * 4
    for z in (
        wide[:, 2 : 2 + classes],
        wide[::3, :classes],
        wide[:1, :classes].expand(4, -1),
        wide[:, :classes].T.contiguous().T,
    ):
        check(exit_gate(z), reference.exit_gate(z.double().cpu().numpy()))


@pytest.mark.parametrize("classes", [5, 8200, 40000])
def test_ties_go_to_the_lowest_index_wherever_they_are(device, classes):
    z = torch.zeros(3, classes, device=device)
    z[0, [1, classes - 1]] = 4.0
    z[1, [classes // 2, classes - 1]] = 4.0
    got = exit_gate(z)
    assert got.label.tolist() == [1, classes // 2, 0]
    check(got, reference.exit_gate(z.cpu().numpy()))


@pytest.mark.parametrize("classes", [1, 3, 9000])
def test_nan_and_infinities_are_as_in_the_reference(device, classes):
    z = torch.zeros(6, classes, device=device)
    z[0, 0] = math.nan
    z[1, -1] = math.nan
    z[2, 0] = math.inf
    z[3] = -math.inf
    z[4] = math.inf
    z[5, -1] = math.inf
    check(exit_gate(z), reference.exit_gate(z.cpu().numpy()))
    assert exit_gate(z, threshold=-math.inf).leave.tolist()[:2] == [False, False]


def test_rows_that_are_not_live_never_leave(device):
    z = torch.tensor([[9.0, 0], [9.0, 0], [0.1, 0]], device=device)
    live = torch.tensor([True, False, True], device=device)
    assert exit_gate(z, threshold=1.0, live=live).leave.tolist() == [True, False, False]


def test_no_rows_give_no_answers(device):
    assert [len(column) for column in exit_gate(torch.zeros(0, 4, device=device))] == [0] * 6


def test_what_is_not_a_matrix_is_refused(device):
    with pytest.raises(ValueError, match="expected \\(rows, classes"):
        exit_gate(torch.zeros(3, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spread", "tolerance"), [(3, 1e-7), (8, 1e-6), (30, 1e-5)])
def test_the_auroc_of_scores_from_16_bit_logits_is_that_of_float64_on_the_same_values(device, dtype, spread, tolerance):
    """Rounding happened before: the gate itself adds no tie and no inversion that AUROC sees.

    At a spread of 30 softmax is 1 for a quarter of the rows; there, rows whose float64 scores differ by less than
    float32 can tell are tied, which is all of the difference.
    """
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.standard_normal((3000, 30)) * spread).to(dtype)
    labels = np.where(rng.random(3000) < 0.8, z.float().argmax(1).numpy(), rng.integers(0, 30, 3000))
    got = exit_gate(z.to(device))
    exact = scores.log_odds(z.double().numpy())
    error = got.label.cpu().numpy() != labels
    if spread == 30:
        assert (scores.softmax(z.float().numpy()).max(axis=1) == 1).mean() > 0.1, "a case that softmax can't rank"
    assert auroc_f(got.score.cpu().numpy(), error) == pytest.approx(auroc_f(exact, error), abs=tolerance)
    rounded = auroc_f(exact.astype(np.float32), error)
    assert auroc_f(got.score.cpu().numpy(), error) == pytest.approx(rounded, abs=2e-6)


def test_a_score_that_saturates_softmax_is_still_ranked(device):
    behind = torch.linspace(20, 3000, 500)
    z = torch.stack([behind, torch.zeros(500), torch.zeros(500)], 1).to(device)
    score = exit_gate(z).score.cpu().numpy()
    assert (np.diff(score) > 0).all()
    np.testing.assert_allclose(score, behind.numpy() - math.log(2), rtol=1e-6)


def test_tensors_that_triton_does_not_serve_are_done_by_numpy_or_by_torch(monkeypatch):
    import sys

    from offramp.kernels import eager
    from offramp.kernels import exit_gate as function

    module = sys.modules[function.__module__]
    monkeypatch.setattr(module, "on_triton", lambda tensor: False)
    torch.manual_seed(0)
    z = torch.randn(20, 7).bfloat16()
    got, want = (
        exit_gate(z, threshold=0.5),
        reference.exit_gate(z.double().numpy(), threshold=0.5),
    )
    check(got, want)
    check(eager.exit_gate(z, threshold=0.5), want)
    check(
        eager.exit_gate(torch.tensor([[math.inf, math.nan], [math.inf, math.inf], [0.0, -math.inf]])),
        reference.exit_gate([[math.inf, math.nan], [math.inf, math.inf], [0.0, -math.inf]]),
    )


def test_a_row_just_below_a_threshold_stays(device):
    """Float32 rounds 0.7 down; a score equal to that is still below the threshold."""
    score = np.nextafter(np.float32(0.7), np.float32(0))
    candidates = np.linspace(float(score) - 1e-6, float(score) + 1e-6, 200, dtype=np.float32)
    z = torch.tensor(np.stack([candidates, np.zeros_like(candidates)], 1), device=device)
    out = exit_gate(z, threshold=0.7)
    assert out.leave.tolist() == [float(s) >= 0.7 for s in out.score.cpu().numpy()]
    assert float(np.float32(0.7)) in out.score.tolist()
