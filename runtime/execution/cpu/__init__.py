"""Rows on ONNX Runtime's CPU provider: through the cascade graph, or block by block."""
