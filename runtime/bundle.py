"""A bundle on disk: one ONNX graph per block, a manifest that says how they fit, and a calibration.

Everything that is read is checked: schema, digests, paths, names and shapes. Nothing is run before that.
"""

import keyword
import math
import re
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from offramp.runtime import cost
from offramp.runtime.errors import BundleError, InputError
from offramp.runtime.files import NoRoom, PrivateCopy, inside, private_places, sha256_of_file, unseal
from offramp.runtime.preprocess import Preprocess, Preprocessor, check, open_preprocessor

UNKNOWN_VERSION = "unknown"
"""offramp's own, where it was copied without being installed."""

SCHEMA = "offramp/1"
MANIFEST = "manifest.json"
CALIBRATION = "calibration.json"

# ONNX names of the three arrays every gated graph takes beside its tensors: z' = scale * z + bias.
GATE_INPUTS = ("gate.scale", "gate.bias", "gate.inv_temperature")

DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()  # noqa: SIM905
)
# Of the cascade graph: float32 thresholds, a row or one for all rows, an entry an exit but the last, where +inf lets
# nobody leave and -inf everybody; and the answers, row by row.
CASCADE_INPUTS = ("thresholds",)
CASCADE_OUTPUTS = ("label", "score", "exit", "logits")
# What the same graph gives beside them where every exit's word is kept: float32 scores, and logits, of all rows that
# reached exit 0, then of those that reached exit 1, and so on; nothing of an exit that was closed to all of them, but
# for exit 0, which then has zeros.
EVERY_EXIT_OUTPUTS = ("reached_scores", "reached_logits")

Dimension = int | str
_LARGEST_DOCUMENT = 256 * 2**20
_LARGEST_ROW = 2**28  # 1 GiB of float32; what is larger is a damaged manifest


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """One input of the model, as a request gives it."""

    name: str
    dtype: str
    shape: list[Dimension]
    pad: float | str | None = None  # the value that may fill a row up to a longer one; None: lengths can't be mixed

    @property
    def batch_axis(self) -> int:
        return self.shape.index("batch")


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the carried state: what a block hands on to later ones."""

    dtype: str
    shape: list[Dimension]
    batch_axis: int
    pad: float | str | None = None  # as of an Input; ±inf are the strings "inf" and "-inf"


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the network between two exits.

    flops, bytes: cost expressions, of the graph and of the state that it hands on. params: weights it uses.
    nodes, recomputed: operations in the graph, and how many of them an earlier block has run as well.
    """

    file: str
    inputs: list[str]
    outputs: list[str]
    exit: int | None
    flops: str
    bytes: str
    params: int
    nodes: int = 0
    recomputed: int = 0


class Segment(Block, frozen=True, kw_only=True):
    """A run of blocks, first…last, merged into one graph with only its last exit's head."""

    first: int
    last: int


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """A classifier after a block, with the names of the tensors it gives."""

    name: str
    block: int
    logits: str
    label: str
    score: str
    features: str | None = None
    routing: list[str] = []
    external: str | None = None
    reservation: str | None = None


class CascadeGraph(msgspec.Struct, frozen=True, kw_only=True):
    """One graph with all blocks, gates and compactions in it: rows leave and the rest goes on inside.

    It has `gates` exits, the last one always open; exits[j] is the one that the manifest's exit j is.
    outputs: its outputs, by name and in order. thresholds_per_row: whether each row may have its own thresholds.
    every_exit: file of the same graph with EVERY_EXIT_OUTPUTS as well, if there is one.
    A graph that differs in these, the outputs being CASCADE_OUTPUTS, is of an earlier offramp, and isn't run.
    """

    file: str
    gates: int
    exits: list[int]
    outputs: list[str] = []
    thresholds_per_row: bool = False
    every_exit: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it is in, one graph each."""
        return (self.file,) if self.every_exit is None else (self.file, self.every_exit)

    @property
    def runs(self) -> bool:
        """Whether it is one as this offramp writes and runs it."""
        return tuple(self.outputs) == CASCADE_OUTPUTS and self.thresholds_per_row


class File(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json, checked."""

    schema: str
    name: str
    version: str
    created: str
    producer: str
    classes: list[str]
    inputs: list[Input]
    tensors: dict[str, Tensor]
    blocks: list[Block]
    segments: list[Segment]
    exits: list[Exit]
    cascade: CascadeGraph | None = None  # None: rows go from block to block, each a graph of its own
    files: dict[str, File]
    digest: str
    preprocess: Preprocess | None = None  # how raw rows become inputs
    rows_independent: bool = True  # False: a row's answer depends on its batch, so rows are run one by one
    verified: dict[str, Any] = {}

    @property
    def axes(self) -> tuple[str, ...]:
        """The symbolic axes of the inputs, "batch" first."""
        named = [axis for given in self.inputs for axis in given.shape if isinstance(axis, str)]
        return tuple(dict.fromkeys(["batch", *named]))

    @property
    def routing(self) -> list[str]:
        """Names of the routing outputs, in layer order."""
        return self.exits[-1].routing

    @property
    def typical_sizes(self) -> dict[str, int]:
        """Sizes of the symbolic axes, the batch apart, at which the bundle was verified; 32 where that isn't known."""
        verified = (self.verified.get("sizes") or [{}])[0]
        return {axis: int(verified.get(axis, 32)) for axis in self.axes[1:]}

    def exit_flops(self, sizes: Mapping[str, int]) -> list[int]:
        """Cumulative: what one row costs that leaves at each exit, at these sizes of the axes beside the batch."""
        alone = {**sizes, "batch": 1}
        spent = list(accumulate(cost.evaluate(block.flops, alone) for block in self.blocks))
        return [spent[one.block] for one in self.exits]

    @property
    def routing_seen(self) -> tuple[tuple[int, ...], ...]:
        """For each exit, the rows of `routing` that are of layers in front of it."""
        return tuple(tuple(self.routing.index(name) for name in e.routing) for e in self.exits)


