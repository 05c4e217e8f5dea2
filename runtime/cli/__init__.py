"""The `offramp` command: one module a subcommand, imported only when it is asked for."""

import difflib
import importlib
import sys
from collections.abc import Sequence

from offramp.runtime.bundle import own_version
from offramp.runtime.cli.options import FILES, check_file
from offramp.runtime.cli.output import discard, output
from offramp.runtime.cli.parser import Parser
from offramp.runtime.errors import InputError, OfframpError, OutputLost, how_to_install

# name -> (module with add_arguments(parser) and run(args) -> exit code, one line of help, extra that has it)
COMMANDS = {
    "export": (
        "offramp.export.cli",
        "turn a torch model or a multi-output ONNX file into a bundle",
        "export",
    ),
    "attach": ("offramp.export.attaching.cli", "put heads behind blocks of a classifier with one exit", "export"),
    "train": ("offramp.export.training.cli", "train the heads of `offramp attach`, with labels or without", "export"),
    "make": (
        "offramp.export.making.cli",
        "turn a classifier with one exit into a calibrated bundle: attach, train, export, calibrate",
        "all",
    ),
    "record": ("offramp.runtime.cli.record", "run every exit on data and keep the outputs", "cpu"),
    "calibrate": ("offramp.runtime.cli.calibrate", "choose operating points from records, and report on them", "jobs"),
    "evaluate": (
        "offramp.runtime.cli.evaluate",
        "measure operating points on labelled rows, against what they promise",
        "jobs",
    ),
    "bench": ("offramp.runtime.cli.bench", "ask whether leaving early pays here, against one plain session", "jobs"),
    "history": ("offramp.runtime.cli.history", "show a bundle's calibrations through time", ""),
    "promote": ("offramp.runtime.cli.promote", "put a version of history/ in force", ""),
    "rollback": ("offramp.runtime.cli.rollback", "put the version in force that was before the current one", ""),
    "diff": ("offramp.runtime.cli.diff", "show what changed between two calibrations", ""),
    "audit": ("offramp.runtime.cli.audit", "ask whether routing says more about errors than confidence does", "jobs"),
    "predict": ("offramp.runtime.cli.predict", "answer the rows of a data file", "cpu"),
    "repack": ("offramp.runtime.cli.repack", "keep only the exits that pay", "jobs"),
    "inspect": ("offramp.runtime.cli.inspect", "show what a bundle is made of, and how long it takes here", "cpu"),
    "serve": ("offramp.server.cli", "serve a bundle over HTTP", "server"),
    "demo": (
        "offramp.server.demo",
        "serve the bundled intents, send them over HTTP, show what was saved",
        "server",
    ),
    "doctor": ("offramp.runtime.cli.doctor", "say what is installed here, and what this machine has", ""),
    "version": ("offramp.runtime.cli.version", "print the version", ""),
}

EXAMPLES = {
    "export": "offramp export model.py:build --example model.py:example_inputs --classes model.py:classes --out b/",
    "attach": "offramp attach checkpoint/ --out attached/",
    "train": "offramp train attached/ train.csv --out trained/",
    "make": "offramp make checkpoint/ --train train.csv --val val.csv --max-drop 0.5% --out bundle/",
    "record": "offramp record bundle/ val.npz --out records/",
    "calibrate": "offramp calibrate bundle/ records/ --budget balanced=0.4 --max-drop 0.5% --abstain-risk 2%",
    "evaluate": "offramp evaluate bundle/ test.npz",
    "bench": "offramp bench bundle/ test.npz",
    "history": "offramp history bundle/",
    "promote": "offramp promote bundle/ 3",
    "rollback": "offramp rollback bundle/",
    "diff": "offramp diff bundle/history/1 bundle/",
    "audit": "offramp audit bundle/ records/",
    "predict": "offramp predict bundle/ data.npz --operating-point balanced",
    "repack": "offramp repack bundle/ --auto --records records/ --out smaller/",
    "inspect": "offramp inspect bundle/ --html page.html",
    "serve": "offramp serve bundle/ --port 8000",
    "demo": "offramp demo",
    "doctor": "offramp doctor",
    "version": "offramp version",
}
"""What every --help ends with (%% is a per cent sign there)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Exit codes: 0 done; 1 done but for its output, which couldn't be written; 2 bad input (one line says what); 3
    refused, or a promise is broken; 130 interrupted.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    asked = argv[0] if argv and argv[0] in COMMANDS else ""
    try:
        with output():
            return _run(argv, asked)
    except OutputLost as error:
        print(f"offramp: {error}", file=sys.stderr)
        return 1
    except OfframpError as error:
        return _refuse(_noted(str(error), error))
    except ModuleNotFoundError as error:
        return _refuse(_missing(asked, error))
    except KeyboardInterrupt as stopped:
        said = _noted("interrupted.", stopped) if _notes(stopped) else "interrupted; nothing half-written was left"
        print(f"offramp: {said}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: not an error of ours
        discard()
        return 0
    except OSError as error:  # a full disk, a read-only folder, a missing permission
        return _refuse(_noted(f"{error.filename or 'writing the output'}: {error.strerror or error}.", error))


def _run(argv: list[str], asked: str) -> int:
    parser = Parser(
        prog="offramp",
        description="Serve classifiers that can stop early.",
        epilog=f"Example: {EXAMPLES['calibrate']}. Each command's --help has one of its own.",
    )
    parser.add_argument("--version", action="version", version=own_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, help_, _) in COMMANDS.items():
        command = commands.add_parser(name, help=help_, description=f"{help_[0].upper()}{help_[1:]}.")
        if name == asked:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.epilog = f"{command.epilog or ''}\nExample: {EXAMPLES[name]}".strip()
            # Options may stand between the positionals, too; subparsers by themselves don't allow it.
            args = command.parse_intermixed_args(argv[1:])
            for option in FILES:
                check_file(option, getattr(args, option, None))
            return int(loaded.run(args))
    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-"):
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(COMMANDS)}."
        raise InputError(f"no command {argv[0]!r}. {hint}")
    parser.parse_args(argv)  # --help, --version, or an error
    return 0


def _notes(error: BaseException) -> list[str]:
    """What was added to it on its way, such as where finished work is kept."""
    return getattr(error, "__notes__", [])


def _noted(message: str, error: BaseException) -> str:
    return " ".join([message, *_notes(error)])


def _refuse(message: str) -> int:
    print(f"offramp: {message}", file=sys.stderr)
    return 2


def _missing(command: str, error: ImportError) -> str:
    """Which extra to install for a command that lacks a library."""
    missing = (error.name or "").partition(".")[0]
    if missing in ("", "offramp") or command not in COMMANDS:
        raise error
    return f"`offramp {command}` needs {missing}. {how_to_install(COMMANDS[command][2])}"
