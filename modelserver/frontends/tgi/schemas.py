"""The documents of TGI's API, for `/openapi.json`."""

from __future__ import annotations

from modelserver.frontends.openai.schemas import CONVERSATION
from modelserver.protocol.api import RouteSchema, Schema

TYPES: dict[str, Schema] = {
    **CONVERSATION,
    "Error": "{error: string, error_type: string}",
    "Parameters": """{temperature?: number 0<.., repetition_penalty?: number 0<.., frequency_penalty?: number -2..2,
        top_k?: integer 1.., top_p?: number 0<..1, typical_p?: number 0<..1, do_sample?: boolean, seed?: integer 0..,
        max_new_tokens?: integer 1.., stop?: [string] 0..64, best_of?: integer 1..16, truncate?: integer 1..,
        return_full_text?: boolean, details?: boolean, decoder_input_details?: boolean, top_n_tokens?: integer 0..20,
        watermark?: boolean, adapter_id?: string,
        grammar?: {type: 'json' | 'regex' | 'json_schema', value: any}, *: any}""",
    "Generate": "{inputs: string 1.., parameters?: Parameters, model?: string, add_special_tokens?: boolean, *: any}",
    "Prefill": "{id: integer, text: string, logprob: number | null}",
    "Token": "{id: integer | null, text: string, logprob: number | null, special: boolean}",
    "Sequence": """{finish_reason: 'length' | 'eos_token' | 'stop_sequence', generated_tokens: integer,
        seed: integer | null, prefill: [Prefill], tokens: [Token], top_tokens?: [[Token]], generated_text?: string,
        best_of_sequences?: [Sequence]}""",
    "Answer": "{generated_text: string, details?: Sequence}",
    "Event": """{index: integer, token: Token, top_tokens?: [Token], generated_text: string | null,
        details: object | null}""",
    "Piece": "{id: integer, text: string, start: integer, stop: integer}",
}

_MODEL = "{model?: string}"
_OLDER = RouteSchema(body="Generate & {stream?: boolean}", answer="[Answer]", event="Event", query=_MODEL)
SCHEMAS: dict[str, RouteSchema] = {
    "POST /generate": RouteSchema(body="Generate", answer="Answer", query=_MODEL),
    "POST /generate_stream": RouteSchema(body="Generate", event="Event", query=_MODEL),
    "POST /": _OLDER,
    "POST /invocations": _OLDER,
    "POST /chat_tokenize": RouteSchema(
        body="Conversation", answer="{tokenize_response: [Piece], templated_text: string}", query=_MODEL
    ),
    "POST /tokenize": RouteSchema(
        body="{inputs: string, add_special_tokens?: boolean, model?: string, *: any}", answer="[Piece]", query=_MODEL
    ),
    "GET /info": RouteSchema(
        answer="{model_id: string, max_best_of: integer, max_stop_sequences: integer, version: string, *: any}",
        query=_MODEL,
    ),
}