def own_version() -> str:
    """offramp's version as it is installed here: who writes a file says so in it."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version("offramp") or UNKNOWN_VERSION
    except (metadata.PackageNotFoundError, KeyError):  # a zipped program, an image without package data
        return UNKNOWN_VERSION


@dataclass(frozen=True)
class Bundle:
    """A folder whose manifest and files have been checked."""

    path: Path
    manifest: Manifest
    held: PrivateCopy | None = field(default=None, compare=False, repr=False)

    @property
    def folder(self) -> Path:
        """Where the files are read from: the copy of what was verified, if there is one."""
        return self.path if self.held is None else self.held.folder

    def file(self, relative: str) -> Path:
        return inside(self.folder, relative, where=f"{self.path / MANIFEST}")

    def preprocessor(self) -> Preprocessor:
        """What turns a list of texts or pictures into the model's inputs.

        Raises InputError if the bundle has no preprocessing, RuntimeUnavailable if its library isn't installed.
        """
        if self.manifest.preprocess is None:
            raise InputError(
                f"{self.path}: this bundle takes arrays only; export it with preprocess=… and it takes raw rows."
            )
        return open_preprocessor(self.manifest.preprocess, self.manifest.inputs, self.file)


def read_bundle(path: str | Path, *, hold: bool = False) -> Bundle:
    """Read and verify a bundle: schema, digest, every file's size and SHA-256, names, axes and paths.

    hold: keep a private copy of what was verified, as long as somebody has the Bundle: whatever becomes of the folder
    then, nothing else is run. Raises BundleError with the file and the field; nothing of the bundle has been run by
    then.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise BundleError(f"bundle is {path!r}, expected the path of a folder.")
    root = Path(path)
    where = root / MANIFEST
    if not root.is_dir():
        raise BundleError(f"{root}: no such folder. A bundle is a folder written by `offramp export`.")
    data = read_bytes(root, MANIFEST)
    manifest = decode_document(
        data, Manifest, SCHEMA, where, again="Export the model again with this version of offramp."
    )
    for name, entry in manifest.files.items():
        inside(root, name, where=f"{where}: files")
        if not re.fullmatch("[0-9a-f]{64}", entry.sha256):
            raise BundleError(f"{where}: files[{name!r}].sha256 is not 64 hexadecimal digits.")
    _check_structure(manifest, root, where)
    unseal(data, manifest.digest, where=str(where))
    if manifest.cascade is not None and not manifest.cascade.runs:
        warnings.warn(
            f"{where}: {manifest.cascade.file} is of an earlier offramp and isn't run, so rows go from block to block, "
            "which takes longer. Export the model again.",
            stacklevel=3,
        )
        manifest = msgspec.structs.replace(manifest, cascade=None)
    if hold:  # for longer than this process may stay in its folder
        return Bundle(root.absolute(), manifest, _held(root, manifest))
    return Bundle(root, manifest, _checked(root, manifest))


def _held(root: Path, manifest: Manifest) -> PrivateCopy | None:
    """A private copy of the files, verified as they are copied; None where there is no room for one."""
    full = []
    for place in private_places():
        try:
            return _checked(root, manifest, PrivateCopy(place))
        except NoRoom as error:
            full.append(str(error))
    warnings.warn(
        f"{root}: no private copy could be made ({'; '.join(full) or 'no temporary folder'}), so files changed from "
        "now on may change answers or end this process. Let TMPDIR name a folder with room.",
        stacklevel=4,
    )
    return _checked(root, manifest)


