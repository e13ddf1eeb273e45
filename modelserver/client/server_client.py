"""Control of a server over HTTP, and the other calls of the commands."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from modelserver.client.address import (
    CA_VARIABLE,
    CERTIFICATE_VARIABLE,
    TLS_VARIABLES,
    Tls,
    environment_headers,
    environment_tls,
    refused,
)
from modelserver.client.control import ControlClient, error_of
from modelserver.client.heads import error_text
from modelserver.errors import ErrorCode, InvalidArgumentError, NotFoundError, ServerError, UnavailableError

DEFAULT_URL = "http://localhost:8000"
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful answer: header names in lower case, and the body."""

    headers: Mapping[str, str]
    body: bytes

    @property
    def json_len(self) -> int | None:
        """Where the JSON of an answer with binary tensors ends; None for other answers."""
        text = self.headers.get("inference-header-content-length", "")
        return int(text) if text.isdigit() else None

    def document(self) -> Any:
        return json.loads(self.body) if self.body else {}


class ServerClient(ControlClient):
    """Talks to the server at `url`; a connection per request.

    Every method raises UnavailableError when no server answers, and for an error answer a ServerError with the
    server's own message.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = TIMEOUT_S,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Without `tls` and `headers`, the files and the API key are those of the environment."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgumentError(f"--url expects http://<host>:<port>, got '{url}'")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._is_secure = parts.scheme == "https"
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._host = parts.hostname
        self._port = parts.port
        self._timeout_s = timeout_s
        self._headers = environment_headers() if headers is None else headers

    def check_live(self) -> None:
        """Return if the server runs; UnavailableError if no server answers."""
        self._request("GET", "/v2/health/live")

    def check_ready(self) -> None:
        """Return if the server is ready. Raises a ServerError if it reports that it is not."""
        self._request("GET", "/v2/health/ready", headers={"Accept": "application/json"})  # the reasons, if it is not

    def index(self) -> list[dict[str, Any]]:
        """The rows of the repository index."""
        rows = self._request("POST", "/v2/repository/index", b"{}").document()
        return list(rows)

    def server_metadata(self) -> dict[str, Any]:
        return dict(self._request("GET", "/v2").document())

    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]:
        return dict(self._model("GET", model, version, "").document())

    def model_config(self, model: str, version: str = "") -> dict[str, Any]:
        return dict(self._model("GET", model, version, "/config").document())

    def statistics(self, model: str, version: str = "") -> list[dict[str, Any]]:
        return list(self._model("GET", model, version, "/stats").document().get("model_stats", []))

    def overview(self) -> dict[str, Any]:
        """Status of the server, its host and each model version."""
        return dict(self._request("GET", "/v2/overview").document())

    def metrics(self, path: str = "/metrics") -> bytes:
        """A page of metrics, in Prometheus's text format."""
        return self._request("GET", path).body

    def log_lines(self, num_lines: int, *, follows: bool = False) -> Iterator[str]:
        """The newest lines of the server's log; with `follows`, also each new line as it is written."""
        path = f"/v2/logging/lines?lines={num_lines}&follow={str(follows).lower()}"
        with self._answer("GET", path, None, None) as response:
            for line in response:
                yield line.decode(errors="replace").rstrip("\n")

    def load(self, model: str, parameters: Mapping[str, str | bool] | None = None) -> None:
        self._control("load", model, parameters)

    def unload(self, model: str, parameters: Mapping[str, str | bool] | None = None) -> None:
        self._control("unload", model, parameters)

    def register_region(self, region: str, kind: str, details: dict[str, Any]) -> None:
        self._request("POST", f"{_region_path(region, kind)}/register", json.dumps(details).encode())

    def unregister_region(self, region: str, kind: str) -> None:
        self._request("POST", f"{_region_path(region, kind)}/unregister", b"{}")

    def traffic(self, model: str) -> dict[str, Any]:
        """The versions that share a model's requests; only its name if the highest version answers."""
        return dict(self._traffic("GET", model).document())

    def set_traffic(self, model: str, document: Mapping[str, object]) -> dict[str, Any]:
        return dict(self._traffic("POST", model, json.dumps(document).encode()).document())

    def remove_traffic(self, model: str) -> dict[str, Any]:
        return dict(self._traffic("DELETE", model).document())

    def _traffic(self, method: str, model: str, body: bytes | None = None) -> Reply:
        return self._request(method, f"/v2/repository/models/{_segment(model)}/traffic", body)

    def infer(self, model: str, version: str, body: bytes, header_len: int) -> Reply:
        """Send an infer request of `header_len` bytes of JSON followed by binary tensors."""
        headers = {"Inference-Header-Content-Length": str(header_len), "Content-Type": "application/octet-stream"}
        return self._model("POST", model, version, "/infer", body, headers)

    def chat(self, document: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat completion as they arrive. Closing the iterator cancels the request.

        Also raises an error that the server sends in place of a chunk.
        """
        body = json.dumps({**document, "stream": True}).encode()
        with self._answer("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}) as response:
            for line in response:
                if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise ServerError(error_text(chunk["error"]), code=ErrorCode.INTERNAL)
                    yield chunk

    def language_model(self, model: str) -> dict[str, Any]:
        """The model's document from OpenAI's API. Raises NotFoundError for a model of another kind."""
        document = dict(self._request("GET", f"/v1/models/{_segment(model)}").document())
        if "id" not in document:  # as KServe's protocol of version 1 has it
            raise NotFoundError(f"the model '{model}' is not a language model")
        return document

    def _control(self, verb: str, model: str, parameters: Mapping[str, str | bool] | None) -> None:
        body = json.dumps({"parameters": dict(parameters or {})}).encode()
        self._request("POST", f"/v2/repository/models/{_segment(model)}/{verb}", body)

    def _model(
        self,
        method: str,
        model: str,
        version: str,
        action: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        path = f"/v2/models/{_segment(model)}" + (f"/versions/{quote(version, safe='')}" if version else "")
        with self.hinted(model):
            return self._request(method, path + action, body, headers)

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        with self._answer(method, path, body, headers) as response:
            content = response.read()
        return Reply({key.lower(): value for key, value in response.getheaders()}, content)

    def _connection(self) -> http.client.HTTPConnection:
        if not self._is_secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        if self._context is None:
            self._context = self._make_context()
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._context)

    def _make_context(self) -> ssl.SSLContext:
        """Raises InvalidArgumentError that names the files that cannot be used, and the variables that name them."""
        if self._tls is not None:
            return self._tls.context("http/1.1")
        try:
            return environment_tls().context("http/1.1")
        except InvalidArgumentError as error:
            names = ", ".join(name for name in TLS_VARIABLES if os.environ.get(name))
            raise InvalidArgumentError(f"{names}: {error.message}") from None

    def _tls_hint(self) -> str:
        """A hint about TLS: a server that rejects us at the TLS level closes the connection without a reason."""
        if not self._is_secure or os.environ.get(CERTIFICATE_VARIABLE):
            return ""
        return f"; {CA_VARIABLE} names trusted authorities, {CERTIFICATE_VARIABLE} the client certificate"

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """A successful answer whose body is not read yet; errors while reading it are converted as well."""
        connection = self._connection()
        try:
            connection.request(method, path, body, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            if response.status >= 400:
                raise _error_of(response.status, response.read(), f"{self.url}{path}")
            yield response
        except ConnectionRefusedError:
            raise refused(self.url) from None
        except ssl.SSLError as error:
            raise UnavailableError(f"no TLS with {self.url}: {error}{self._tls_hint()}") from None
        except OSError as error:
            raise UnavailableError(f"cannot talk to the server at {self.url}: {error}{self._tls_hint()}") from None
        except http.client.BadStatusLine:
            raise UnavailableError(
                f"{self.url} does not answer in HTTP: is it the gRPC port? --url takes the HTTP one"
            ) from None
        except http.client.HTTPException as error:
            raise UnavailableError(f"cannot read the answer of {self.url}: {type(error).__name__}") from None
        finally:
            connection.close()


def _region_path(region: str, kind: str) -> str:
    return f"/v2/{kind}sharedmemory/region/{quote(region, safe='')}"


def _segment(model: str) -> str:
    """The model's name as a path segment."""
    if not model:
        raise InvalidArgumentError("the name of the model is empty")
    return quote(model, safe="")


def _error_of(status: int, content: bytes, address: str) -> ServerError:
    try:
        message = error_text(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        message = f"{address} answered {status}: {content[:200].decode(errors='replace')}"
    return error_of(f"HTTP {status}: {message}")
