"""Small random language models in a repository, and requests to them in NumPy arrays and JSON."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from support.clients import Array
from support.serving import RunningServer
from support.tiny_checkpoints import write_checkpoint

from modelserver.pb import grpc_service_pb2 as pb

# As long as an answer may be that no test waits for.
ENDLESS = 60_000
_BYTES = ("text_input", "messages", "sampling_parameters", "operation", "text_pair")
_INT32 = ("input_ids", "dimensions", "truncate_prompt_tokens", "truncate_pair_tokens")


def write_endless_checkpoint(directory: Path, seed: int) -> Path:
    """A checkpoint that can go on for `ENDLESS` tokens."""
    return write_checkpoint(directory, seed=seed, values={"max_position_embeddings": 2 * ENDLESS})


def write_llm(root: Path, name: str, checkpoint: Path, **parameters: Any) -> None:
    """A model whose model.json names the checkpoint; `parameters` go into its config.pbtxt."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.json").write_text(json.dumps({"model": str(checkpoint)}))
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    (root / name / "config.pbtxt").write_text("\n".join(['backend: "llm"', *lines]))


def arrays(**inputs: Any) -> dict[str, Array]:
    """Inputs of the contract: text, JSON, flags and numbers as the tensors that they are sent in."""
    return {name: _array(name, value) for name, value in inputs.items()}


def _array(name: str, value: Any) -> Array:
    if name in _BYTES:
        text = value if isinstance(value, bytes | str) else json.dumps(value)
        return np.array([text.encode() if isinstance(text, str) else text], object)
    if name in _INT32:
        return np.array(value, np.int32).reshape(-1)
    return np.array([value], bool)


def stream_request(model: str, request_id: str = "", **inputs: Any) -> pb.ModelInferRequest:
    """A message for ModelStreamInfer."""
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, array in arrays(**inputs).items():
        if name in _BYTES:
            raw, datatype = len(array[0]).to_bytes(4, "little") + array[0], "BYTES"
        else:
            raw, datatype = array.tobytes(), "INT32" if name in _INT32 else "BOOL"
        request.inputs.add(name=name, datatype=datatype, shape=list(array.shape))
        request.raw_input_contents.append(raw)
    return request


def first_text(raw: bytes) -> str:
    """The first element of a BYTES tensor on the wire."""
    return raw[4 : 4 + int.from_bytes(raw[:4], "little")].decode()


def numbers_of(served: RunningServer, model: str) -> Mapping[str, float]:
    """The samples of a model on the metrics page by name, those with further labels by `name{value}`."""
    with urllib.request.urlopen(f"http://{served.metrics_url}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model") == model:
                others = [
                    value
                    for key, value in sample.labels.items()
                    if key not in ("model", "version", "model_name", "engine")
                ]
                found[sample.name + "".join(f"{{{value}}}" for value in others)] = sample.value
    return found
