"""One request at a time to a server process, over plain HTTP: what people do when they look whether it still works."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


def ask(
    url: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """The status, and the document or the bytes. On a connection of its own."""
    connection = http.client.HTTPConnection(url, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        content = response.read()
        is_json = response.getheader("content-type", "").startswith("application/json")
        return response.status, json.loads(content) if is_json and content else content
    finally:
        connection.close()


def infer_body(value: float = 1.0, num_values: int = 2) -> bytes:
    """An infer request for `identity`."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, num_values], "data": [value] * num_values}
    return json.dumps({"inputs": [tensor]}).encode()


def infer(url: str, value: float = 1.0, model: str = "identity") -> tuple[int, Any]:
    """The status, and the value that came back, or the text of the error."""
    status, answer = ask(url, "POST", f"/v2/models/{model}/infer", infer_body(value))
    return status, answer["outputs"][0]["data"][0] if status == 200 else answer["error"]


def is_ready(url: str, model: str) -> bool:
    return ask(url, "GET", f"/v2/models/{model}/ready")[0] == 200


def index(url: str) -> dict[str, tuple[str, str]]:
    """State and reason of each model."""
    status, rows = ask(url, "POST", "/v2/repository/index", b"{}")
    assert status == 200, rows
    return {row["name"]: (row.get("state", ""), row.get("reason", "")) for row in rows}


def metric(url: str, name: str, label: str = "") -> float:
    """The sum of a family's samples that have `label` in them."""
    status, text = ask(url, "GET", "/metrics")
    assert status == 200, text
    lines = [
        line for line in text.decode().splitlines() if line.startswith((f"{name}{{", f"{name} ")) and label in line
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
