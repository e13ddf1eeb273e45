"""The older `platform:` names and their backends."""

from __future__ import annotations

from collections.abc import Mapping

ENSEMBLE = "ensemble"

BACKENDS: Mapping[str, str] = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "torch_aoti": "pytorch",
}
