"""A small real bundle that ships with the package: handwritten digits, with held-out rows to try it on."""
