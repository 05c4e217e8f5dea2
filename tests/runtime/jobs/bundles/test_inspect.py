"""What a bundle is made of: figures are the manifest's formulas at the sizes that were asked for."""

import pytest
import torch
from offramp.export import export_bundle
from offramp.runtime import Cascade
from offramp.runtime.bundle import read_bundle
from offramp.runtime.jobs.bundles.inspect import inspect
from offramp.runtime.jobs.bundles.timing import Timings
from toys import Masked, make


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    inputs = {"ids": torch.randint(1, 40, (3, 6)), "mask": torch.ones(3, 6, dtype=torch.int64)}
    axes = {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}
    return export_bundle(make(Masked), inputs, tmp_path_factory.mktemp("inspect") / "b", dynamic_axes=axes)


@pytest.mark.parametrize("seq", [1, 12, 50])
def test_the_flops_of_the_blocks_add_up_to_what_a_row_costs(bundle, seq):
    found = inspect(read_bundle(bundle), {"seq": seq})
    with Cascade.load(bundle, threads=1) as cascade:
        costs = cascade.row_flops({"seq": seq}).tolist()
    assert [sum(part.flops for part in found.blocks[: k + 1]) for k in range(3)] == costs
    assert found.sizes == {"seq": seq}


def test_every_carried_tensor_and_every_byte_of_it_is_told(bundle):
    short, long = (inspect(read_bundle(bundle), {"seq": seq}) for seq in (10, 20))
    names = {one.name for one in short.carried}
    assert names == {name for part in short.blocks for name in part.carried}
    for one, other in zip(short.carried, long.carried, strict=True):
        assert other.bytes == (2 if "seq" in one.shape else 1) * one.bytes
        assert one.shape.split(", ")[one.batch_axis].strip("[]") == "batch"
    state = next(one for one in short.carried if one.shape == "[batch, seq, 16]")
    assert state.bytes == 10 * 16 * 4
    for part in short.blocks[:-1]:
        assert part.handed_on == sum(one.bytes for one in short.carried if one.name in part.carried)
    assert short.blocks[-1].handed_on == 0


def test_files_are_as_large_as_they_are(bundle):
    found = inspect(read_bundle(bundle), {"seq": 10})
    for name, size in found.files.items():
        assert (bundle / name).stat().st_size == size
    for part in (*found.blocks, *found.segments):
        assert part.file_bytes == (bundle / part.file).stat().st_size
    assert found.cascade_graph.file_bytes == (bundle / "cascade.onnx").stat().st_size


def test_segments_say_which_blocks_they_merge(bundle):
    found = inspect(read_bundle(bundle), {"seq": 10})
    assert [part.blocks for part in found.blocks] == [(0, 0), (1, 1), (2, 2)]
    assert [(s.blocks, s.exit) for s in found.segments] == [
        ((0, 1), found.exits[1]),
        ((0, 2), found.exits[2]),
        ((1, 2), found.exits[2]),
    ]
    for segment in found.segments:
        first, last = segment.blocks
        # The heads of the exits between are dropped.
        assert segment.flops < sum(part.flops for part in found.blocks[first : last + 1])


def test_times_are_those_that_were_measured_and_none_where_nothing_was(bundle):
    read = read_bundle(bundle)
    files = [block.file for block in read.manifest.blocks]
    alone = Timings((1, 8), {files[0]: (0.1, 0.2)})
    inside = Timings((1, 8), {file: (float(k), k + 0.5) for k, file in enumerate(files)})
    found = inspect(read, {"seq": 10}, alone, inside)
    assert [part.seconds for part in found.blocks] == [(0.1, 0.2), None, None]
    assert found.cascade_graph.seconds == ((0.0, 0.5), (1.0, 1.5), (2.0, 2.5))
    assert found.rows == (1, 8)
    assert inspect(read, {"seq": 10}).cascade_graph.seconds is None
