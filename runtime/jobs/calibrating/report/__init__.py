"""The report of a calibration: its numbers, and the page that shows them."""
