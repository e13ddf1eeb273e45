"""The documents of Ollama's API, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

from modelserver.config.ollama_options import OPTION_KINDS
from modelserver.frontends.http.framing import NDJSON
from modelserver.protocol.api import RouteSchema, Schema

_JSON: dict[str, dict[str, Any]] = {
    "integer": {"type": ["integer", "null"]},
    "float32": {"type": ["number", "null"]},
    "boolean": {"type": ["boolean", "null"]},
    "array": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}}]},
}

TYPES: dict[str, Schema] = {
    "Error": "{error: string}",
    "Options": {"type": "object", "properties": {name: _JSON[kind] for name, kind in OPTION_KINDS.items()}},
    "Called": "{name: string, arguments?: object, index?: integer, *: any}",
    "ToolCall": "{id?: string, function: Called, *: any}",
    "Message": """{role: string, content?: string, images?: [string], name?: string, tool_name?: string,
        tool_call_id?: string, thinking?: string, tool_calls?: [ToolCall], *: any}""",
    "Tool": "{type?: string, function: {name: string, description?: string, parameters?: object, *: any}, *: any}",
    "Wanted": """{model?: string, name?: string, options?: Options, keep_alive?: number | string, stream?: boolean,
        format?: 'json' | '' | object, think?: boolean | 'low' | 'medium' | 'high' | 'max', logprobs?: boolean,
        top_logprobs?: integer 0..20, *: any}""",
    "Chat": "Wanted & {messages?: [Message], tools?: [Tool]}",
    "Generate": """Wanted & {prompt?: string, suffix?: string, system?: string, template?: string, raw?: boolean,
        context?: [integer 0..], images?: [string]}""",
    "Counts": """{total_duration?: integer, load_duration?: integer, prompt_eval_count?: integer,
        prompt_eval_duration?: integer, eval_count?: integer, eval_duration?: integer}""",
    "Answer": """Counts & {model: string, created_at: string, done: boolean, done_reason?: string, logprobs?: [any],
        context?: [integer], message?: {role: 'assistant', content: string, thinking?: string,
        tool_calls?: [{id: string, function: {index: integer, name: string, arguments: any}}]}, response?: string,
        thinking?: string, *: any}""",
    "Embed": """{model?: string, name?: string, input: string | [string], truncate?: boolean, dimensions?: integer 0..,
        options?: Options, keep_alive?: number | string, *: any}""",
    "EmbedOne": """{model?: string, name?: string, prompt?: string, truncate?: boolean, dimensions?: integer 0..,
        options?: Options, keep_alive?: number | string, *: any}""",
    "Details": """{parent_model: string, format: string, family: string, families: [string] | null,
        parameter_size: string, quantization_level: string}""",
    "Stored": "{model?: string, name?: string, insecure?: boolean, stream?: boolean, *: any}",
    "New": """{model?: string, name?: string, from?: string, files?: object, adapters?: object, draft_files?: object,
        quantize?: string, quantization?: string, template?: string, system?: string,
        license?: string | [string], parameters?: object, messages?: [Message], modelfile?: string, stream?: boolean,
        *: any}""",
    "Progress": "{status: string, digest?: string, total?: integer, completed?: integer}",
    "Model": """{name: string, model: string, size: integer, digest: string, details: Details, modified_at?: string,
        capabilities?: [string], expires_at?: string, size_vram?: integer, context_length?: integer, *: any}""",
}

SCHEMAS: dict[str, RouteSchema] = {
    "POST /api/chat": RouteSchema(body="Chat", answer="Answer", event="Answer", stream_type=NDJSON.content_type),
    "POST /api/generate": RouteSchema(
        body="Generate", answer="Answer", event="Answer", stream_type=NDJSON.content_type
    ),
    "POST /api/embed": RouteSchema(body="Embed", answer="Counts & {model: string, embeddings: [[number]]}"),
    "POST /api/embeddings": RouteSchema(body="EmbedOne", answer="{embedding: [number]}"),
    "POST /api/show": RouteSchema(
        body="{model?: string, name?: string, verbose?: boolean, *: any}",
        answer="""{modelfile: string, parameters: string, template: string, details: Details, model_info: object,
            capabilities: [string], modified_at: string, *: any}""",
    ),
    "POST /api/pull": RouteSchema(body="Stored", answer="Progress", event="Progress", stream_type=NDJSON.content_type),
    "POST /api/push": RouteSchema(body="Stored", answer="Progress", event="Progress", stream_type=NDJSON.content_type),
    "POST /api/create": RouteSchema(body="New", answer="Progress", event="Progress", stream_type=NDJSON.content_type),
    "POST /api/copy": RouteSchema(body="{source: string, destination: string}"),
    "DELETE /api/delete": RouteSchema(body="{model?: string, name?: string}"),
    "GET /api/tags": RouteSchema(answer="{models: [Model]}"),
    "GET /api/ps": RouteSchema(answer="{models: [Model]}"),
    "GET /api/version": RouteSchema(answer="{version: string}"),
    "GET /": RouteSchema(answer="string", media_type="text/plain"),
}
