"""The page of families names every public route of the servers whose APIs are spoken, and what becomes of it."""

from __future__ import annotations

from docs.generate import FAMILIES, family_routes, read_unserved

# As the servers' own documents list them. Paths with a name in them have it in braces.
PUBLIC: dict[str, str] = {
    "OpenAI": """
        GET /v1/models, GET /v1/models/{id}, POST /v1/chat/completions, POST /v1/completions, POST /v1/embeddings,
        POST /v1/responses, GET /v1/responses/{response_id}, DELETE /v1/responses/{response_id},
        POST /v1/responses/{response_id}/cancel, GET /v1/responses/{response_id}/input_items,
        POST /v1/responses/input_tokens, POST /v1/conversations, GET /v1/conversations/{conversation_id},
        POST /v1/conversations/{conversation_id}, DELETE /v1/conversations/{conversation_id},
        POST /v1/conversations/{conversation_id}/items, GET /v1/conversations/{conversation_id}/items,
        GET /v1/conversations/{conversation_id}/items/{item_id},
        DELETE /v1/conversations/{conversation_id}/items/{item_id}, POST /v1/audio/speech,
        POST /v1/audio/transcriptions,
        POST /v1/audio/translations, POST /v1/images/generations, POST /v1/moderations, POST /v1/batches,
        GET /v1/batches, GET /v1/batches/{batch_id}, POST /v1/batches/{batch_id}/cancel, POST /v1/files, GET /v1/files,
        GET /v1/files/{file_id}, DELETE /v1/files/{file_id}, GET /v1/files/{file_id}/content, POST /v1/uploads,
        POST /v1/fine_tuning/jobs, POST /v1/assistants
    """,
    "Anthropic": """
        POST /v1/messages, POST /v1/messages/count_tokens, POST /v1/messages/batches, GET /v1/models, POST /v1/files
    """,
    "Ollama": """
        GET /, POST /api/generate, POST /api/chat, POST /api/embed, POST /api/embeddings, GET /api/tags, GET /api/ps,
        POST /api/show, GET /api/version, POST /api/create, POST /api/copy, DELETE /api/delete, POST /api/pull,
        POST /api/push, HEAD /api/blobs/{digest}, POST /api/blobs/{digest}
    """,
    "TGI": """
        POST /, POST /generate, POST /generate_stream, GET /info, GET /health, GET /ping, GET /, POST /tokenize,
        POST /chat_tokenize, POST /invocations, GET /metrics
    """,
    "llamacpp": """
        GET /health, POST /completion, POST /completions, POST /tokenize, POST /detokenize, POST /apply-template,
        POST /embedding, POST /embeddings, POST /rerank, POST /reranking, POST /v1/rerank, POST /infill, GET /props,
        POST /props, GET /slots, POST /slots/{id_slot}, GET /lora-adapters, POST /lora-adapters, GET /metrics,
        GET /models, POST /models/load, POST /models/unload
    """,
}


def test_every_public_route_is_served_or_has_a_reason() -> None:
    served, unserved = family_routes(), read_unserved()
    assert set(served) == set(unserved) == set(PUBLIC)
    for name, text in PUBLIC.items():
        public = {" ".join(route.split()) for route in text.split(",")}
        assert public - served[name].keys() - unserved[name].keys() == set(), name
        assert unserved[name].keys() - public == set(), name
        assert all(unserved[name].values())


def test_every_served_route_is_on_the_page() -> None:
    page = FAMILIES.read_text()
    for name, routes in family_routes().items():
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for route in routes:
            assert f"| `{route}` |" in section
