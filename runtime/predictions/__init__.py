"""What a cascade answers, what it records, and what is kept of the rows it served."""

from offramp.runtime.predictions.predictions import Predictions
from offramp.runtime.predictions.records import Records
from offramp.runtime.predictions.seen import Reached, Said, Seen, joined

__all__ = ["Predictions", "Reached", "Records", "Said", "Seen", "joined"]
