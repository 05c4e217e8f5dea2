"""How rows run: which graphs an operating point needs, and an executor that runs them on a CPU or a device."""
