"""The tensorrt backend: `model.plan`, or `model.onnx` from which an engine is built at load."""

from .backend import TensorRTBackend

BACKEND = TensorRTBackend
