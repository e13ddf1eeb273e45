"""The calls of one model, with the names, datatypes and shapes of its own tensors."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any
from urllib.parse import quote

import orjson

from modelserver.config.schema import ModelConfig, ModelInput, ModelOutput
from modelserver.config.signature import is_open
from modelserver.core.datatype import Datatype
from modelserver.frontends.openapi.notation import Json

TAG = "Models"
_TYPES = "#/components/schemas/KServe."
# An example has all elements of its inputs; longer ones have none.
_MAX_EXAMPLE_ELEMENTS = 64
_ZEROS = {Datatype.BYTES: "text", Datatype.BOOL: False, Datatype.FP32: 0.0, Datatype.FP64: 0.0}


def model_paths(config: ModelConfig, security: list[dict[str, list[str]]]) -> bytes:
    """Members of the document's `paths`, as JSON: infer and, with text or values by name, generate."""
    path = f"/v2/models/{quote(config.name, safe='')}"
    calls = {"infer": (_infer_body(config), _infer_answer(config), _infer_example(config))}
    generated = (_generate_body(config), _generate_answer(config), None)
    policy = config.model_transaction_policy
    if policy is None or not policy.decoupled:
        calls["generate"] = generated
    calls["generate_stream"] = generated
    found = {
        f"{path}/{verb}": {"post": _operation(config.name, verb, *documents, security)}
        for verb, documents in calls.items()
    }
    return orjson.dumps(found)[1:-1]


def _operation(
    name: str, verb: str, body: Json, answer: Json, example: Json | None, security: list[dict[str, list[str]]]
) -> Json:
    content: Json = {"schema": body} if example is None else {"schema": body, "example": example}
    if verb == "generate_stream":
        answered: Json = {"text/event-stream": {"x-event": answer}}
    else:
        answered = {"application/json": {"schema": answer}}
    operation: Json = {
        "operationId": f"{verb} {name}",
        "tags": [TAG],
        "summary": f"{verb} of the model {name}",
        "requestBody": {"required": True, "content": {"application/json": content}},
        "responses": {
            "200": {"description": "The model's outputs", "content": answered},
            "default": {"$ref": "#/components/responses/KServe.Error"},
        },
    }
    return {**operation, "security": security} if security else operation


def _infer_body(config: ModelConfig) -> Json:
    if is_open(config):
        return _ref("Infer")
    inputs = [_tensor(config, each) for each in config.input]
    num_needed = sum(not each.optional for each in config.input)
    names = [each.name for each in config.output]
    wish = {"type": "object", "properties": {"name": {"enum": names}, "parameters": _ref("Parameters")}}
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "parameters": _ref("Parameters"),
            "inputs": {"type": "array", "items": _any_of(inputs), "minItems": num_needed, "maxItems": len(inputs)},
            "outputs": {"type": "array", "items": {**wish, "required": ["name"]}},
        },
        "required": ["inputs"],
    }


def _infer_answer(config: ModelConfig) -> Json:
    if is_open(config):
        return _ref("InferAnswer")
    outputs = [_tensor(config, each) for each in config.output]
    own = {"type": "object", "properties": {"outputs": {"type": "array", "items": _any_of(outputs)}}}
    return {"allOf": [_ref("InferAnswer"), own]}


def _tensor(config: ModelConfig, spec: ModelInput | ModelOutput) -> Json:
    """An input or output. Outputs may be sent as classes, so that only those of inputs are exact."""
    properties: Json = {"name": {"const": spec.name}}
    if isinstance(spec, ModelOutput):
        return {"type": "object", "properties": properties, "required": ["name", "datatype", "shape"]}
    assert spec.data_type is not None, "a loaded model's inputs have datatypes"
    properties["datatype"] = {"const": spec.data_type.value}
    properties["shape"] = _shape(config, spec)
    properties["data"] = _ref(f"Data.{spec.data_type.value}")
    properties["parameters"] = _ref("Parameters")
    return {"type": "object", "properties": properties, "required": ["name", "datatype", "shape"]}


def _shape(config: ModelConfig, spec: ModelInput) -> Json:
    sizes: list[Json] = [{"const": size} if size >= 0 else {"type": "integer", "minimum": 0} for size in spec.dims]
    if config.max_batch_size > 0 and not spec.is_shape_tensor:
        sizes.insert(0, {"type": "integer", "minimum": 1, "maximum": config.max_batch_size})
    return {"type": "array", "prefixItems": sizes, "items": False, "minItems": len(sizes), "maxItems": len(sizes)}


def _infer_example(config: ModelConfig) -> Json | None:
    if is_open(config):
        return None
    inputs = []
    for spec in config.input:
        shape = [max(1, size) for size in spec.dims]
        if config.max_batch_size > 0 and not spec.is_shape_tensor:
            shape.insert(0, 1)
        if spec.optional:
            continue
        assert spec.data_type is not None, "a loaded model's inputs have datatypes"
        if prod(shape) > _MAX_EXAMPLE_ELEMENTS or spec.data_type in (Datatype.FP16, Datatype.BF16):
            return None
        data = [_ZEROS.get(spec.data_type, 0)] * prod(shape)
        inputs.append({"name": spec.name, "datatype": spec.data_type.value, "shape": shape, "data": data})
    return {"inputs": inputs}


def _generate_body(config: ModelConfig) -> Json:
    return {
        "type": "object",
        "properties": {
            **{each.name: _value(each.data_type) for each in config.input},
            "id": {"type": "string"},
            "parameters": {"type": "object"},
        },
        # Inputs may be members of `parameters`, too.
        "additionalProperties": True,
    }


def _generate_answer(config: ModelConfig) -> Json:
    own = {"type": "object", "properties": {each.name: _value(each.data_type) for each in config.output}}
    return {"allOf": [_ref("GenerateAnswer"), own]}


def _value(datatype: Datatype | None) -> Json:
    return {} if datatype is None else _ref(f"Value.{datatype.value}")


def _any_of(schemas: Iterable[Json]) -> Json:
    found = list(schemas)
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _TYPES + name}
