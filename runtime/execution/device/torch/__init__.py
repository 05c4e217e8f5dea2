"""A bundle's graphs as torch programs, for devices without an ONNX Runtime of their own."""
