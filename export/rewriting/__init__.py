"""Graphs said otherwise: the same values by fewer operations, or as exits that a gate can read."""
