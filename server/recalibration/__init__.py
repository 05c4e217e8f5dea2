"""Learning from labels while serving: rows are kept as they are answered, labels come in, calibrations change."""
