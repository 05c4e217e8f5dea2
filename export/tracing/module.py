"""The user's torch module: run without leaving a trace in it, and asked for what would make its export wrong."""

import inspect
import io
import linecache
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Self

import numpy as np
import torch
from offramp.export.outputs import ModelFails, flatten
from offramp.runtime.errors import ExportError
from torch.overrides import TorchFunctionMode

Inputs = Mapping[str, np.ndarray[Any, Any]]
Outputs = dict[str, list[np.ndarray[Any, Any]]]
ALL_LOGITS = (
    "Return the logits of all exits for every input, and offramp decides which exit answers a row: in forward, append "
    "each exit's logits to a list, without if or while around them, and return the list. `offramp calibrate` chooses "
    "the thresholds afterwards."
)


_KEPT_IN_MEMORY = 2**24
_LARGE = 2**20


class Kept:
    """A module as it was: its tensors, its flags, its attributes and what they hold.

    forward may update statistics, count its calls or keep what it saw last; none of it is to be the user's afterwards.
    Tensors are kept in a file, small models apart: in memory they would be the model again. Large ones are compared
    with it only where torch has counted a change, and all of them at the end.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._attributes = [(part.__dict__, dict(part.__dict__)) for part in model.modules()]
        self._held = [
            (held, held.copy())
            for _, before in self._attributes
            for held in before.values()
            if isinstance(held, dict | list | set)
        ]
        tensors = {id(t): t for t in [*model.parameters(), *model.buffers(), *self._loose_tensors()] if _has_values(t)}
        self._file = tempfile.SpooledTemporaryFile(max_size=_KEPT_IN_MEMORY)  # noqa: SIM115 -- as long as this lives
        self._tensors = [(t, t.dtype, t.shape, t.requires_grad) for t in tensors.values()]
        self._changes = [_changes(t) for t in tensors.values()]
        try:
            for tensor in tensors.values():
                self._file.write(_bits(tensor).numpy().data)
        except OSError as error:
            raise ExportError(
                f"{tempfile.gettempdir()} has no room for a copy of the model ({error.strerror}): let TMPDIR name a "
                "folder that has."
            ) from error

    def _loose_tensors(self) -> Iterator[torch.Tensor]:
        """Those that are attributes, or lie in lists and mappings that are, without being registered."""
        values = [v for _, before in self._attributes for v in before.values()]
        values += [v for _, copy in self._held for v in (copy.values() if isinstance(copy, dict) else copy)]
        return (v for v in values if isinstance(v, torch.Tensor))

    def restore(self, *, whole: bool = True) -> None:
        """whole: False takes torch's word for large tensors, which doesn't count what is changed through `.data`."""
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for held, copy in self._held:
            held.clear()
            held.extend(copy) if isinstance(held, list) else held.update(copy)
        self._file.seek(0)
        with torch.no_grad():
            for k, (tensor, dtype, shape, needs_gradient) in enumerate(self._tensors):
                size = shape.numel() * dtype.itemsize
                if not whole and size > _LARGE and (changes := _changes(tensor)) and changes == self._changes[k]:
                    self._file.seek(size, io.SEEK_CUR)
                    continue
                values = self._read(size)
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    tensor.data = values.view(dtype).reshape(shape).to(tensor.device)
                elif not torch.equal(_bits(tensor), values):
                    tensor.detach().copy_(values.view(dtype).reshape(shape))  # in place: others may hold views of it
                if tensor.requires_grad != needs_gradient:
                    tensor.requires_grad_(needs_gradient)
                self._changes[k] = _changes(tensor)

    def close(self) -> None:
        """Let go of the copy."""
        self._file.close()

    def _read(self, count: int) -> torch.Tensor:
        """The next bytes of the file."""
        data = np.empty(count, np.uint8)
        self._file.readinto(data.data)
        return torch.from_numpy(data)


def _changes(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where its values lie, and how often torch has changed them; None where torch doesn't count."""
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: −0 isn't 0 there, and NaN is itself."""
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)


