"""What a report is about: which model, when, on which machine, with which versions. No name of a host, no path."""

import datetime
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from offramp.runtime.arrays.cores import usable_cores
from offramp.runtime.bundle import Manifest
from offramp.runtime.jobs.bundles.time_model import TimeModel
from offramp.runtime.jobs.data.labelled_rows import LabelledRows


def about(manifest: Manifest | None, rows: LabelledRows, times: TimeModel | None) -> dict[str, Any]:
    """{"model", "created", "machine", "times"}. manifest: None for logits of no bundle. times: those that were used."""
    named = (
        {"name": None, "version": None} if manifest is None else {"name": manifest.name, "version": manifest.version}
    )
    return {
        "model": {**named, "exits": rows.exits, "classes": rows.classes},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "times": None if times is None else times.source,
    }


def machine() -> dict[str, Any]:
    """What times depend on: the processor, how many of its cores this process may use, the system."""
    return {
        "cpu": _processor(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}".strip(),
    }


def _processor() -> str:
    with suppress(OSError):  # Linux says it here and nowhere else
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions_of() -> dict[str, str]:
    """What took part: a result is only the same with the same."""
    found = {"python": platform.python_version()}
    for name in ("offramp", "numpy", "scipy", "onnxruntime"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
