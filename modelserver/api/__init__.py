"""All that the author of an HTTP API imports.

An API is a family of routes with one form of errors. An installed package offers one by an entry point in the group
`modelserver.apis`: a function that takes an `ApiContext` and returns an `Api`. The server looks at keys, scopes and
restrictions before a handler is called, and answers unknown paths and methods in the API's own form.
`docs/add-an-api.md` builds one step by step.
"""

from __future__ import annotations

from modelserver.api.call import ApiContext, ApiFactory, Call, Serve
from modelserver.auth.access import ApiGroup
from modelserver.auth.api_keys import Scope
from modelserver.auth.guard import KeyUse
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import (
    AlreadyExistsError,
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PayloadTooLargeError,
    PermissionDeniedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.protocol.api import Api, Route, RouteSchema
from modelserver.protocol.exchange import HttpExchange, HttpHead, ResponseWriter
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import PLAIN_ERRORS, STATUS, ErrorWriter, HttpResponse, json_response

__all__ = [
    "PLAIN_ERRORS",
    "STATUS",
    "AlreadyExistsError",
    "Api",
    "ApiContext",
    "ApiFactory",
    "ApiGroup",
    "Call",
    "Datatype",
    "ErrorCode",
    "ErrorWriter",
    "HttpExchange",
    "HttpHead",
    "HttpLimits",
    "HttpResponse",
    "InFlightRequest",
    "InferResponse",
    "InternalError",
    "InvalidArgumentError",
    "KeyUse",
    "NotFoundError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "ResponseWriter",
    "Route",
    "RouteSchema",
    "Scope",
    "Serve",
    "ServerError",
    "Tensor",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedError",
    "json_response",
]
