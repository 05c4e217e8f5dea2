"""The house: imports go one way, without circles, between few rooms on few floors."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("export", "kernels", "runtime", "server")
MOST_ROOMS, MOST_FLOORS, MOST_MODULES = 28, 12, 15
# Jobs by job share one room; what a target, a promise and its report need is one story.
# A command is a module, so that its library is imported only when it is asked for.
CROWDED = {"runtime/jobs/calibrating", "runtime/cli"}

# Which rooms a room may import from, beside those that these may. A folder of runtime/ is a room, so is a file in it.
BELOW = {
    "errors": (),
    "kernels": (),
    "arrays": ("errors",),
    "cost": ("errors",),
    "files": ("errors",),
    "predictions": ("errors",),
    "preprocess": ("errors",),
    "scores": ("arrays",),
    "thresholds": ("arrays",),
    "records": ("files", "predictions"),
    "sample": ("records",),
    "bundle": ("cost", "files", "preprocess"),
    "inputs": ("bundle",),
    "metrics": ("scores", "thresholds"),
    "plots": ("metrics",),
    "calibration": ("metrics",),
    "points": ("calibration",),
    "calibration_file": ("bundle", "points"),
    "online": ("calibration_file", "predictions"),
    "gate": ("points", "thresholds"),
    "execution": ("gate", "inputs", "kernels", "predictions"),
    "simulate": ("execution",),
    "cascade": ("execution", "online", "records"),
    "runtime": ("cascade", "sample"),  # offramp.runtime itself: the names that users import
    "jobs": ("cascade", "plots", "simulate"),
    "cli": ("jobs",),
    "export": ("cli",),  # training reads data as the jobs do, and has commands of its own
    "server": ("jobs", "runtime"),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("offramp", *(parts[:-1] if parts[-1] == "__init__" else parts)))


FILES = {module_of(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def imported(path: Path) -> set[str]:
    """Modules of offramp that a file names in any import: at the top, in a function, or for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` is an arrow to the module.
            found |= {name if (name := f"{node.module}.{alias.name}") in FILES else node.module for alias in node.names}
    return {name for name in found if name in FILES}


GRAPH = {name: imported(path) - {name} for name, path in FILES.items()}


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    return parts[1] if parts[0] == "runtime" and len(parts) > 1 else parts[0]


ROOMS = {
    room: {room_of(other) for name, others in GRAPH.items() if room_of(name) == room for other in others} - {room}
    for room in {room_of(name) for name in FILES}
}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle, empty if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def test_no_files_import_each_other_in_a_circle():
    assert circle(GRAPH) == []


def test_no_rooms_import_each_other_in_a_circle():
    assert circle(ROOMS) == []


def test_no_folders_of_the_jobs_import_each_other_in_a_circle():
    folders: dict[str, set[str]] = {}
    for name, others in GRAPH.items():
        if name.startswith("offramp.runtime.jobs.") and name.count(".") > 3:
            inside = {o.split(".")[3] for o in others if o.startswith("offramp.runtime.jobs.") and o.count(".") > 3}
            folders.setdefault(name.split(".")[3], set()).update(inside)
    assert circle({folder: others - {folder} for folder, others in folders.items()}) == []


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_from_rooms_below_it(room):
    allowed, more = set(), set(BELOW[room])
    while more:
        allowed |= more
        more = {below for name in more for below in BELOW[name]} - allowed
    assert ROOMS[room] <= allowed


def test_there_are_few_rooms_on_few_floors():
    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in ROOMS[room]), default=0)

    assert set(ROOMS) == set(BELOW)
    assert len(ROOMS) <= MOST_ROOMS
    assert max(floor(room) for room in ROOMS) <= MOST_FLOORS


def test_no_folder_is_crowded():
    for package in PACKAGES:
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
            modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
            name = folder.relative_to(ROOT).as_posix()
            assert len(modules) <= MOST_MODULES or name in CROWDED, f"{name} has {len(modules)} modules"


def test_nobody_reaches_into_another_modules_private_names():
    """Tests and benchmarks included: what they need is public, or they are about the wrong thing."""
    outside = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    for path in [*FILES.values(), *outside]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offramp"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)}:{node.lineno} imports {private}"
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and path in outside:
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os", "torch")
                assert own or node.attr.startswith("__"), f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
