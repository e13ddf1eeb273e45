"""The documents of OpenAI's API, for `/openapi.json`."""

from __future__ import annotations

from modelserver.frontends.openai.sampling import FLAGS, INTEGERS, NUMBERS
from modelserver.protocol.api import RouteSchema, Schema

# What the chats of several APIs are made of.
CONVERSATION: dict[str, Schema] = {
    "Part": "{type: string, text?: string, refusal?: string, *: any}",
    "Content": "string | [Part]",
    "Function": "{name: string 1..128, description?: string, parameters?: object, strict?: boolean, *: any}",
    "Tool": "{type: 'function', function: Function, *: any}",
    "Called": "{name: string, arguments?: string | object, *: any}",
    "ToolCall": "{id?: string, type?: 'function', function: Called, *: any}",
    "Message": """{role: string 1..64, content?: Content, name?: string, tool_call_id?: string, tool_calls?: [ToolCall],
        function_call?: Called, refusal?: string, reasoning?: string, reasoning_content?: string, *: any}""",
    "NamedTool": "{type?: string, name?: string, function?: {name: string}, *: any}",
    "AllowedTools": "{mode: 'auto' | 'required', tools: [NamedTool] 1..}",
    "ToolChoice": """'none' | 'auto' | 'required' | {type: 'function', function: {name: string}}
        | {type: 'allowed_tools', allowed_tools?: AllowedTools, mode?: 'auto' | 'required', tools?: [NamedTool]}""",
    "Conversation": """{model?: string, messages: [Message] 1..4096, tools?: [Tool], tool_choice?: ToolChoice,
        parallel_tool_calls?: boolean, functions?: [Function],
        function_call?: 'none' | 'auto' | {name: string}, documents?: [object], add_generation_prompt?: boolean,
        continue_final_message?: boolean, chat_template_kwargs?: object,
        reasoning_effort?: 'none' | 'minimal' | 'low' | 'medium' | 'high' | 'xhigh',
        verbosity?: 'low' | 'medium' | 'high', *: any}""",
}

# Of texts that are ranked, in several APIs.
RANKING_NAMES = ("Truncation", "Document", "Rerank", "PromptUsage", "RerankAnswer")

