"""The calibration job: from labelled records to operating points, each with what it promises and why."""
