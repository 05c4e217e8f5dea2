"""offramp export"""

import argparse
import importlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from offramp.export.attaching import is_attached
from offramp.export.exporter import check_libraries, export_bundle
from offramp.export.preprocess import check_kind
from offramp.runtime.bundle import MANIFEST
from offramp.runtime.errors import ExportError
from offramp.runtime.files import check_new_folder

# What the functions return that options name.
_MODEL_FILE = """\
FILE.py:FUNCTION calls a function that takes no arguments. model.py may be:

  def build():          # the module, in evaluation mode; forward returns the logits of every exit, shallow to deep
      return Net().eval() # or {"blocks": [...], "heads": [...]}, modules in series with a head for each, or None

  def example_inputs(): # a few rows, batch first: tensors or arrays by the names of forward's parameters
      return {"input_ids": torch.ones(2, 16, dtype=torch.long), "attention_mask": torch.ones(2, 16)}

  def dynamic_axes():   # the axes that vary, by input and number; one of each input is "batch"
      return {"input_ids": {0: "batch", 1: "seq"}, "attention_mask": {0: "batch", 1: "seq"}}

  def classes():        # one name a column of the logits
      return ["negative", "positive"]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _MODEL_FILE
    parser.add_argument(
        "model",
        help="FILE.py:FUNCTION that returns the module, or MODULE:FUNCTION, or FILE.onnx, or a folder written by "
        "`offramp attach` or `offramp train`, which says all else by itself",
    )
    parser.add_argument(
        "--example",
        help="FILE.py:FUNCTION that returns example inputs: {name: tensor or array}, one tensor, or a tuple in the "
        "order of forward's parameters; rows that differ and are typical prove most (a torch model needs it)",
    )
    parser.add_argument(
        "--dynamic",
        help="FILE.py:FUNCTION (or FILE.json) with the names of the axes that vary: {input: {axis: name}}, one of each "
        'input "batch" (default: axis 0 is the batch, nothing else varies)',
    )
    parser.add_argument(
        "--classes",
        help="FILE.py:FUNCTION (or FILE.json) with the class names, a list of one string a logit (default: 0, 1, …)",
    )
    parser.add_argument("--exits", help="comma-separated outputs of an ONNX file that are exits, shallow to deep")
    parser.add_argument(
        "--auxiliary",
        action="append",
        default=[],
        metavar="KIND=NAME,…",
        help="other outputs of an ONNX file: features, routing, external or reservation; repeatable",
    )
    parser.add_argument(
        "--preprocess",
        metavar="FILE",
        help="FILE.json (or FILE.py:FUNCTION) that says how texts or pictures become inputs; files it names are copied",
    )
    parser.add_argument("--name", help="the model's name (default: its class, or the file's)")
    parser.add_argument("--model-version", default="1", help="the model's version (default: 1)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the bundle; it appears when it's verified")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def run(args: argparse.Namespace) -> int:
    is_onnx, heads = args.model.endswith(".onnx"), is_attached(args.model)
    if not is_onnx and not heads and ":" not in args.model:
        what = "no model that can be exported" if Path(args.model).exists() else "no such file or folder"
        raise ExportError(
            f"{args.model}: {what}; expected FILE.py:FUNCTION, FILE.onnx, or a folder that `offramp train` wrote. A "
            "checkpoint with one exit gets more by `offramp make`."
        )
    if not is_onnx and not heads and args.example is None:
        raise ExportError("--example is missing: a torch model is traced on example inputs.")
    auxiliary = {}
    for option in args.auxiliary:
        kind, separator, names = option.partition("=")
        if not separator:
            raise ExportError(f"--auxiliary {option!r}: expected KIND=NAME,NAME.")
        auxiliary[kind] = names.split(",")
    # Before the user's own code, which may load weights for a while, and which needs these libraries itself.
    check_libraries(args.model if is_onnx else None)
    check_new_folder(args.out, marker=MANIFEST, replace=args.overwrite)
    preprocess = preprocess_of(args.preprocess) if args.preprocess else None
    if preprocess is not None:
        check_kind(preprocess)
    known: dict[str, Any] = {}
    if heads:
        from offramp.export.attaching.folder import load_attached

        model = load_attached(args.model, call)[0]
        example, known = dict(model.about.example_inputs), model.known
    else:
        model = args.model if is_onnx else call(args.model)
        example = None
    example = call(args.example) if args.example else example
    with warnings.catch_warnings():
        warnings.showwarning = show
        path = export_bundle(
            model,
            example,
            args.out,
            dynamic_axes=axes_of(value_of(args.dynamic)) if args.dynamic else known.get("dynamic_axes"),
            classes=value_of(args.classes) if args.classes else known.get("classes"),
            exits=args.exits.split(",") if args.exits else None,
            auxiliary=auxiliary or None,
            name=args.name or known.get("name"),
            version=args.model_version,
            preprocess=preprocess or known.get("preprocess"),
            overwrite=args.overwrite,
            progress=lambda step: print(f"{step} …", file=sys.stderr),
        )
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    print(
        f"{path}: {len(manifest['blocks'])} blocks, {len(manifest['classes'])} classes, "
        f"{len(manifest['tensors'])} carried tensors; largest difference to the model "
        f"{manifest['verified']['max_difference']:.2g}"
    )
    return 0


def show(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line, as errors are."""
    print(f"offramp: warning: {message}", file=sys.stderr)


def axes_of(value: Any) -> dict[str, dict[int, str]]:
    """What --dynamic names, with numbers for axes."""
    try:
        return {str(name): {int(k): str(v) for k, v in axes.items()} for name, axes in value.items()}
    except (AttributeError, ValueError, TypeError) as error:
        raise ExportError(f'--dynamic: expected {{"input": {{axis: "name"}}}}, got {value!r}.') from error


def preprocess_of(source: str) -> Any:
    """The spec, whose relative paths start where it is written."""
    value = value_of(source)
    if not isinstance(value, dict):
        return value
    where = source if source.endswith(".json") else source.rpartition(":")[0]
    folder = Path(where).parent if where.endswith((".json", ".py")) else Path()
    paths = {k: str(folder / value[k]) for k in ("tokenizer", "sample") if isinstance(value.get(k), str)}
    return value | paths


def value_of(source: str) -> Any:
    """What a FILE.json holds, or a function returns."""
    if source.endswith(".json"):
        try:
            return json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ExportError(f"{source}: can't be read as JSON ({error}).") from error
    return call(source)


def call(source: str, *, instead: str = "") -> Any:
    """What the function named FILE.py:FUNCTION or MODULE:FUNCTION returns. instead: what else could have been named."""
    where, separator, name = source.rpartition(":")
    if not separator or not name.isidentifier():
        what = "" if Path(source).exists() else "no such file or folder; "
        other = f", or {instead}" if instead else ""
        raise ExportError(f"{source}: {what}expected FILE.py:FUNCTION or MODULE:FUNCTION{other}.")
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise ExportError(f"{where} has no function {name!r}.")
    try:
        return function()
    except Exception as error:  # the user's own code may raise anything
        raise ExportError(f"{source} failed: {type(error).__name__}: {error}") from error


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ExportError(f"the module {where!r} can't be imported ({error}).") from error
    path = Path(where).resolve()
    known = sys.modules.get(f"offramp_user_{path.stem}")
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if not path.is_file():
        raise ExportError(f"{where}: no such file.")
    spec = importlib.util.spec_from_file_location(f"offramp_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ExportError(f"{where}: not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ExportError(f"{where} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