TYPES: dict[str, Schema] = {
    **CONVERSATION,
    "Error": "{error: {message: string, type: string, param: string | null, code: string | null}}",
    # What a text is to be, and how it is chosen.
    "ResponseFormat": """{type: 'text' | 'json_object' | 'json_schema', schema?: object,
        json_schema?: {name: string 1.., description?: string, strict?: boolean, schema: object | boolean}}""",
    "StructuredOutputs": """{json?: object | string, json_object?: boolean, regex?: string, choice?: [string],
        grammar?: string, disable_any_whitespace?: boolean}""",
    "Numbers": {
        "type": "object",
        "properties": {
            **{name: bounds.schema("number") for name, bounds in NUMBERS.items()},
            **{name: bounds.schema("integer") for name, bounds in INTEGERS.items()},
            **{name: {"type": ["boolean", "null"]} for name in FLAGS},
        },
    },
    "Sampling": """Numbers & {stop?: string | [string], stop_token_ids?: [integer], allowed_token_ids?: [integer],
        bad_words?: [string], logit_bias?: {*: number -100..100}, cache_salt?: string, dry_sequence_breakers?: [string],
        response_format?: ResponseFormat, structured_outputs?: StructuredOutputs, guided_json?: object | string,
        guided_regex?: string, guided_choice?: [string], guided_grammar?: string, json_schema?: object | string,
        regex?: string, ebnf?: string, grammar?: string | object, stream?: boolean,
        stream_options?: {include_usage?: boolean, continuous_usage_stats?: boolean, include_obfuscation?: boolean},
        user?: string, metadata?: object, store?: boolean, service_tier?: string, safety_identifier?: string,
        prompt_cache_key?: string, prompt_cache_retention?: string, prompt_cache_options?: object, prediction?: object,
        spaces_between_special_tokens?: boolean, request_id?: string, *: any}""",
    "Chat": """Conversation & Sampling & {max_tokens?: integer 1.., max_completion_tokens?: integer 1..,
        n?: integer 1..128, logprobs?: boolean, top_logprobs?: integer 0..20, prompt_logprobs?: integer 0..20,
        echo?: boolean, include_reasoning?: boolean, return_token_ids?: boolean, return_tokens_as_token_ids?: boolean,
        add_special_tokens?: boolean, modalities?: ['text']}""",
    "Prompt": "string | [string] 1.. | [integer] 1.. | [[integer] 1..] 1..",
    "Completion": """Sampling & {model?: string, prompt: Prompt, suffix?: string, max_tokens?: integer 0..,
        n?: integer 1..128, best_of?: integer 0..128, logprobs?: integer 0..20, prompt_logprobs?: integer 0..20,
        echo?: boolean, return_token_ids?: boolean, return_tokens_as_token_ids?: boolean,
        add_special_tokens?: boolean}""",
    # Answers.
    "Usage": """{prompt_tokens: integer, completion_tokens: integer, total_tokens: integer,
        prompt_tokens_details?: {cached_tokens: integer}, completion_tokens_details?: {reasoning_tokens?: integer,
        accepted_prediction_tokens?: integer, rejected_prediction_tokens?: integer}}""",
    "TokenLogprob": "{token: string, logprob: number | null, bytes: [integer] | null, *: any}",
    "ChatLogprobs": "{content: [TokenLogprob & {top_logprobs: [TokenLogprob]}] | null, refusal?: string}",
    "Answer": """{role: 'assistant', content: string | null, refusal?: string, tool_calls?: [ToolCall],
        function_call?: Called, reasoning?: string, reasoning_content?: string}""",
    "ChatChoice": """{index: integer, message: Answer, logprobs: ChatLogprobs | null, finish_reason: string | null,
        stop_reason?: string | integer, token_ids?: [integer]}""",
    "ChatAnswer": """{id: string, object: 'chat.completion', created: integer, model: string,
        system_fingerprint?: string, choices: [ChatChoice], usage: Usage | null, prompt_logprobs?: [any],
        prompt_token_ids?: [integer]}""",
    "ChatDelta": """{role?: string, content?: string, reasoning?: string, reasoning_content?: string,
        function_call?: {name?: string, arguments: string},
        tool_calls?: [{index: integer, id?: string, type?: 'function',
        function: {name?: string, arguments: string}}]}""",
    "ChatChunk": """{id: string, object: 'chat.completion.chunk', created: integer, model: string, usage?: Usage,
        choices: [{index: integer, delta: ChatDelta, logprobs?: ChatLogprobs, finish_reason: string | null, *: any}],
        *: any}""",
    "CompletionLogprobs": """{tokens: [string], token_logprobs: [number | null], text_offset: [integer],
        top_logprobs: [object | null]}""",
    "CompletionAnswer": """{id: string, object: 'text_completion', created: integer, model: string, usage?: Usage,
        system_fingerprint?: string, choices: [{index: integer, text: string, logprobs: CompletionLogprobs | null,
        finish_reason: string | null, stop_reason?: string | integer, token_ids?: [integer],
        prompt_token_ids?: [integer], prompt_logprobs?: [any]}]}""",
    "Embed": """{model?: string, input?: Prompt, messages?: [Message] 1.., encoding_format?: 'float' | 'base64',
        dimensions?: integer 1.., truncate_prompt_tokens?: integer -1.., add_special_tokens?: boolean, user?: string,
        *: any}""",
    "EmbedAnswer": """{object: 'list', model: string, usage: {prompt_tokens: integer, total_tokens: integer},
        data: [{object: 'embedding', index: integer, embedding: [number] | string}]}""",
    # Texts that are compared and classified.
    "Truncation": """{truncate_prompt_tokens?: integer -1.., truncate?: boolean,
        truncation_direction?: 'Right' | 'right', max_tokens_per_doc?: integer 1.., raw_scores?: boolean,
        use_activation?: boolean, activation?: boolean, softmax?: boolean, *: any}""",
    "Document": "string | {text: string, *: any}",
    "Texts": "string | [Document] 1..2048",
    "Rerank": """Truncation & {model?: string, query: string, documents?: [Document] 1..2048,
        texts?: [Document] 1..2048, top_n?: integer 0.., return_documents?: boolean, return_text?: boolean}""",
    "RerankAnswer": """{id: string, object: 'list', model: string, usage: PromptUsage,
        results: [{index: integer, relevance_score: number, document?: {text: string}}]}
        | [{index: integer, score: number, text?: string}]""",
    "Score": """Truncation & {model?: string, text_1?: Texts, text_2?: Texts, queries?: Texts, documents?: Texts,
        data_1?: Texts, data_2?: Texts}""",
    "PromptUsage": "{prompt_tokens: integer, total_tokens: integer}",
    "ScoreAnswer": """{id: string, object: 'list', created: integer, model: string, usage: PromptUsage,
        data: [{index: integer, object: 'score', score: number}]}""",
    "Similarity": """Truncation & {model?: string, inputs: {source_sentence: string, sentences: [string]},
        parameters?: object}""",
    "Classify": "Truncation & {model?: string, input: Prompt}",
    "ClassifyAnswer": """{id: string, object: 'list', created: integer, model: string, usage: PromptUsage,
        data: [{index: integer, label: string, probs: [number], num_classes: integer}]}""",
    "Pool": """Truncation & {model?: string, input: Prompt, encoding_format?: 'float' | 'base64',
        task?: 'embed' | 'token_embed' | 'classify' | 'token_classify'}""",
    "PoolAnswer": """{id: string, object: 'list', created: integer, model: string, usage: PromptUsage,
        data: [{index: integer, object: 'pooling', data: [number] | [[number]] | string}]}""",
    "Predict": """Truncation & {model?: string, inputs: string | [string] 1..2 | [string | [string] 1..2] 1..2048,
        parameters?: {top_k?: integer 1.., function_to_apply?: 'none', *: any}}""",
    "Prediction": "{score: number, label: string}",
    "Moderate": "{model?: string, input: string | [string] 1.. | [{type: 'text', text: string, *: any}] 1..}",
    "Moderation": """{id: string, model: string, results: [{flagged: boolean, categories: {*: boolean},
        category_scores: {*: number}, category_applied_input_types: {*: [string]}}]}""",
    "Tokenize": """{model?: string, prompt?: string, messages?: [Message] 1.., tools?: [Tool],
        add_special_tokens?: boolean, return_token_strs?: boolean, *: any}""",
    "TokenizeAnswer": """{count: integer, max_model_len: integer | null, tokens: [integer],
        token_strs: [string] | null}""",
    "Model": """{id: string, object: 'model', created: integer, owned_by: string, root: string, parent: string | null,
        max_model_len: integer | null}""",
    # Responses.
    "Item": """{type?: string, role?: 'user' | 'assistant' | 'system' | 'developer', content?: Content | [object],
        id?: string, call_id?: string, name?: string, arguments?: string, input?: string, output?: string | [object],
        summary?: [object], *: any}""",
    "ResponseMember": """{type: string, name?: string, description?: string, parameters?: object, strict?: boolean,
        format?: {type?: string, syntax?: string, definition?: string, *: any}, *: any}""",
    "ResponseTool": """{type: string, name?: string, description?: string, parameters?: object, strict?: boolean,
        tools?: [ResponseMember], format?: {type?: string, syntax?: string, definition?: string, *: any}, *: any}""",
    "Ask": """{model?: string, input: string | [Item], instructions?: string, previous_response_id?: string,
        tools?: [ResponseTool], tool_choice?: string | {type: string, name?: string, *: any},
        parallel_tool_calls?: boolean, max_tool_calls?: integer 1.., truncation?: 'auto' | 'disabled',
        context_management?: [object],
        reasoning?: {effort?: 'none' | 'minimal' | 'low' | 'medium' | 'high' | 'xhigh', *: any}, *: any}""",
    "CreateResponse": """Ask & Sampling & {max_output_tokens?: integer 1.., top_logprobs?: integer 0..20,
        include?: [string], text?: {format?: {type: 'text' | 'json_object' | 'json_schema', schema?: object, *: any},
        verbosity?: 'low' | 'medium' | 'high', *: any}, background?: boolean,
        conversation?: string | {id: string, *: any}}""",
    "Response": """{id: string, object: 'response', created_at: number, model: string, status: string, output: [Item],
        error: object | null, incomplete_details: object | null, usage: object | null, metadata: object, *: any}""",
    "Numbered": "{sequence_number: integer, *: any}",
    "ItemEvent": "Numbered & {output_index: integer, *: any}",
    "PartEvent": "ItemEvent & {item_id: string, content_index: integer, *: any}",
    "Event": """Numbered & {type: 'response.created' | 'response.queued' | 'response.in_progress'
        | 'response.completed' | 'response.incomplete' | 'response.failed', response: Response}
        | ItemEvent & {type: 'response.output_item.added' | 'response.output_item.done', item: Item}
        | PartEvent & {type: 'response.content_part.added' | 'response.content_part.done',
        part: {type: 'output_text' | 'reasoning_text', text: string, *: any}}
        | PartEvent & {type: 'response.output_text.delta', delta: string, logprobs: [TokenLogprob]}
        | PartEvent & {type: 'response.output_text.done', text: string, logprobs: [TokenLogprob]}
        | PartEvent & {type: 'response.reasoning_text.delta', delta: string}
        | PartEvent & {type: 'response.reasoning_text.done', text: string}
        | ItemEvent & {type: 'response.function_call_arguments.delta', item_id: string, delta: string}
        | ItemEvent & {type: 'response.function_call_arguments.done', item_id: string, name: string, arguments: string}
        | ItemEvent & {type: 'response.custom_tool_call_input.delta', item_id: string, delta: string}
        | ItemEvent & {type: 'response.custom_tool_call_input.done', item_id: string, input: string}""",
    "ConversationObject": "{id: string, object: 'conversation', created_at: integer, metadata: object}",
    # Sound.
    "Transcribe": {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "model": {"type": "string"},
            "prompt": {"type": "string", "maxLength": 4096},
            "language": {"type": "string"},
            "temperature": {"type": "number", "minimum": 0, "maximum": 1},
            "response_format": {"enum": ["json", "text", "srt", "verbose_json", "vtt"]},
            "timestamp_granularities": {"type": "array", "items": {"enum": ["segment", "word"]}, "maxItems": 2},
            "include": {"type": "array", "maxItems": 0},
            "stream": {"type": "boolean"},
        },
    },
    "SoundSegment": """{id: integer, seek: integer, start: number, end: number, text: string, tokens: [integer],
        temperature: number, avg_logprob: number, compression_ratio: number, no_speech_prob: number}""",
    "Speak": """{input: string, model?: string, voice?: string | {id: string, *: any}, instructions?: string,
        response_format?: 'mp3' | 'opus' | 'aac' | 'flac' | 'wav' | 'pcm', speed?: number 0.25..4,
        stream_format?: 'audio' | 'sse', *: any}""",
    "SpeechEvent": """{type: 'speech.audio.delta', audio: string} | {type: 'speech.audio.done', usage: object}""",
    # Pictures.
    "Draw": """{prompt: string, model?: string, n?: integer 1..10, size?: string, quality?: string,
        background?: 'auto' | 'transparent' | 'opaque', output_format?: 'png' | 'jpeg' | 'webp',
        output_compression?: integer 0..100, response_format?: 'b64_json', style?: string, negative_prompt?: string,
        seed?: integer 0.., steps?: integer 0.., guidance?: number 0..1000, stream?: boolean,
        partial_images?: integer 0..3, *: any}""",
    "Pictures": """{created: integer, data: [{b64_json: string}], usage: object, background?: string,
        output_format?: string, quality?: string, size?: string}""",
    "PictureEvent": """{type: 'image_generation.partial_image' | 'image_generation.completed', b64_json: string,
        created_at: integer, background: string, output_format: string, quality: string, size: string,
        partial_image_index?: integer, usage?: object}""",
    "Transcript": """{text: string, usage: {type: 'duration', seconds: integer}, task?: string, language?: string,
        duration?: number, segments?: [SoundSegment],
        words?: [{word: string, start: number, end: number}]}""",
    "TranscriptEvent": """{type: 'transcript.text.delta', delta: string}
        | {type: 'transcript.text.done', text: string}""",
    # Files and batches.
    "Upload": {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
        },
    },
    "File": """{id: string, object: 'file', bytes: integer, created_at: integer, expires_at: integer | null,
        filename: string, purpose: string, status: string, status_details: string | null}""",
    "Deleted": "{id: string, object: 'file', deleted: boolean}",
    "CreateBatch": """{input_file_id: string, completion_window: '24h', metadata?: {*: string},
        endpoint: '/v1/chat/completions' | '/v1/completions' | '/v1/embeddings' | '/v1/responses' | '/v1/moderations'
        | '/v1/rerank' | '/v1/score',
        output_expires_after?: {anchor: 'created_at', seconds: integer 3600..2592000}, *: any}""",
    "Batch": """{id: string, object: 'batch', endpoint: string, model: string | null, input_file_id: string,
        completion_window: string, status: string, output_file_id: string | null, error_file_id: string | null,
        errors: {object: 'list', data: [{code: string, message: string, line: integer | null, param: string | null}]}
        | null, created_at: integer, expires_at: integer, in_progress_at: integer | null,
        finalizing_at: integer | null, completed_at: integer | null, failed_at: integer | null,
        expired_at: integer | null, cancelling_at: integer | null, cancelled_at: integer | null,
        request_counts: {total: integer, completed: integer, failed: integer}, usage: object,
        metadata: {*: string} | null}""",
}


