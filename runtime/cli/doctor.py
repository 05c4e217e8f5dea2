"""offramp doctor"""

import argparse
import os
import platform
import shutil
import tempfile
from importlib import metadata

from offramp.runtime.arrays.cores import cpu_quota
from offramp.runtime.bundle import own_version
from offramp.runtime.errors import RuntimeUnavailable
from offramp.runtime.execution.cpu.providers import tried_providers
from offramp.runtime.execution.cpu.session import available_threads

_LIBRARIES = (
    "offramp", "numpy", "msgspec", "onnxruntime", "onnxruntime-gpu", "torch", "triton", "onnx", "scipy", "pyarrow",
    "tokenizers", "pillow", "fastapi", "uvicorn",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit codes: 0 a bundle can be run here; 1 it can't, and the last line says why."


def run(args: argparse.Namespace) -> int:
    say("python", f"{platform.python_version()}, {platform.platform()}")
    for name in _LIBRARIES:
        try:
            say(name, own_version() if name == "offramp" else metadata.version(name))
        except metadata.PackageNotFoundError:
            say(name, "not installed")
    quota = cpu_quota()
    say("cores", str(os.cpu_count()))
    say("affinity", f"{len(os.sched_getaffinity(0))} cores" if hasattr(os, "sched_getaffinity") else "unknown here")
    say("quota", "none" if quota == float("inf") else f"{quota:g} CPUs")
    say("threads", f"{available_threads()}, unless --threads says otherwise")
    try:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free / 2**30
        say("copies", f"{place}, {free:.1f} GiB free: a bundle that runs is copied there")
    except OSError as error:
        say("copies", f"no temporary folder ({error.strerror}): a bundle's own files are run")
    try:
        tried = tried_providers()
    except RuntimeUnavailable as error:
        say("providers", f"none: {error}")
        return 1
    working = [name for name, fault in tried.items() if not fault]
    say("providers", ", ".join(working) or "none of those that are installed works")
    for name, fault in tried.items():
        if fault:
            say("not working", f"{name}: {fault}")
    return 0 if working else 1


def say(what: str, found: str) -> None:
    print(f"{what:16}{found}")
