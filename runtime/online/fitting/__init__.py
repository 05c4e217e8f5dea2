"""New calibrators from labelled rows.

recalibrator: a candidate from a window. tables: how they are fitted fast. alike: since when rows have been alike.
"""
