"""Requests that schemathesis makes of the document: no fault of ours, and no answer outside the document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from support.serving import RunningServer

pytestmark = pytest.mark.tool("schemathesis")

_MODES = ("positive", "negative")
# Statuses that say that something is not served or not ready, which is no fault.
_REFUSALS = frozenset({501, 503})
_QUICK = ("/v2/models/same/infer", "/v1/chat/completions", "/v1/messages", "/generate", "/completion")
_CHANGES = ("/v2/repository", "/load", "/unload", "sharedmemory", "/v2/logging", "/trace/setting")


def operations(server: RunningServer) -> list[Any]:
    import schemathesis

    url = f"http://{server.http_url}/openapi.json"
    found = [each.ok() for each in schemathesis.openapi.from_url(url).get_all_operations()]
    # The mock's own calls fail without a text.
    return [each for each in found if "/models/mock/" not in each.path]


def fuzz(server: RunningServer, operation: Any, mode: str, num_examples: int) -> None:
    """Send requests that fit the document (or, in negative mode, do not), and check their answers."""
    from schemathesis import GenerationMode, checks

    session = requests.Session()
    conforms = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]

    @seed(1)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case: Any) -> None:
        _aim(case)
        answer = case.call(base_url=f"http://{server.http_url}", session=session, timeout=30)
        told = f"{answer.status_code} for {case.as_curl_command()}: {answer.text[:300]}"
        assert answer.status_code < 500 or answer.status_code in _REFUSALS, told
        case.validate_response(answer, checks=conforms)

    try:
        ask()
    finally:
        session.close()


def _aim(case: Any) -> None:
    """Have the case concern a model that there is, unless it would change the server."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "mock"
    if case.query.get("follow"):
        case.query["follow"] = "false"
    if any(part in case.path for part in _CHANGES):
        return
    for name in ("name", "id"):
        if name in case.path_parameters:
            case.path_parameters[name] = "same"
    if "version" in case.path_parameters:
        case.path_parameters["version"] = "1"


def _fuzz_all(server: RunningServer, found: Sequence[Any], mode: str, num_examples: int) -> None:
    from schemathesis.core.failures import FailureGroup

    problems = []
    for operation in found:
        try:
            fuzz(server, operation, mode, num_examples)
        except Unsatisfiable:
            # Nothing of the call can be wrong.
            assert mode == "negative", operation.path
        except (Exception, FailureGroup) as error:
            problems.append(f"{operation.method} {operation.path}: {error}")
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize("mode", _MODES)
def test_a_few_requests_to_each_api(open_server: RunningServer, mode: str) -> None:
    found = [each for each in operations(open_server) if each.path in _QUICK]
    assert len(found) == len(_QUICK)
    _fuzz_all(open_server, found, mode, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", _MODES)
def test_many_requests_to_every_route(open_server: RunningServer, mode: str) -> None:
    _fuzz_all(open_server, operations(open_server), mode, 25)
