"""Who stays, in order, and their state: one launch each, and one small copy for the host."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offramp.kernels import compact, gather, reference
from offramp.kernels.compact import Report
from offramp.kernels.exit_gate import gate_into
from offramp.kernels.reference import GateOutput, Survivors

torch = pytest.importorskip("torch", reason="kernels take torch tensors")
examples = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def kept(survivors) -> list[int]:
    return survivors.index[: int(survivors.count[0])].tolist()


@examples
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=70), st.booleans())
def test_compaction_is_stable_and_leaves_out_who_left_or_was_never_there(device, flags, with_live):
    leave, live = (torch.tensor(column, device=device) for column in zip(*flags, strict=True))
    got = compact(leave, live if with_live else None)
    assert kept(got) == [k for k, (goes, there) in enumerate(flags) if not goes and (there or not with_live)]


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 4096, 4097, 10_000])
def test_any_number_of_rows_is_compacted(device, rows):
    rng = np.random.default_rng(rows)
    leave, live = rng.random(rows) < 0.4, rng.random(rows) < 0.9
    want = reference.compact(leave, live)
    assert kept(compact(torch.from_numpy(leave).to(device), torch.from_numpy(live).to(device))) == kept(want)


@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (40, 10), (300, 5), (5, 9000), (4200, 4)])
def test_the_gate_and_the_compaction_are_one_launch_where_rows_allow(device, rows, classes):
    torch.manual_seed(rows)
    z, live = torch.randn(rows, classes, device=device) * 3, torch.rand(rows, device=device) < 0.8
    report = Report(rows, torch.device(device))
    out = GateOutput(report.label, None, report.score, None, None, report.leave)
    for _ in range(2):  # the second launch finds the tickets as the first did
        gate_into(out, z, threshold=1.0, live=live, survivors=Survivors(report.survivors, report.count))
    report.send()
    told = report.arrived()
    want = reference.exit_gate(z.cpu().numpy(), threshold=1.0, live=live.cpu().numpy())
    stay = reference.compact(want.leave, live.cpu().numpy())
    assert told["label"].tolist() == want.label.tolist()
    np.testing.assert_allclose(told["score"], want.score, rtol=2e-6, atol=2e-6)
    assert told["survivors"][: told["count"][0]].tolist() == kept(stay)


KINDS = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64]


@examples
@given(st.data())
def test_gather_moves_any_dtype_rank_and_batch_axis(device, data):
    batch = data.draw(st.integers(1, 9))
    sources, axes = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        rank = data.draw(st.integers(1, 4))
        axis = data.draw(st.integers(0, rank - 1))
        shape = [data.draw(st.integers(1, 5)) for _ in range(rank)]
        shape[axis] = batch
        size = math.prod(shape)
        kind = data.draw(st.sampled_from(KINDS))
        sources.append((torch.arange(size, device=device) % 97).to(kind).reshape(shape))
        axes.append(axis)
    index = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch))
    rows = data.draw(st.one_of(st.none(), st.integers(len(index), len(index) + 4)))
    got = gather(sources, torch.tensor(index, dtype=torch.int32, device=device), axes, rows)
    padded = index + [index[-1]] * ((rows or len(index)) - len(index))
    for one, source, axis in zip(got, sources, axes, strict=True):
        assert one.dtype == source.dtype
        assert torch.equal(one, source.index_select(axis, torch.tensor(padded, device=device)))


def test_gather_serves_rows_longer_than_a_tile_and_unaligned_ones(device):
    memory = torch.arange(4 * 5001, dtype=torch.int64, device=device).to(torch.int16)
    odd = memory[1 : 1 + 4 * 5000].view(4, 5000)  # two bytes past a multiple of eight
    long = torch.randn(2, 4, 4101, device=device)
    index = torch.tensor([3, 1], dtype=torch.int32, device=device)
    got = gather([odd, long], index, [0, 1])
    assert torch.equal(got[0], odd[[3, 1]])
    assert torch.equal(got[1], long[:, [3, 1]])


def test_gather_of_nothing_and_of_tensors_without_elements(device):
    assert gather([], torch.zeros(1, dtype=torch.int32, device=device), []) == []
    empty = torch.zeros(3, 0, device=device)
    assert gather([empty], torch.tensor([1], dtype=torch.int32, device=device), [0])[0].shape == (1, 0)


def test_a_transposed_view_is_refused_rather_than_copied_unseen(device):
    with pytest.raises(ValueError, match="contiguous"):
        gather([torch.zeros(3, 4, device=device).T], torch.tensor([1], dtype=torch.int32, device=device), [1])


def test_arrays_are_served_by_numpy():
    sources = [np.arange(12.0).reshape(2, 6), np.arange(6)]
    got = gather(sources, np.array([4, 1]), [1, 0], 3)
    assert got[0].tolist() == [[4, 1, 1], [10, 7, 7]]
    assert got[1].tolist() == [4, 1, 1]
    assert kept(compact(np.array([True, False, False]), np.array([True, True, False]))) == [1]


def test_torch_alone_does_what_triton_does(monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["offramp.kernels.compact"], "on_triton", lambda tensor: False)
    leave, live = torch.tensor([True, False, False, True, False]), torch.tensor([True, True, False, True, True])
    assert kept(compact(leave, live)) == [1, 4]
    assert kept(compact(leave)) == [1, 2, 4]
    source = torch.arange(10.0).reshape(2, 5)
    got = gather([source], torch.tensor([1, 4], dtype=torch.int32), [1], 3)
    assert got[0].tolist() == [[1, 4, 4], [6, 9, 9]]
