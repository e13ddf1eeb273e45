"""The documents of Anthropic's API, for `/openapi.json`."""

from __future__ import annotations

from modelserver.protocol.api import RouteSchema, Schema

TYPES: dict[str, Schema] = {
    "Error": "{type: 'error', error: {type: string, message: string}}",
    "Block": """{type: string, text?: string, thinking?: string, signature?: string, id?: string, name?: string,
        input?: object, tool_use_id?: string, content?: string | [Block], is_error?: boolean, title?: string,
        source?: {type: string, data?: string, *: any}, *: any}""",
    "Message": "{role: 'user' | 'assistant' | 'system', content: string | [Block]}",
    "Tool": "{type?: string, name: string, description?: string, input_schema?: object, *: any}",
    "Conversation": """{model?: string, messages: [Message] 1..4096, system?: string | [Block], tools?: [Tool],
        tool_choice?: {type: 'auto' | 'any' | 'tool' | 'none', name?: string, disable_parallel_tool_use?: boolean},
        thinking?: {type: 'enabled' | 'adaptive' | 'between_tools' | 'disabled', *: any},
        output_config?: {effort?: 'low' | 'medium' | 'high' | 'xhigh' | 'max',
        format?: {type: 'json_schema', schema: object}, *: any}, *: any}""",
    "CreateMessage": """Conversation & {max_tokens: integer 1.., temperature?: number 0..2, top_p?: number 0<..1,
        top_k?: integer 0.., stop_sequences?: [string], stream?: boolean, metadata?: object, *: any}""",
    "Usage": """{input_tokens: integer, output_tokens: integer, cache_creation_input_tokens: integer,
        cache_read_input_tokens: integer}""",
    "Answer": """{id: string, type: 'message', role: 'assistant', model: string, content: [Block],
        stop_reason: string | null, stop_sequence: string | null, usage: Usage}""",
    "Begun": """{id: string, type: 'message', role: 'assistant', model: string, content: [Block], usage: Usage,
        stop_reason: null, stop_sequence: null}""",
    "Delta": """{type: 'text_delta', text: string} | {type: 'thinking_delta', thinking: string}
        | {type: 'signature_delta', signature: string} | {type: 'input_json_delta', partial_json: string}""",
    "Event": """{type: 'message_start', message: Begun}
        | {type: 'content_block_start', index: integer, content_block: Block}
        | {type: 'content_block_delta', index: integer, delta: Delta}
        | {type: 'content_block_stop', index: integer}
        | {type: 'message_delta', delta: {stop_reason: string, stop_sequence: string | null}, usage: Usage}
        | {type: 'message_stop' | 'ping'} | Error""",
}

SCHEMAS: dict[str, RouteSchema] = {
    "POST /v1/messages": RouteSchema(body="CreateMessage", answer="Answer", event="Event"),
    "POST /v1/messages/count_tokens": RouteSchema(body="Conversation", answer="{input_tokens: integer}"),
}
