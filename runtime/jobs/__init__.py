"""Offline jobs: record a model's outputs, choose operating points from them, audit, inspect and repack bundles.

```python
from offramp.runtime.jobs import AbstainRisk, Budget, calibrate, record

record(cascade, "data.npz", "records")
result = calibrate("bundle", "records", targets=[Budget(0.5, "balanced")], abstain=[AbstainRisk(0.05)])
```

Importing it loads numpy and the runtime; scipy, pyarrow and matplotlib come when a job needs them. This is for users
of the package: its modules import from each other, never from here.
"""

from offramp.runtime.jobs.auditing.audit import audit_bundle, audit_records
from offramp.runtime.jobs.auditing.evidence import Audit
from offramp.runtime.jobs.benching.bench import Bench, bench
from offramp.runtime.jobs.bundles.inspect import Inspection, inspect
from offramp.runtime.jobs.bundles.repack import ExitSet, choose_exits, repack
from offramp.runtime.jobs.bundles.time_model import TimeModel, measure_times
from offramp.runtime.jobs.bundles.timing import Timings, time_parts
from offramp.runtime.jobs.calibrating.calibrate import calibrate
from offramp.runtime.jobs.calibrating.history import diff, read_version
from offramp.runtime.jobs.calibrating.result import Calibrated, CalibrationRefused
from offramp.runtime.jobs.calibrating.targets import AbstainRisk, Budget, Guarantee, MaxDrop, MaxMs
from offramp.runtime.jobs.calibrating.versions import Version, history, promote, rollback
from offramp.runtime.jobs.data.feedback import from_feedback
from offramp.runtime.jobs.data.opened import OpenedRecords, open_records, own_logits
from offramp.runtime.jobs.data.sources import open_data
from offramp.runtime.jobs.evaluating.evaluate import Evaluation, evaluate
from offramp.runtime.jobs.recording.record import record

__all__ = [
    "AbstainRisk",
    "Audit",
    "Bench",
    "Budget",
    "Calibrated",
    "CalibrationRefused",
    "Evaluation",
    "ExitSet",
    "Guarantee",
    "Inspection",
    "MaxDrop",
    "MaxMs",
    "OpenedRecords",
    "TimeModel",
    "Timings",
    "Version",
    "audit_bundle",
    "audit_records",
    "bench",
    "calibrate",
    "choose_exits",
    "diff",
    "evaluate",
    "from_feedback",
    "history",
    "inspect",
    "measure_times",
    "open_data",
    "open_records",
    "own_logits",
    "promote",
    "read_version",
    "record",
    "repack",
    "rollback",
    "time_parts",
]
