"""The rival: the whole network in one plain ONNX Runtime session."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from offramp.runtime.bundle import GATE_INPUTS, Bundle
from offramp.runtime.execution.cpu.session import AWAKE, CPU, onnxruntime, open_session
from offramp.runtime.execution.stages import plan

Run = Callable[[Mapping[str, Any]], object]


def plain_sessions(bundle: Bundle, threads: int) -> tuple[dict[str, Run], str]:
    """Runs of the whole network, by settings, and what they are in words; each answers with label and score.

    The merged graph has the last exit's head and gate, and no earlier one. Threads that don't spin are best for one
    machine, threads that spin for a moment for another, so both are tried. As ONNX Runtime comes they spin on for some
    30 ms after each run, and would take a core away from whoever has the next turn.
    """
    manifest = bundle.manifest
    stages = plan(manifest, [len(manifest.exits) - 1])
    last = manifest.exits[-1]
    classes = len(manifest.classes)
    gate = dict(
        zip(
            GATE_INPUTS,
            (np.ones(classes, np.float32), np.zeros(classes, np.float32), np.ones(classes, np.float32)),
            strict=True,
        )
    )
    wanted = [
        [last.label, last.score] if k + 1 == len(stages) else [n for n in stage.passes if n in stage.graph.outputs]
        for k, stage in enumerate(stages)
    ]

    def run_of(opened: list[Any]) -> Run:
        takes = [[given.name for given in session.get_inputs()] for session in opened]

        def run(inputs: Mapping[str, Any]) -> object:
            state: dict[str, Any] = {**gate, **inputs}
            made: Any = None
            for session, names, outputs in zip(opened, takes, wanted, strict=True):
                made = session.run(outputs, {name: state[name] for name in names})
                state.update(zip(outputs, made, strict=True))
            return made

        return run

    files = [bundle.file(stage.graph.file) for stage in stages]
    runs = {
        "no spinning": run_of([_session(file, threads) for file in files]),
        "brief spinning": run_of([open_session(file, threads=threads, providers=CPU, spin_us=AWAKE) for file in files]),
    }
    if len(stages) == 1:
        return runs, f"one plain ONNX Runtime session of the whole network ({stages[0].graph.file}, no early heads)"
    return runs, (
        f"the whole network in {len(stages)} plain ONNX Runtime sessions, for the bundle has no graph of all of it: "
        "one session would be faster, so points look better here than they are"
    )


def _session(path: Any, threads: int) -> Any:
    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime().InferenceSession(str(path), options, providers=CPU)
