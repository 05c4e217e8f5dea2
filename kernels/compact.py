"""Who goes on after an exit, and moving their state: on the device, with one small number for the host."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from offramp.kernels import reference
from offramp.kernels.device import COMPACT_ROWS, as_bytes, is_tensor, on_triton, power_of_two
from offramp.kernels.reference import Survivors

if TYPE_CHECKING:
    import torch

_BLOCK = 1024
_TILE_WORDS = 2048


def compact(leave: Any, live: Any = None) -> Survivors:
    """The rows that don't leave (and are live), in their order.

    leave, live: (n,) bool, arrays or tensors. On CUDA nothing is waited for: the count stays on the device.
    """
    if not is_tensor(leave):
        return reference.compact(leave, live)
    import torch

    out = Survivors(
        torch.zeros(len(leave), dtype=torch.int32, device=leave.device),
        torch.zeros(1, dtype=torch.int32, device=leave.device),
    )
    compact_into(out, leave, live)
    return out


def compact_into(out: Survivors, leave: "torch.Tensor", live: "torch.Tensor | None" = None) -> None:
    """`compact` into tensors that are there already; beyond `count`, `index` keeps what it held."""
    rows = len(leave)
    if not on_triton(leave):
        stays = ~leave.bool() if live is None else ~leave.bool() & live.bool()
        places = stays.cumsum(0) - 1
        # Those that leave write to the place behind the last, which is cut off: no count is waited for.
        target = places.where(stays, rows)
        index = out.index.new_empty(rows + 1)
        index[:rows] = out.index
        index[target] = _counting(rows, target).to(index.dtype)
        out.index.copy_(index[:rows])
        out.count.copy_(stays.sum().to(out.count.dtype).reshape(1))
        return
    from offramp.kernels import compact_kernels

    flags = as_bytes(leave), None if live is None else as_bytes(live)
    if rows <= COMPACT_ROWS:
        compact_kernels.compact_rows[(1,)](*flags, out.index, out.count, rows, STEPS=-(-rows // _BLOCK), BLOCK=_BLOCK)
        return
    blocks = -(-rows // _BLOCK)
    counts = out.count.new_empty(blocks)
    compact_kernels.count_blocks[(blocks,)](*flags, counts, rows, BLOCK=_BLOCK)
    compact_kernels.place_blocks[(blocks,)](
        *flags, counts, out.index, out.count, rows, blocks, STEPS=-(-blocks // _BLOCK), BLOCK=_BLOCK
    )


def _counting(rows: int, like: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.arange(rows, device=like.device)


def gather(
    sources: list[Any], index: Any, axes: list[int], rows: int | None = None, out: list[Any] | None = None
) -> list[Any]:
    """Rows `index` of every tensor along its batch axis, all of them in one launch.

    sources: arrays, or contiguous tensors, of any dtype and rank. index: (m,) row numbers, m >= 1. axes: the batch
    axis of each. rows: how many the results have, m by default; beyond m the last row again, so that a padded
    batch holds nothing but real rows. out: where to, contiguous; new tensors by default.
    """
    if not sources:
        return []
    if not is_tensor(sources[0]):
        return reference.gather(sources, index, axes, rows)
    picked = len(index)
    wide = picked if rows is None else rows
    if out is None:
        out = [s.new_empty((*s.shape[:a], wide, *s.shape[a + 1 :])) for s, a in zip(sources, axes, strict=True)]
    if wide == 0:
        return out
    if not on_triton(sources[0]):
        places = index[_counting(wide, index).clamp_max(picked - 1)]
        for source, axis, target in zip(sources, axes, out, strict=True):
            target.copy_(source.index_select(axis, places))
        return out
    _launch(sources, index, axes, wide, out)
    return out


def _launch(sources: list[Any], index: Any, axes: list[int], rows: int, out: list[Any]) -> None:
    from offramp.kernels import compact_kernels

    starts, sizes, shapes, words_in, words_out = [0], [], [], [], []
    for source, axis, target in zip(sources, axes, out, strict=True):
        if not (source.is_contiguous() and target.is_contiguous()):
            raise ValueError("gather moves contiguous tensors: call .contiguous() where one is made.")
        outer = int(np.prod(source.shape[:axis], dtype=np.int64))
        inner = int(np.prod(source.shape[axis + 1 :], dtype=np.int64)) * source.element_size()
        if outer == 0 or inner == 0:
            continue
        word = _word(inner, source, target)
        words = inner // word
        width = min(power_of_two(words), _TILE_WORDS)
        height = max(1, min(_TILE_WORDS // width, power_of_two(outer * rows)))
        across = -(-words // width)
        lines = outer * rows
        words_in.append(_as_words(source, word))
        words_out.append(_as_words(target, word))
        starts.append(starts[-1] + across * -(-lines // height))
        sizes.append((words, source.shape[axis], across, lines))
        shapes.append((height, width))
    if not words_in:
        return
    compact_kernels.gather_tensors[(starts[-1],)](
        tuple(words_in),
        tuple(words_out),
        tuple(starts),
        tuple(sizes),
        index,
        len(index),
        rows,
        SHAPES=tuple(shapes),
        num_warps=4,
    )


def _word(inner: int, source: "torch.Tensor", target: "torch.Tensor") -> int:
    """The widest word, up to 8 bytes, that rows and addresses are multiples of."""
    for word in (8, 4, 2):
        if inner % word == 0 and source.data_ptr() % word == 0 and target.data_ptr() % word == 0:
            return word
    return 1


def _as_words(tensor: "torch.Tensor", word: int) -> "torch.Tensor":
    """The same memory as a flat tensor of integers that wide."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(-1).view(torch.uint8).view(kinds[word])


