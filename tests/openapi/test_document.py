from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from support.keys import KeyFile
from support.mock_llm import write_mock_llm
from support.model_files import write_identity
from support.serving import RunningServer, running_server

import modelserver.frontends
from modelserver.auth.access import Access, ApiGroup
from modelserver.core.long_work import finish
from modelserver.frontends.openapi.notation import json_schema
from modelserver.frontends.openapi.routes import Described
from modelserver.protocol.api import Api, Route, RouteSchema

FRONTENDS = Path(modelserver.frontends.__file__).parent
# The methods of Fields that read a member, and take its name.
_READS = frozenset(
    {"flag", "integer", "number", "text", "word", "mapping", "fields", "items", "objects", "integers", "texts"}
)


def read(client: httpx.Client, **headers: str) -> Any:
    answer = client.get("/openapi.json", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def checked(document: Any, schema: Any) -> jsonschema.Draft202012Validator:
    """A validator of a schema of the document."""
    registry = Registry().with_resource("urn:document", Resource(document, DRAFT202012))
    absolute = _absolute(schema)
    return jsonschema.Draft202012Validator(absolute, registry=registry)


def _absolute(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: f"urn:document{value}" if key == "$ref" else _absolute(value) for key, value in schema.items()}
    return [_absolute(each) for each in schema] if isinstance(schema, list) else schema


# The short form.


_NULLABLE = {"type": ["integer", "null"]}
_EITHER = {"type": "object", "properties": {"b": {"enum": ["c", "d", None]}}, "additionalProperties": {}}
_PAIRS = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 2, "maxItems": 2}
_ROW = {"$ref": "#/components/schemas/Row"}


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("string", {"type": "string"}),
        ("integer 1..128", {"type": "integer", "minimum": 1, "maximum": 128}),
        ("number 0<..1", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        ("string 1..", {"type": "string", "minLength": 1}),
        ("[[number]] 2..2", _PAIRS),
        ("'a' | 'b'", {"enum": ["a", "b"]}),
        ("string | null", {"type": ["string", "null"]}),
        ("Row | string", {"anyOf": [_ROW, {"type": "string"}]}),
        ("Row & {b?: 'c' | 'd', *: any}", {"allOf": [_ROW, _EITHER]}),
        ("{a: any, b?: integer}", {"type": "object", "properties": {"a": {}, "b": _NULLABLE}, "required": ["a"]}),
    ],
)
def test_the_short_form(text: str, schema: dict[str, Any]) -> None:
    assert json_schema(text) == schema


@pytest.mark.parametrize("text", ["{a: string", "[string", "string string", "{a string}", "string |", "%"])
def test_a_malformed_short_form_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="malformed schema"):
        json_schema(text)


# The document.


@pytest.mark.slow
def test_the_document_is_valid_openapi(http: httpx.Client) -> None:
    errors = [str(error)[:300] for error in OpenAPIV31SpecValidator(read(http)).iter_errors()]
    assert errors == []


def test_the_document_has_all_routes_and_all_that_it_refers_to(http: httpx.Client) -> None:
    answer = http.get("/openapi.json")
    document = answer.json()
    for kind, name in re.findall(r'"\$ref":"#/components/(\w+)/([^"]+)"', answer.text):
        assert name in document["components"][kind]
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(operation["summary"] for operation in operations)
    for path in (
        "/v2/models/{name}/infer",
        "/v1/chat/completions",
        "/v1/messages",
        "/generate",
        "/completion",
        "/metrics",
    ):
        assert path in document["paths"]
    # What is off is not there.
    assert not any(path.startswith("/api/") for path in document["paths"])


def test_every_call_with_a_body_says_what_it_takes_and_answers(http: httpx.Client) -> None:
    document = read(http)
    bodiless = ("/ping", "/stats/reset", "/unregister", "/load", "/unload", "/cancel")
    refused = ("/lora-adapters", "/slots/{id_slot}", "/rerank", "/reranking")
    for path, item in document["paths"].items():
        operation = item.get("post")
        if operation is not None and not path.endswith((*bodiless, *refused)):
            assert "requestBody" in operation, path
            assert "content" in operation["responses"]["200"] or "/register" in path, path


def test_a_model_is_described_by_its_config_and_takes_its_example(http: httpx.Client) -> None:
    document = read(http)
    operation = document["paths"]["/v2/models/same/infer"]["post"]
    media = operation["requestBody"]["content"]["application/json"]
    body = checked(document, media["schema"])
    body.validate(media["example"])
    answer = http.post("/v2/models/same/infer", json=media["example"])
    assert answer.status_code == 200
    answered = operation["responses"]["200"]["content"]["application/json"]["schema"]
    checked(document, answered).validate(answer.json())
    tensor = media["example"]["inputs"][0]
    for wrong in ({"name": "OTHER"}, {"datatype": "INT32"}, {"shape": [9, 1]}, {"shape": [1]}, {"data": ["text"]}):
        assert not body.is_valid({"inputs": [tensor | wrong]}), wrong
    assert not body.is_valid({"inputs": []})


