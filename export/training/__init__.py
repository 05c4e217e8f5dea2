"""Heads on a frozen classifier are trained on what it says, once, of every row."""
