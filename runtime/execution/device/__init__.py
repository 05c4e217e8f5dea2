"""Cascades on devices other than ONNX Runtime's CPU: state stays on the device, and only small numbers come back.

Nothing here is imported unless such a device is asked for; torch, onnx and triton are needed only then.
"""