def _checked(root: Path, manifest: Manifest, copy: PrivateCopy | None = None) -> PrivateCopy | None:
    """Check every file's size and SHA-256, copying it if there is a copy to put it in."""
    for name, entry in manifest.files.items():
        file = inside(root, name, where=f"{root / MANIFEST}: files")
        try:
            if not file.is_file():
                raise BundleError(f"{file}: missing, though {MANIFEST} lists it. Restore it, or export again.")
            size = file.stat().st_size
            if size != entry.bytes:
                raise BundleError(f"{file}: {size} bytes, {MANIFEST} says {entry.bytes}. Restore it, or export again.")
            digest = sha256_of_file(file) if copy is None else copy.add(name, file)
        except OSError as error:
            raise BundleError(f"{file}: can't be read ({error.strerror}). Restore it, or export again.") from error
        if digest != entry.sha256:
            raise BundleError(f"{file}: its SHA-256 differs from {MANIFEST}. Restore it, or export again.")
    return copy


def read_bytes(root: Path, name: str) -> bytes:
    """A document of a bundle: a regular file inside its folder, of a size that can be one."""
    path = inside(root, name, where=str(root))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path}: not a regular file. Restore it.")
        if status.st_size > _LARGEST_DOCUMENT:
            raise BundleError(f"{path}: {status.st_size} bytes, expected at most {_LARGEST_DOCUMENT}.")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: can't be read ({error.strerror}).") from error


class _Header(msgspec.Struct):
    schema: str


