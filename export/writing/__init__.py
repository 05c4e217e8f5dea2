"""ONNX graphs as a bundle has them: blocks with their gates, the cascade graph, weights stored once."""