def _list_of(kind: str) -> str:
    """A page of documents of that type."""
    return f"{{object: 'list', data: [{kind}], first_id: string | null, last_id: string | null, has_more: boolean}}"


_RESPONSE = RouteSchema(answer="Response")
RERANK = RouteSchema(body="Rerank", answer="RerankAnswer")
_SCORE = RouteSchema(body="Score", answer="ScoreAnswer")
_TRANSCRIBE = RouteSchema(
    body="Transcribe", body_type="multipart/form-data", answer="Transcript", event="TranscriptEvent"
)
SCHEMAS: dict[str, RouteSchema] = {
    "GET /v1/models": RouteSchema(answer="{object: 'list', data: [Model]}"),
    "GET /v1/models/{id}": RouteSchema(answer="Model | {name: string, ready: boolean}"),
    "POST /v1/models/{id}/load": RouteSchema(answer="Model"),
    "POST /v1/models/{id}/unload": RouteSchema(answer="{status: 'success', model: string}"),
    "POST /v1/load_lora_adapter": RouteSchema(
        body="""{lora_name: string, lora_path: string, load_inplace?: boolean, model?: string, base_model_name?: string,
            *: any}""",
        answer="string",
        media_type="text/plain",
    ),
    "POST /v1/unload_lora_adapter": RouteSchema(
        body="{lora_name: string, model?: string, base_model_name?: string, *: any}",
        answer="string",
        media_type="text/plain",
    ),
    "POST /v1/completions": RouteSchema(body="Completion", answer="CompletionAnswer", event="CompletionAnswer"),
    "POST /v1/chat/completions": RouteSchema(body="Chat", answer="ChatAnswer", event="ChatChunk"),
    "POST /v1/embeddings": RouteSchema(body="Embed", answer="EmbedAnswer"),
    "POST /v1/moderations": RouteSchema(body="Moderate", answer="Moderation"),
    "POST /rerank": RERANK,
    "POST /v1/rerank": RERANK,
    "POST /v2/rerank": RERANK,
    "POST /score": _SCORE,
    "POST /v1/score": _SCORE,
    "POST /similarity": RouteSchema(body="Similarity", answer="[number]"),
    "POST /classify": RouteSchema(body="Classify", answer="ClassifyAnswer"),
    "POST /pooling": RouteSchema(body="Pool", answer="PoolAnswer"),
    "POST /predict": RouteSchema(body="Predict", answer="[Prediction] | [[Prediction]]"),
    "POST /tokenize": RouteSchema(body="Tokenize", answer="TokenizeAnswer"),
    "POST /detokenize": RouteSchema(
        body="{model?: string, tokens: [integer 0..2147483647]}", answer="{prompt: string}"
    ),
    "POST /v1/audio/speech": RouteSchema(body="Speak", answer="string", media_type="audio/*", event="SpeechEvent"),
    "POST /v1/images/generations": RouteSchema(body="Draw", answer="Pictures", event="PictureEvent"),
    "POST /v1/audio/transcriptions": _TRANSCRIBE,
    "POST /v1/audio/translations": _TRANSCRIBE,
    "POST /v1/responses": RouteSchema(body="CreateResponse", answer="Response", event="Event"),
    "POST /v1/responses/input_tokens": RouteSchema(
        body="Ask", answer="{object: 'response.input_tokens', input_tokens: integer}"
    ),
    "GET /v1/responses/{response_id}": RouteSchema(
        answer="Response", event="Event", query="{stream?: string, starting_after?: string}"
    ),
    "DELETE /v1/responses/{response_id}": RouteSchema(answer="{id: string, object: 'response', deleted: boolean}"),
    "POST /v1/responses/{response_id}/cancel": _RESPONSE,
    "GET /v1/responses/{response_id}/input_items": RouteSchema(
        answer="{object: 'list', data: [Item], first_id: string | null, last_id: string | null, has_more: boolean}"
    ),
    "POST /v1/conversations": RouteSchema(
        body="{items?: [Item], metadata?: object, *: any}", answer="ConversationObject"
    ),
    "GET /v1/conversations/{conversation_id}": RouteSchema(answer="ConversationObject"),
    "POST /v1/conversations/{conversation_id}": RouteSchema(
        body="{metadata?: object, *: any}", answer="ConversationObject"
    ),
    "DELETE /v1/conversations/{conversation_id}": RouteSchema(
        answer="{id: string, object: 'conversation.deleted', deleted: boolean}"
    ),
    "POST /v1/conversations/{conversation_id}/items": RouteSchema(
        body="{items: [Item], *: any}", answer=_list_of("Item")
    ),
    "GET /v1/conversations/{conversation_id}/items": RouteSchema(
        query="{limit?: integer 1..100, order?: 'asc' | 'desc', after?: string}", answer=_list_of("Item")
    ),
    "GET /v1/conversations/{conversation_id}/items/{item_id}": RouteSchema(answer="Item"),
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": RouteSchema(answer="ConversationObject"),
    "POST /v1/files": RouteSchema(body="Upload", body_type="multipart/form-data", answer="File"),
    "GET /v1/files": RouteSchema(
        query="{purpose?: string, limit?: integer 1..10000, order?: 'asc' | 'desc', after?: string}",
        answer=_list_of("File"),
    ),
    "GET /v1/files/{file_id}": RouteSchema(answer="File"),
    "DELETE /v1/files/{file_id}": RouteSchema(answer="Deleted"),
    "GET /v1/files/{file_id}/content": RouteSchema(answer="string", media_type="application/jsonl"),
    "POST /v1/batches": RouteSchema(body="CreateBatch", answer="Batch"),
    "GET /v1/batches": RouteSchema(query="{limit?: integer 1..100, after?: string}", answer=_list_of("Batch")),
    "GET /v1/batches/{batch_id}": RouteSchema(answer="Batch"),
    "POST /v1/batches/{batch_id}/cancel": RouteSchema(answer="Batch"),
    "GET /version": RouteSchema(answer="{version: string}"),
}