def decode_document(data: bytes, kind: type[Any], schema: str, where: Path, *, again: str) -> Any:
    """Decode a JSON document of ours; the schema is looked at first, so that it's what the error names."""
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.schema != schema:
            raise BundleError(f"{where}: schema is {header.schema!r}, this offramp reads {schema!r}. {again}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BundleError(f"{where}: {error}.") from error
    except RecursionError as error:
        raise BundleError(f"{where}: nested too deeply. Restore the file.") from error


def is_axis(name: str) -> bool:
    """Axis names stand in cost expressions, so they are plain ASCII identifiers."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def unreachable(name: str, version: str) -> str:
    """Why a model of this name and version could never be asked for over HTTP; empty if it can.

    Clients resolve dot segments before they send a URL: "a/../b" is asked for as "b", "..", not at all.
    """
    for what, text in (("name", name), ("version", version)):
        if {".", ".."} & set(text.split("/")):
            return (
                f"the model's {what} is {text!r}: clients take the dots out of a URL and would never reach it, "
                f"expected a {what} of which no part between slashes is '.' or '..'"
            )
    return ""


def _check_structure(m: Manifest, root: Path, where: Path) -> None:
    def require(condition: object, message: str) -> None:
        if not condition:
            raise BundleError(f"{where}: {message}. Restore the file, or export again.")

    wrong = unreachable(m.name, m.version)
    require(not wrong, wrong)
    require(m.inputs, "inputs is empty")
    require(m.blocks, "blocks is empty")
    require(m.exits, "exits is empty")
    require(m.classes, "classes is empty")
    require(len({i.name for i in m.inputs}) == len(m.inputs), "inputs has a name twice")
    for k, given in enumerate(m.inputs):
        field = f"inputs[{k}] ({given.name!r})"
        require(given.dtype in DTYPES, f"{field}.dtype {given.dtype!r} is not one of {sorted(DTYPES)}")
        require(given.shape.count("batch") == 1, f'{field}.shape has no single "batch" axis')
    for name, tensor in m.tensors.items():
        field = f"tensors[{name!r}]"
        require(tensor.dtype in DTYPES, f"{field}.dtype {tensor.dtype!r} is not one of {sorted(DTYPES)}")
        require(
            0 <= tensor.batch_axis < len(tensor.shape) and tensor.shape[tensor.batch_axis] == "batch",
            f'{field}.batch_axis doesn\'t point at "batch" in {tensor.shape}',
        )
    for field, pad in [(f"inputs[{i.name!r}]", i.pad) for i in m.inputs] + [
        (f"tensors[{n!r}]", t.pad) for n, t in m.tensors.items()
    ]:
        require(not isinstance(pad, str) or pad in ("inf", "-inf"), f"{field}.pad {pad!r} is not a number")
    for axis in m.axes:
        require(is_axis(axis), f"the axis name {axis!r} is not a plain identifier")
    shapes = [(f"inputs[{i.name!r}]", i.shape) for i in m.inputs] + [
        (f"tensors[{n!r}]", t.shape) for n, t in m.tensors.items()
    ]
    for field, shape in shapes:
        for size in shape:
            require(isinstance(size, str) or size >= 0, f"{field}.shape has the size {size}")
        row = math.prod(size for size in shape if isinstance(size, int))
        require(row <= _LARGEST_ROW, f"{field}.shape {shape} has {row} numbers a row, expected at most {_LARGEST_ROW}")
    if m.preprocess is not None:
        check(m.preprocess, {i.name: (i.dtype, i.shape) for i in m.inputs}, m.files, require)
    for k, block in enumerate(m.blocks):
        at = block.exit
        require(
            at is None or (0 <= at < len(m.exits) and m.exits[at].block == k),
            f"blocks[{k}].exit and exits[{at}].block disagree"
            if at is None or 0 <= at < len(m.exits)
            else f"blocks[{k}].exit is {at}, but exits has {len(m.exits)}",
        )
    _check_graphs(m, root, where, require)
    for j, exit_ in enumerate(m.exits):
        require(0 <= exit_.block < len(m.blocks), f"exits[{j}].block {exit_.block} is not a block")
        require(m.blocks[exit_.block].exit == j, f"blocks[{exit_.block}].exit and exits[{j}].block disagree")
        made = set(m.blocks[exit_.block].outputs)
        for name in (exit_.logits, exit_.label, exit_.score):
            require(name in made, f"exits[{j}] names {name!r}, which blocks[{exit_.block}] doesn't give")
    require(m.blocks[-1].exit == len(m.exits) - 1, "the last block doesn't end in the last exit")
    if m.cascade is not None:
        numbers = m.cascade.exits
        for field, file in zip(("file", "every_exit"), m.cascade.files, strict=False):
            inside(root, file, where=f"{where}: cascade.{field}")
            require(file in m.files, f"cascade.{field} {file!r} is not in files")
        require(
            len(numbers) == len(m.exits)
            and numbers == sorted(set(numbers))
            and numbers[0] >= 0
            and numbers[-1] == m.cascade.gates - 1,
            f"cascade.exits {numbers} doesn't give each of {len(m.exits)} exits one of {m.cascade.gates} gates",
        )
    order = [e.block for e in m.exits]
    require(order == sorted(set(order)), "exits are not in the order of their blocks")


def _check_graphs(m: Manifest, root: Path, where: Path, require: Any) -> None:
    known_inputs = {i.name for i in m.inputs}
    axes = set(m.axes)
    before: list[set[str]] = [set(known_inputs)]
    for k, block in enumerate(m.blocks):
        for name in block.inputs:
            require(name in before[k], f"blocks[{k}].inputs names {name!r}, which no earlier block produces")
            require(
                name in known_inputs or name in m.tensors,
                f"blocks[{k}].inputs names {name!r}, which tensors lacks",
            )
        before.append(before[k] | set(block.outputs))
    parts: tuple[tuple[str, Sequence[Block | Segment]], ...] = (("blocks", m.blocks), ("segments", m.segments))
    for kind, graphs in parts:
        for k, graph in enumerate(graphs):
            field = f"{kind}[{k}]"
            inside(root, graph.file, where=f"{where}: {field}.file")
            require(graph.file in m.files, f"{field}.file {graph.file!r} is not in files")
            require(graph.params >= 0, f"{field}.params is negative")
            if isinstance(graph, Segment):
                require(
                    0 <= graph.first <= graph.last < len(m.blocks),
                    f"{field} spans {graph.first}..{graph.last}",
                )
                require(graph.exit == m.blocks[graph.last].exit, f"{field}.exit is not that of its last block")
                for name in graph.inputs:
                    require(
                        name in before[graph.first],
                        f"{field}.inputs names {name!r}, which isn't there by then",
                    )
                for name in m.blocks[graph.last].outputs:  # what comes after it must find the same state
                    later = name in m.tensors or name in _gate_outputs(m, graph.exit)
                    require(not later or name in graph.outputs, f"{field}.outputs lacks {name!r}")
            for name in ("flops", "bytes"):
                try:
                    unknown = cost.axes_of(getattr(graph, name)) - axes
                except BundleError as error:
                    raise BundleError(f"{where}: {field}.{name}: {error}") from error
                require(not unknown, f"{field}.{name} names the axes {sorted(unknown)}, which no input has")


def _gate_outputs(m: Manifest, exit: int | None) -> set[str]:
    return set() if exit is None else {m.exits[exit].logits, m.exits[exit].label, m.exits[exit].score}


def encode_number(value: float) -> float | str:
    """±inf as the strings "inf" and "-inf": JSON has no infinities."""
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def decode_number(value: float | str) -> float:
    if value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, str):
        raise ValueError(f'{value!r} is not a number, "inf" or "-inf"')
    return float(value)
