"""A torch module as one ONNX graph: found, run without leaving a trace in it, and exported."""
