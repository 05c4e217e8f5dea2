"""Does ONNX Runtime load what was written? Some float16 graphs end the process, so that another one tries first.

ONNX Runtime 1.32 does where it fuses the transpose in front of a float16 MatMul: torch's TransformerEncoderLayer.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from offramp.runtime.errors import ExportError
from offramp.runtime.execution.cpu.session import onnxruntime

_PROGRAM = """
import sys
from pathlib import Path
from offramp.runtime.execution.cpu.session import CPU, open_session
for path in sys.argv[1:]:
    print(path, flush=True)
    open_session(Path(path), threads=1, providers=CPU)
"""
# Python's own exit codes: what it raises here is raised again where it is handled.
_ENDED_BY_ITSELF = (0, 1)


def check_loads(paths: Sequence[Path]) -> None:
    """Raises ExportError, naming the graph, where loading one of them ends the process that does it."""
    tried = [sys.executable, "-c", _PROGRAM, *map(str, paths)]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    if done.returncode not in _ENDED_BY_ITSELF and done.stdout:
        name = Path(done.stdout.splitlines()[-1]).name
        raise ExportError(
            f"ONNX Runtime {onnxruntime().__version__} ends the process while it loads {name}, which has float16 in "
            "it: export the model in float32, model.float()."
        )