class Report:
    """What a gate tells the host about one batch: packed in one allocation, brought over by one copy.

    On the device: `count` and `out_of_range` (1,), `label`, `survivors` int32 and `score`, `entropy`, `odds` float32,
    each (rows,), and `leave` bool, which stays there. out_of_range: whether some index of the batch was.
    `send` starts the copy into pinned memory and marks the place on the stream; `arrived` waits for that mark
    alone, never for the device.
    """

    _HEADER = 4  # words before the columns: keeps them 16 bytes apart from the count
    _COLUMNS = ("label", "survivors", "score", "entropy", "odds")

    def __init__(self, rows: int, device: "torch.device") -> None:
        import torch

        self.rows = rows
        self._memory = torch.zeros(self._HEADER + rows * len(self._COLUMNS), dtype=torch.int32, device=device)
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host = torch.zeros_like(self._memory, device="cpu", pin_memory=self._event is not None)
        self.leave = torch.zeros(rows, dtype=torch.bool, device=device)
        self.count, self.out_of_range = self._memory[:1], self._memory[1:2]
        floats = self._memory.view(torch.float32)
        self.label, self.survivors = self._column(self._memory, "label"), self._column(self._memory, "survivors")
        self.score, self.entropy, self.odds = (self._column(floats, name) for name in self._COLUMNS[2:])

    def _column(self, memory: Any, name: str) -> Any:
        start = self._HEADER + self._COLUMNS.index(name) * self.rows
        return memory[start : start + self.rows]

    def send(self) -> None:
        """Queue the copy to the host behind everything on the current stream."""
        self._host.copy_(self._memory, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def arrived(self) -> dict[str, NDArray[Any]]:
        """Wait for the copy, and for that only. Views of pinned memory, valid until the next `send`.

        "count", "out_of_range" (1,); "label", "survivors" int32 and "score", "entropy", "odds" float32, each (rows,).
        """
        if self._event is not None:
            self._event.synchronize()
        words = self._host.numpy()
        columns: dict[str, NDArray[Any]] = {"count": words[:1], "out_of_range": words[1:2]}
        for name in self._COLUMNS:
            column = self._column(words, name)
            columns[name] = column if name in ("label", "survivors") else column.view(np.float32)
        return columns
