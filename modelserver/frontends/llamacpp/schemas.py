"""The documents of llama.cpp's API, for `/openapi.json`."""

from __future__ import annotations

from modelserver.frontends.llamacpp.request import INTEGERS, INTEGERS_WITHOUT_EFFECT, NUMBERS
from modelserver.frontends.openai.schemas import CONVERSATION, RANKING_NAMES, RERANK
from modelserver.frontends.openai.schemas import TYPES as OPENAI_TYPES
from modelserver.protocol.api import RouteSchema, Schema

_INTEGERS = (*INTEGERS, *INTEGERS_WITHOUT_EFFECT, "n_predict", "max_tokens")

TYPES: dict[str, Schema] = {
    **CONVERSATION,
    **{name: OPENAI_TYPES[name] for name in RANKING_NAMES},
    "Error": "{error: {code: integer, message: string, type: string, n_prompt_tokens?: integer, n_ctx?: integer}}",
    "Numbers": {
        "type": "object",
        "properties": {
            **{name: {"type": ["number", "null"]} for name in NUMBERS},
            **{name: {"type": ["integer", "null"]} for name in _INTEGERS},
        },
    },
    "Sampling": """Numbers & {model?: string, stream?: boolean, n?: integer 1..128, n_cmpl?: integer 1..128,
        n_probs?: integer 0..20, stop?: [string], grammar?: string, json_schema?: object | boolean,
        logit_bias?: [[integer | string | number | boolean]] | {*: number | boolean}, dry_sequence_breakers?: [string],
        ignore_eos?: boolean, return_tokens?: boolean, timings_per_token?: boolean, response_fields?: [string],
        cache_prompt?: boolean, return_progress?: boolean, *: any}""",
    "Prompt": "string | [integer | string] 1.. | {prompt_string: string, multimodal_data?: [string], *: any}",
    "Prompts": "Prompt | [Prompt] 1..",
    "Complete": "Sampling & {prompt: Prompts}",
    "Infill": """Sampling & {prompt?: string, input_prefix?: string, input_suffix: string,
        input_extra?: [{filename?: string, text: string}]}""",
    "Text": """{index: integer, content: string, tokens: [integer], stop: boolean, id_slot: integer,
        tokens_predicted: integer, tokens_evaluated: integer, timings?: object, completion_probabilities?: [any],
        *: any}""",
    # With `response_fields` an answer has those alone.
    "Answer": "Text | object | [Text | object]",
    "Embed": "{model?: string, input?: Prompts, content?: Prompts, embd_normalize?: integer, *: any}",
}

_COMPLETE = RouteSchema(body="Complete", answer="Answer", event="Text")
_EMBED = RouteSchema(body="Embed", answer="[{index: integer, embedding: [[number]]}]")
SCHEMAS: dict[str, RouteSchema] = {
    "POST /completion[s]": _COMPLETE,
    "POST /infill": RouteSchema(body="Infill", answer="Answer", event="Text"),
    "POST /apply-template": RouteSchema(body="Conversation", answer="{prompt: string}"),
    "POST /embedding[s]": _EMBED,
    "POST /rerank": RERANK,
    "POST /reranking": RERANK,
    "POST /tokenize": RouteSchema(
        body="""{model?: string, content?: string, add_special?: boolean, parse_special?: boolean,
            with_pieces?: boolean, *: any}""",
        answer="{tokens: [integer | {id: integer, piece: string | [integer]}]}",
    ),
    "POST /detokenize": RouteSchema(body="{model?: string, tokens?: [integer]}", answer="{content: string}"),
    "GET /props": RouteSchema(
        answer="""{default_generation_settings: object, total_slots: integer, model_alias: string,
            chat_template: string | null, *: any}""",
        query="{model?: string}",
    ),
    "POST /props": RouteSchema(body="{}", answer="{success: boolean}"),
    "GET /slots": RouteSchema(
        answer="""[{id: integer, id_task: integer, n_ctx: integer, speculative: boolean, is_processing: boolean,
            params: object, next_token: {has_next_token: boolean, n_remain: integer, n_decoded: integer}, *: any}]""",
        query="{model?: string, fail_on_no_slot?: string}",
    ),
    "GET /metrics": RouteSchema(answer="string", media_type="text/plain", query="{model?: string}"),
    "GET /lora-adapters": RouteSchema(answer="[{id: integer, path: string, scale: number, name: string}]"),
    "POST /lora-adapters": RouteSchema(body="[{id: integer, scale: number}]", answer="{success: boolean}"),
    "GET /health": RouteSchema(answer="{status: 'ok'}"),
}
