"""The documents of KServe's API and of SageMaker's models, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

from modelserver.core.datatype import Datatype
from modelserver.protocol.api import RouteSchema, Schema


def _element(datatype: Datatype) -> dict[str, Any]:
    if datatype is Datatype.BYTES:
        return {"type": "string"}
    if datatype is Datatype.BOOL:
        return {"type": "boolean"}
    if datatype.numpy.kind in "iu" and datatype is not Datatype.BF16:
        return {"type": "integer"}
    return {"anyOf": [{"type": "number"}, {"type": "null"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def _data(datatype: Datatype) -> dict[str, Any]:
    """Elements in row-major order, flat or nested in any way."""
    itself = {"$ref": f"#/components/schemas/KServe.Data.{datatype.value}"}
    return {"type": "array", "items": {"anyOf": [_element(datatype), itself]}}


TYPES: dict[str, Schema] = {
    "Error": "{error: string}",
    **{f"Data.{datatype.value}": _data(datatype) for datatype in Datatype},
    **{f"Value.{datatype.value}": {"anyOf": [_element(datatype), _data(datatype)]} for datatype in Datatype},
    "Parameters": "{*: string | number | boolean}",
    "Input": "{name: string, datatype: string, shape: [integer 0..], data?: [any], parameters?: Parameters}",
    "OutputWish": "{name: string, parameters?: Parameters}",
    "Output": "{name: string, datatype: string, shape: [integer], data?: [any], parameters?: object}",
    "Infer": "{id?: string, parameters?: Parameters, inputs: [Input] 1.., outputs?: [OutputWish]}",
    "InferAnswer": """{model_name: string, model_version?: string, id?: string, parameters?: object,
        outputs: [Output]}""",
    "Generate": "{id?: string, parameters?: object, *: any}",
    "GenerateAnswer": "{model_name: string, model_version: string, *: any}",
    "Server": "{name: string, version: string, extensions: [string]}",
    "TensorMetadata": "{name: string, datatype: string, shape: [integer]}",
    "Model": """{name: string, versions?: [string], platform: string, inputs: [TensorMetadata],
        outputs: [TensorMetadata]}""",
    "Duration": "{count: integer, ns: integer}",
    "Statistics": """{model_stats: [{name: string, version: string, last_inference: integer, inference_count: integer,
        execution_count: integer, inference_stats: {*: Duration}, response_stats: {*: object}, batch_stats: [object],
        memory_usage: [{type: string, id: integer, byte_size: integer}]}]}""",
    "Overview": "{server: object, host: object, latency_bounds_ms: [number], models: [object]}",
    "Entry": "{name: string, version?: string, state?: string, reason?: string, repository?: string}",
    "Control": "{parameters?: {*: string | integer | boolean}}",
    "Traffic": "{name: string, shares?: {*: number}, shadow_counts?: object, *: any}",
    "Region": "{name: string, key?: string, offset?: integer, byte_size: integer, device_id?: integer}",
    "LogSettings": """{log_file: string, log_info: boolean, log_warning: boolean, log_error: boolean,
        log_verbose_level: integer, log_format: string}""",
    "LogChanges": """{log_info?: boolean, log_warning?: boolean, log_error?: boolean, log_verbose_level?: integer 0..,
        log_format?: 'default' | 'ISO8601' | 'json'}""",
    "TraceSettings": "{*: string | [string]}",
    "TraceChanges": "{*: string | [string] | null}",
}

_STATISTICS = RouteSchema(answer="Statistics")
_TRAFFIC = RouteSchema(answer="Traffic")
_MODEL = "/v2/models/{name}[/versions/{version}]"
_OF_MODEL = "/v2/repository[/{repository}]/models/{name}[/versions/{version}]"
SCHEMAS: dict[str, RouteSchema] = {
    f"POST {_MODEL}/infer": RouteSchema(body="Infer", answer="InferAnswer"),
    f"POST {_MODEL}/generate": RouteSchema(body="Generate", answer="GenerateAnswer"),
    f"POST {_MODEL}/generate_stream": RouteSchema(body="Generate", event="GenerateAnswer"),
    "GET /v2": RouteSchema(answer="Server"),
    "GET /v2/models": RouteSchema(answer="{models: [string]}"),
    f"GET {_MODEL}": RouteSchema(answer="Model"),
    f"GET {_MODEL}/config": RouteSchema(answer="object"),
    f"GET {_MODEL}/stats": _STATISTICS,
    "GET /v2/models/stats": _STATISTICS,
    f"POST {_MODEL}/stats/reset": RouteSchema(answer="object"),
    "POST /v2/models/stats/reset": RouteSchema(answer="object"),
    "GET /v2/overview": RouteSchema(answer="Overview"),
    "POST /v2/repository[/{repository}]/index": RouteSchema(body="{ready?: boolean, *: any}", answer="[Entry]"),
    f"POST {_OF_MODEL}/load": RouteSchema(body="Control"),
    f"POST {_OF_MODEL}/unload": RouteSchema(body="Control"),
    "GET /v2/repository/models/{name}/traffic": _TRAFFIC,
    "DELETE /v2/repository/models/{name}/traffic": _TRAFFIC,
    "POST /v2/repository/models/{name}/traffic": RouteSchema(body="{persist?: boolean, *: any}", answer="Traffic"),
    "GET /v2/systemsharedmemory[/region/{region}]/status": RouteSchema(answer="[Region]"),
    "GET /v2/cudasharedmemory[/region/{region}]/status": RouteSchema(answer="[Region]"),
    "POST /v2/systemsharedmemory/region/{region}/register": RouteSchema(
        body="{key: string, offset?: integer 0.., byte_size: integer 0..}"
    ),
    "POST /v2/cudasharedmemory/region/{region}/register": RouteSchema(
        body="{raw_handle: {b64: string}, device_id: integer 0.., byte_size: integer 0..}"
    ),
    "GET /v2/logging": RouteSchema(answer="LogSettings"),
    "POST /v2/logging": RouteSchema(body="LogChanges", answer="LogSettings"),
    "GET /v2/logging/lines": RouteSchema(
        answer="string", query="{lines?: integer 0.., follow?: 'true' | 'false'}", media_type="text/plain"
    ),
    "GET /v2[/models/{name}]/trace/setting": RouteSchema(answer="TraceSettings"),
    "POST /v2[/models/{name}]/trace/setting": RouteSchema(body="TraceChanges", answer="TraceSettings"),
    "GET /v2/trace/recent": RouteSchema(answer="{traces: [object]}"),
}