def test_generate_has_members_of_the_models_own_names(http: httpx.Client) -> None:
    document = read(http)
    # The model answers more than once, so that it has only the streamed call.
    assert "/v2/models/mock/generate" not in document["paths"]
    operation = document["paths"]["/v2/models/mock/generate_stream"]["post"]
    body = checked(document, operation["requestBody"]["content"]["application/json"]["schema"])
    body.validate({"text_input": "Hello", "stream": True})
    assert not body.is_valid({"text_input": 1})


def test_the_document_changes_with_the_models_and_is_sent_once(http: httpx.Client) -> None:
    first = http.get("/openapi.json")
    tag = first.headers["etag"]
    again = http.get("/openapi.json", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert http.post("/v2/repository/models/same/unload").status_code == 200
    without = http.get("/openapi.json", headers={"If-None-Match": tag})
    assert (without.status_code, "/v2/models/same/infer" in without.json()["paths"]) == (200, False)
    assert http.post("/v2/repository/models/same/load").status_code == 200
    assert http.get("/openapi.json").headers["etag"] == tag


def test_a_model_on_demand_is_described_by_its_config_and_not_loaded(tmp_path: Path) -> None:
    write_mock_llm(tmp_path, "mock")
    write_identity(tmp_path, "same")
    with (
        running_server(tmp_path, load_on_demand=True) as running,
        httpx.Client(base_url=f"http://{running.http_url}", timeout=30) as http,
    ):
        unloaded = http.get("/openapi.json")
        assert {"/v2/models/mock/infer", "/v2/models/same/infer"} <= unloaded.json()["paths"].keys()
        again = http.get("/openapi.json", headers={"If-None-Match": unloaded.headers["etag"]})
        assert again.status_code == 304
        assert running.server.dataplane.model_names() == []
        path = unloaded.json()["paths"]["/v2/models/same/infer"]["post"]
        example = path["requestBody"]["content"]["application/json"]["example"]
        assert http.post("/v2/models/same/infer", json=example).status_code == 200
        assert http.get("/openapi.json").json()["paths"]["/v2/models/same/infer"]["post"] == path


def test_keys_and_restricted_groups_are_security_schemes(keyed_server: RunningServer, keys: KeyFile) -> None:
    with httpx.Client(base_url=f"http://{keyed_server.http_url}") as client:
        assert client.get("/openapi.json").status_code == 401
        assert client.get("/docs").status_code == client.get("/docs/docs.js").status_code == 200
        document = read(client, Authorization=f"Bearer {keys.texts['everything']}")
        tenants = read(client, **{"x-api-key": keys.texts["tenant"]})
    assert document["components"]["securitySchemes"].keys() == {"key", "x-api-key", "restricted-secret"}
    paths = document["paths"]
    assert paths["/v1/chat/completions"]["post"]["security"] == [{"key": ["infer"]}, {"x-api-key": ["infer"]}]
    assert paths["/v2/logging"]["get"]["security"][0] == {"key": ["admin"], "restricted-secret": []}
    assert paths["/v2/models/same/infer"]["post"]["security"] == paths["/v1/messages"]["post"]["security"]
    assert "security" not in paths["/v2/health/live"]["get"]
    # A key sees the models that it may use.
    assert "/v2/models/mock/infer" in tenants["paths"]
    assert "/v2/models/same/infer" not in tenants["paths"]


def test_an_api_of_others_appears_with_its_schemas() -> None:
    schema = RouteSchema(
        "Scores of rows",
        body="{rows: [[number]]}",
        answer={"type": "object"},
        query="{first?: integer, order: 'a' | 'b'}",
    )
    routes = (
        Route("POST", "/score/{model}", lambda *_: None, ApiGroup.INFERENCE, schema=schema),
        Route("GET", "/score", lambda *_: None, ApiGroup.METADATA),
    )
    apis = [Api("score", routes, types={"Error": "{failure: string}"})]
    document = finish(Described(apis, Access(), has_keys=False, name="modelserver", version="1").slices())
    assert [*OpenAPIV31SpecValidator(document).iter_errors()] == []
    operation = document["paths"]["/score/{model}"]["post"]
    assert (operation["summary"], operation["tags"]) == ("Scores of rows", ["score"])
    assert [(each["name"], each["in"], each["required"]) for each in operation["parameters"]] == [
        ("model", "path", True),
        ("first", "query", False),
        ("order", "query", True),
    ]
    assert operation["responses"]["default"] == {"$ref": "#/components/responses/score.Error"}


# The readers of the language models' APIs, and what is said of them.


@pytest.mark.parametrize("family", ["openai", "anthropic", "ollama", "tgi", "llamacpp"])
def test_every_member_that_a_reader_knows_is_described(family: str) -> None:
    """By the names in the calls of `Fields`, as the readers are written."""
    module = importlib.import_module(f"modelserver.frontends.{family}.schemas")
    schemas = [*module.TYPES.values(), *(schema.body for schema in module.SCHEMAS.values() if schema.body)]
    described = {name for schema in schemas for name in _members(json_schema(schema))}
    read_names = {
        name for path in (FRONTENDS / family).rglob("*.py") for name in _names_read(ast.parse(path.read_text()))
    }
    assert read_names - described == set()


def _members(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {name for each in schema for name in _members(each)}
    if not isinstance(schema, dict):
        return set()
    return {*schema.get("properties", ()), *(name for each in schema.values() for name in _members(each))}


def _names_read(tree: ast.AST) -> set[str]:
    return {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in _READS
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }
