"""The models under measurement: written as ONNX or Python files into a scratch repository, never committed."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_IDENTITY_PY = """
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", data)]))
        return responses
"""

_IDENTITY_IO = """
max_batch_size: 32
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


_NOT_INLINE = 'parameters { key: "inline_execution" value { string_value: "never" } }'


def identity(repository: Path, *, batching: bool = True, inline: bool = True) -> None:
    """`identity`: our identity backend, FP32 [batch, any]; in the event loop or through a worker thread."""
    config = 'backend: "identity"' + _IDENTITY_IO + _batching(batching) + ("" if inline else _NOT_INLINE)
    _write_config(repository / "identity", config)
    (repository / "identity" / "1").mkdir()


def triton_identity(repository: Path, *, batching: bool = True) -> None:
    """`identity`: the C++ identity of `servers/triton_identity.cc`, for Triton alone."""
    _write_config(repository / "identity", 'backend: "mini"' + _IDENTITY_IO + _batching(batching))
    (repository / "identity" / "1").mkdir()


def python_identity(repository: Path) -> None:
    """`identity_py`: the same as a Python model that runs unmodified on Triton."""
    folder = repository / "identity_py"
    _write_config(folder, 'backend: "python"' + _IDENTITY_IO + "instance_group [ { count: 1 kind: KIND_CPU } ]\n")
    (folder / "1").mkdir()
    (folder / "1" / "model.py").write_text(_IDENTITY_PY)


def wide_mlp(repository: Path, name: str, *, batching: bool, width: int = 3072) -> None:
    """A digits classifier whose weights do not fit a cache, so that one row costs nearly as much as many."""
    rng = np.random.default_rng(0)
    sizes = [64, width, width, 10]
    nodes, weights, source = [], [], "image"
    for index, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        last = index == len(sizes) - 2
        matrix = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(rows))
        weights.append(numpy_helper.from_array(matrix, f"w{index}"))
        target = "logits" if last else f"h{index}"
        nodes.append(helper.make_node("MatMul", [source, f"w{index}"], [target]))
        if not last:
            nodes.append(helper.make_node("Relu", [target], [f"r{index}"]))
            source = f"r{index}"
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 64])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])]
    graph = helper.make_graph(nodes, name, inputs, outputs, weights)
    _write_onnx(repository / name, graph, "max_batch_size: 64\n" + _batching(batching) + _one_instance())


def digits_mlp(repository: Path) -> Path:
    """`mlp`: the digits classifier of `model_repository/` with dynamic batching; its ONNX file."""
    source = Path(__file__).parent.parent / "model_repository" / "digits_onnx"
    shutil.copytree(source, repository / "mlp")
    config = (source / "config.pbtxt").read_text().replace('name: "digits_onnx"', 'name: "mlp"') + _one_instance()
    (repository / "mlp" / "config.pbtxt").write_text(config)
    return repository / "mlp" / "1" / "model.onnx"


def resnet18(repository: Path) -> None:
    """`resnet18`: the shapes of ResNet-18 with random weights; image [batch, 3, 224, 224] -> logits [batch, 1000]."""
    builder = _ConvNet()
    out = builder.pool(builder.conv("image", 3, 64, kernel=7, stride=2), "MaxPool")
    channels = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage > 0 and block == 0 else 1
            out = builder.residual(out, channels, width, stride)
            channels = width
    out = builder.add("GlobalAveragePool", [out])
    out = builder.add("Flatten", [out])
    builder.weight("fc", (512, 1000))
    builder.nodes.append(helper.make_node("MatMul", [out, "fc"], ["logits"]))
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 224, 224])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1000])]
    graph = helper.make_graph(builder.nodes, "resnet18", inputs, outputs, builder.weights)
    _write_onnx(repository / "resnet18", graph, "max_batch_size: 8\n" + _one_instance())
    _write_onnx(repository / "resnet18_two", graph, "max_batch_size: 8\n" + _one_instance(2))


def torch_resnet18(repository: Path) -> None:
    """`resnet18_torch`, and `resnet18_torch_two` with two instances: the same shapes as an exported program."""
    import torch

    torch.manual_seed(0)
    shape = {0: torch.export.Dim("batch", max=8)}
    image = torch.rand(2, 3, 224, 224)
    program = torch.export.export(_torch_resnet().eval(), (image,), dynamic_shapes=(shape,))
    for name, count in (("resnet18_torch", 1), ("resnet18_torch_two", 2)):
        folder = repository / name
        threads = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }\n'
        group = f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n"
        # Requests go one by one, as in the bare loop.
        _write_config(folder, 'backend: "pytorch"\nmax_batch_size: 8\n' + group + threads + _TORCH_IO)
        (folder / "1").mkdir()
        torch.export.save(program, folder / "1" / "model.pt2")


_TORCH_IO = """
input [ { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1000 ] } ]
"""


def _torch_resnet() -> Any:
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, given: int, made: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
            self.aside = (
                nn.Conv2d(given, made, 1, stride, bias=False) if stride != 1 or given != made else nn.Identity()
            )

        def forward(self, image: Any) -> Any:
            return nn.functional.relu(self.second(nn.functional.relu(self.first(image))) + self.aside(image))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = []
            given = 64
            for stage, width in enumerate((64, 128, 256, 512)):
                for block in range(2):
                    blocks.append(Residual(given, width, 2 if stage > 0 and block == 0 else 1))
                    given = width
            self.begin = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
            self.blocks = nn.Sequential(*blocks)
            self.end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000, bias=False))

        def forward(self, image: Any) -> Any:
            return self.end(self.blocks(self.begin(image)))

    return ResNet()


class _ConvNet:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(0)

    def weight(self, name: str, shape: tuple[int, ...]) -> str:
        fan_in = float(np.prod(shape[1:])) if len(shape) > 2 else float(shape[0])
        values = self._rng.standard_normal(shape, dtype=np.float32) * np.float32(1 / np.sqrt(fan_in))
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, kind: str, inputs: list[str], **attributes: object) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def conv(self, source: str, given: int, made: int, *, kernel: int, stride: int, relu: bool = True) -> str:
        name = self.weight(f"w{len(self.nodes)}", (made, given, kernel, kernel))
        pads = [kernel // 2] * 4
        out = self.add("Conv", [source, name], kernel_shape=[kernel, kernel], strides=[stride, stride], pads=pads)
        return self.add("Relu", [out]) if relu else out

    def pool(self, source: str, kind: str) -> str:
        return self.add(kind, [source], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])

    def residual(self, source: str, given: int, made: int, stride: int) -> str:
        out = self.conv(source, given, made, kernel=3, stride=stride)
        out = self.conv(out, made, made, kernel=3, stride=1, relu=False)
        if stride != 1 or given != made:
            source = self.conv(source, given, made, kernel=1, stride=stride, relu=False)
        return self.add("Relu", [self.add("Add", [out, source])])


def _write_onnx(folder: Path, graph: onnx.GraphProto, config: str) -> None:
    _write_config(folder, 'backend: "onnxruntime"\n' + config)
    (folder / "1").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, str(folder / "1" / "model.onnx"))


def _write_config(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)


def _one_instance(count: int = 1) -> str:
    # One thread each, so that server and bare loop are compared on the same work.
    return (
        f"instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n"
        'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
    )


def _batching(enabled: bool) -> str:
    return "dynamic_batching { }\n" if enabled else ""
