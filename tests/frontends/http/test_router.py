from __future__ import annotations

import pytest

from modelserver.auth.access import ApiGroup
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.router import Router, allowed_methods, route_for
from modelserver.protocol.api import Api, Route


def _named(name: str):
    def call(exchange: object, **arguments: str) -> None: ...

    call.__name__ = name
    return call


META = ApiGroup.METADATA
ROUTER = Router(
    (
        Api(
            "test",
            (
                Route("GET", "/v2", _named("root"), META),
                Route("GET", "/v2/models/stats", _named("stats"), META),
                Route("GET", "/v2/models/{name}", _named("model"), META),
                Route("POST", "/v2/models/{name}/infer", _named("infer"), META),
                Route("POST", "/v2/models/{name}/versions/{version}/infer", _named("infer"), META),
                Route("GET", "/v2/logging", _named("get_logging"), META),
                Route("POST", "/v2/logging", _named("set_logging"), META),
            ),
            beginnings=("/v2",),
        ),
    )
)


@pytest.mark.parametrize(
    ("method", "path", "name", "arguments"),
    [
        ("GET", "/v2", "root", {}),
        ("GET", "/v2/", "root", {}),
        ("GET", "/v2/models/stats", "stats", {}),
        ("GET", "/v2/models/m", "model", {"name": "m"}),
        ("GET", "/v2/models/m/", "model", {"name": "m"}),
        ("GET", "/v2/models/a%20b.c", "model", {"name": "a b.c"}),
        ("GET", "/%762/m%6fdels/100%25%2e", "model", {"name": "100%."}),
        ("GET", "/v2/models/%252f", "model", {"name": "%2f"}),
        ("GET", "/v2/models/a%2Finfer", "model", {"name": "a/infer"}),
        ("POST", "/v2/models/m/infer", "infer", {"name": "m"}),
        ("POST", "/v2/models/stats/infer", "infer", {"name": "stats"}),
        ("POST", "/v2/models/m/versions/3/infer", "infer", {"name": "m", "version": "3"}),
        ("HEAD", "/v2", "root", {}),
        ("POST", "/v2/logging", "set_logging", {}),
    ],
)
def test_finds(method: str, path: str, name: str, arguments: dict[str, str]) -> None:
    found = ROUTER.find(path)
    assert found is not None
    route = route_for(found.routes, method)
    assert route is not None
    assert (route.call.__name__, dict(found.arguments)) == (name, arguments)


@pytest.mark.parametrize(
    "path", ["", "/", "v2", "/v3", "/v2//models", "/v2/models//infer", "/v2/models/m/infer/x", "/v2/" + "x" * 5000, "*"]
)
def test_finds_nothing(path: str) -> None:
    assert ROUTER.find(path) is None


@pytest.mark.parametrize("path", ["/v2%2fmodels", "/v2%2fmodels%2fm", "/%2F", "/v2%2Flogging", "/%2fv2"])
def test_an_encoded_slash_never_separates_segments(path: str) -> None:
    """A proxy that has rules for paths sees none there, and lets it pass."""
    assert ROUTER.find(path) is None


def test_a_route_lists_its_methods() -> None:
    found = ROUTER.find("/v2/logging")
    assert found is not None
    assert allowed_methods(found.routes) == ["GET", "HEAD", "POST"]
    assert route_for(found.routes, "DELETE") is None


def test_the_nearest_route_is_named() -> None:
    assert ROUTER.nearest("/v2/loging") == "/v2/logging"
    assert ROUTER.nearest("/completely/different/thing") is None
    assert ROUTER.nearest("/v2" * 1000) is None


def test_a_route_may_not_be_there_twice() -> None:
    with pytest.raises(InvalidArgumentError, match="twice"):
        Router((Api("test", (Route("GET", "/a/{x}", _named("a"), META), Route("GET", "/a/{x}", _named("b"), META))),))


OTHER = Api(
    "other",
    (
        Route("POST", "/score/{model}", _named("score"), META),
        Route("GET", "/score/report", _named("report"), META),
        Route("GET", "/alone", _named("alone"), META),
    ),
    beginnings=("/score",),
)
BOTH = Router((*ROUTER.apis, OTHER))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v2/nothing", "test"),
        ("/v2", "test"),
        ("/score", "other"),
        ("/score/a/b/c", "other"),
        ("/alone", "other"),
        # Beginnings are whole segments, and what no API declares is the first one's.
        ("/scores", "test"),
        ("/alone/below", "test"),
        ("/nothing", "test"),
    ],
)
def test_an_api_answers_for_the_paths_below_its_beginnings(path: str, name: str) -> None:
    assert BOTH.api(path).name == name


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/score/report/x", "/score/report"),
        ("/score/score/report", "/score/report"),
        ("/report", "/score/report"),
        # Never one of another API.
        ("/v2/report", None),
    ],
)
def test_hints_stay_within_the_api(path: str, nearest: str | None) -> None:
    assert BOTH.nearest(path) == nearest


def test_the_starts_are_those_of_the_api() -> None:
    assert BOTH.starts("/score/a/b/c") == ["/score/report", "/score/{model}"]
    assert BOTH.starts("/nothing") == ["/alone", "/score", "/v2"]


def test_apis_must_agree_on_what_they_share() -> None:
    other = Api("third", (Route("GET", "/score/report", _named("report"), META),))
    with pytest.raises(InvalidArgumentError, match=r"GET /score/report .* of the API 'other', and of 'third'"):
        Router((OTHER, other))
    other = Api("third", (Route("GET", "/score/{name}", _named("x"), META),))
    with pytest.raises(InvalidArgumentError, match=r"'third' calls a segment of .* 'name'"):
        Router((OTHER, other))
