"""The `offramp` command: one module a subcommand, imported only when it is asked for."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from offramp.runtime.errors import OfframpError

# name -> (module with add_arguments(parser) and run(args) -> exit code, one line of help, extra that has it)
COMMANDS = {
    "export": (
        "offramp.export.cli",
        "turn a torch model or a multi-output ONNX file into a bundle",
        "export",
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
        "serve the bundled digits, send them over HTTP, show what was saved",
        "server",
    ),
    "version": ("offramp.runtime.cli.version", "print the version", ""),
}

EXAMPLES = {
    "export": "offramp export model.py:build --example model.py:example_inputs --dynamic model.py:axes --out bundle/",
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
    "version": "offramp version",
}
"""What every --help ends with (%% is a per cent sign there)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit codes: 0 done, 1 a promise is broken, 2 bad input (one line says what), 3 refused,
    130 interrupted."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="offramp", description="Serve classifiers that can stop early.")
    parser.add_argument("--version", action="version", version=metadata.version("offramp"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((a for a in argv if not a.startswith("-")), None)
    try:
        for name, (module, help_, _) in COMMANDS.items():
            command = commands.add_parser(name, help=help_, description=f"{help_[0].upper()}{help_[1:]}.")
            if name == asked:
                loaded = importlib.import_module(module)
                loaded.add_arguments(command)
                command.set_defaults(run=loaded.run)
                command.epilog = f"{command.epilog or ''} Example: {EXAMPLES[name]}".strip()
        args = parser.parse_args(argv)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except OfframpError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        return _refuse(_missing(asked or "", error))
    except KeyboardInterrupt:
        print("offramp: interrupted; nothing half-written was left", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a read-only folder, a missing permission
        return _refuse(f"{error.filename or 'writing the output'}: {error.strerror or error}.")


def _refuse(message: str) -> int:
    print(f"offramp: {message}", file=sys.stderr)
    return 2


def _missing(command: str, error: ImportError) -> str:
    """Which extra to install for a command that lacks a library."""
    missing = (error.name or "").partition(".")[0]
    if missing in ("", "offramp") or command not in COMMANDS:
        raise error
    return f'`offramp {command}` needs {missing}. Run: pip install "offramp[{COMMANDS[command][2]}]"'
