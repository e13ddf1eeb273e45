"""Writes trained networks into version directories: ONNX, TorchScript and torch.export."""

from __future__ import annotations

import io
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from training.networks import Perceptron

ONNX_OPSET = 17
ONNX_IR_VERSION = 8


class Reader(nn.Module):
    """A network with what a caller wants to know behind it: a probability per digit, and the digit."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        probabilities = torch.softmax(self.network(image), dim=1)
        return {"probabilities": probabilities, "digit": probabilities.argmax(dim=1, keepdim=True)}


class ProbabilityReader(nn.Module):
    """A network with a probability per digit behind it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.network(image), dim=1)


def write_onnx(network: Perceptron, path: Path) -> None:
    """A graph of plain Gemm and Relu nodes: image [batch, 8, 8] -> probabilities [batch, 10], digit [batch, 1]."""
    nodes = [helper.make_node("Flatten", ["image"], ["x0"], axis=1)]
    weights = []
    last = len(network.layers) - 1
    for index, layer in enumerate(network.layers):
        for kind, value in (("weight", layer.weight), ("bias", layer.bias)):
            weights.append(numpy_helper.from_array(value.detach().numpy(), f"{kind}{index}"))
        output = "logits" if index == last else f"y{index}"
        nodes.append(helper.make_node("Gemm", [f"x{index}", f"weight{index}", f"bias{index}"], [output], transB=1))
        if index != last:
            nodes.append(helper.make_node("Relu", [output], [f"x{index + 1}"]))
    nodes.append(helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1))
    nodes.append(helper.make_node("ArgMax", ["logits"], ["digit"], axis=1, keepdims=1))
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 8, 8])],
        [
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10]),
            helper.make_tensor_value_info("digit", TensorProto.INT64, ["batch", 1]),
        ],
        weights,
    )
    model = helper.make_model(
        graph,
        producer_name="modelserver training",
        ir_version=ONNX_IR_VERSION,
        opset_imports=[helper.make_opsetid("", ONNX_OPSET)],
    )
    onnx.checker.check_model(model, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def write_torchscript(network: nn.Module, path: Path) -> None:
    """A scripted module: forward(image) -> probabilities."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(ProbabilityReader(network).eval()), buffer)
    buffer.seek(0)
    # The debug records quote our sources and where they lay.
    reader = torch._C.PyTorchFileReader(buffer)
    writer = torch._C.PyTorchFileWriter(str(path))
    for name in reader.get_all_records():
        if not name.endswith(".debug_pkl") and name not in ("version", ".data/serialization_id", "byteorder"):
            record = reader.get_record(name)
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()


def write_exported_program(network: nn.Module, path: Path, *, max_batch: int) -> None:
    """An exported program: forward(image) -> {probabilities, digit} for batches of 1 to `max_batch`."""
    batch = torch.export.Dim("batch", min=1, max=max_batch)
    program = torch.export.export(Reader(network).eval(), (torch.zeros(2, 8, 8),), dynamic_shapes={"image": {0: batch}})
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it quotes our sources and where they lay
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