class Runner:
    """Runs a module on arrays, each time from the state in which it was given; inside `with`, and it stays as it was.

    changed: names of the inputs that forward changes in place. Neither they nor what it returns share memory with
    what callers hold.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.changed: list[str] = []
        self._kept = Kept(model)
        self._exits: int | None = None

    def __enter__(self) -> Self:
        numpys = np.random.get_state()  # noqa: NPY002 -- the global generator is the user's
        self._random = random.getstate(), numpys, torch.get_rng_state()
        return self

    def __exit__(self, *failure: object) -> None:
        self._kept.restore()
        self._kept.close()
        mine, numpys, torchs = self._random
        random.setstate(mine)
        np.random.set_state(numpys)  # noqa: NPY002
        torch.set_rng_state(torchs)

    def restore(self) -> None:
        """The module as it was; the random generators go on, or what is random couldn't be seen."""
        self._kept.restore(whole=False)

    def __call__(self, inputs: Inputs) -> Outputs:
        """The outputs by kind. Raises ExportError if the model fails, or has other exits than at the first call."""
        given = {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
        try:
            with torch.no_grad():
                output = flatten(self.model(**given))
            made = {kind: [_array(tensor) for tensor in tensors] for kind, tensors in output.items()}
        except ExportError:
            raise
        except Exception as error:  # the user's own code may raise anything
            shapes = {name: list(array.shape) for name, array in inputs.items()}
            what = "the example inputs" if self._exits is None else f"inputs of the shapes {shapes}"
            raise ModelFails(f"the model fails on {what}: {error}") from error
        finally:
            self.restore()
        changed = (n for n, a in inputs.items() if not np.array_equal(a, given[n].detach().numpy(), equal_nan=True))
        self.changed = self.changed or list(changed)
        exits = len(made["logits"])
        self._exits = self._exits or exits
        if exits != self._exits:
            raise ExportError(
                f"forward returns {self._exits} exits for some inputs and {exits} for others. {ALL_LOGITS} In one "
                "tensor they are stacked along axis 0, [exits, batch, classes]."
            )
        return made

    def where_it_decides(self, inputs: Inputs) -> str | None:
        """The first line of forward that asks for a tensor's values; None if none does."""
        try:
            with torch.no_grad(), _Asked() as asked:
                self.model(**{name: torch.from_numpy(array.copy()) for name, array in inputs.items()})
        finally:
            self.restore()
        return asked.lines[0] if asked.lines else None


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wide.detach().cpu().numpy().copy()


def refuse_training(model: torch.nn.Module) -> None:
    """Raises ExportError if a part in training mode may behave otherwise than in evaluation: before anything is run."""
    parts = list(model.named_modules())
    # The user's own code may ask another part than itself for the flag.
    anywhere = any(not _is_torchs(type(part)) and _reads_training(part) for _, part in parts)
    for name, part in parts:
        silent = isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p == 0
        if part.training and not silent and (anywhere or _reads_training(part)):
            where = f"{name or 'the model'} ({type(part).__name__})"
            raise ExportError(f"{where} is in training mode. Call model.eval() before exporting it.")


def _is_torchs(of: Any) -> bool:
    return _package(getattr(of, "__module__", None)) == "torch"


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _reads_training(part: torch.nn.Module) -> bool:
    """Does its code, or that of helpers that it names, name the flag? A compiled part doesn't show its code: it may."""
    if isinstance(part, torch.jit.ScriptModule):
        return True
    waiting: list[Any] = [part.__dict__.get("forward")]
    for base in type(part).__mro__[: type(part).__mro__.index(torch.nn.Module)]:
        waiting.extend(vars(base).values())
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        codes = [function.__code__]
        for code in codes:
            codes.extend(c for c in code.co_consts if isinstance(c, CodeType))
        if any("training" in code.co_names or "training" in code.co_consts for code in codes):
            return True
        seen.update(codes)
        names = {name for code in codes for name in code.co_names}
        waiting.extend(helper for helper in _named(names, function.__globals__) if not _is_torchs(helper))
    return False


def _named(names: set[str], where: Mapping[str, Any]) -> list[Any]:
    """What a function's names stand for: its module's own, and those of modules that it imports, torch's left out."""
    known = [where[name] for name in names if name in where]
    for module in [k for k in known if isinstance(k, ModuleType) and _package(k.__name__) not in ("torch", "numpy")]:
        known.extend(vars(module)[name] for name in names if name in vars(module))
    return known


# How a tensor's values become Python's, by which a forward can go one way or another.
_ASKING = ("__bool__", "__float__", "__int__", "__index__", "__contains__", "item", "tolist", "numpy", "__array__")


_NOT_THE_USERS = ("torch", "numpy", "offramp")


class _Asked(TorchFunctionMode):
    """Notes where Python is told a tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in _ASKING and (line := _users_line()):
            self.lines.append(line)
        return function(*args, **(kwargs or {}))


def _users_line() -> str | None:
    """The innermost line of the user's that is being run."""
    frame = inspect.currentframe()
    while frame is not None and _package(frame.f_globals.get("__name__")) in _NOT_THE_USERS:
        frame = frame.f_back
        if frame is not None and frame.f_code is Runner.where_it_decides.__code__:
            return None
    return None if frame is None else _shown(frame, frame.f_lineno)


def line_of(error: BaseException) -> str | None:
    """The innermost line of the user's on the way to an error."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if _package(trace.tb_frame.f_globals.get("__name__")) not in _NOT_THE_USERS:
            found = _shown(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _shown(frame: FrameType, number: int) -> str:
    """'model.py line 12, `if confidence > 0.9:`'"""
    file = frame.f_code.co_filename
    return f"{Path(file).name} line {number}, `{linecache.getline(file, number).strip()}`"
