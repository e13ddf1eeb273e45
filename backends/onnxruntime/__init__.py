"""The onnxruntime backend: `model.onnx`, a file or a directory with external data."""

from .backend import OnnxBackend

BACKEND = OnnxBackend
