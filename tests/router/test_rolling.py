"""Replicas come and go under load: no request is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.rolling import constant_load
from support.routing import running_router
from support.serving import RunningServer, running_server
from support.waiting import until_true

REPOSITORY = Path(__file__).parents[2] / "model_repository" / "identity"


def listed(*servers: RunningServer) -> str:
    places = [server.http_url.split(":") for server in servers]
    return json.dumps({"endpoints": [{"address": host, "port": port} for host, port in places]})


@pytest.mark.slow
def test_a_replica_that_stops_loses_no_request(tmp_path: Path) -> None:
    """It stops by SIGTERM's way, without a delay in which the router could have noticed; and then another one joins."""
    place = tmp_path / "replicas.json"
    with running_server(REPOSITORY) as stays, running_server(REPOSITORY) as comes, running_server(REPOSITORY) as goes:
        place.write_text(listed(stays, goes))
        with running_router(discover=f"file:{place}") as router:
            with constant_load(router.http_url, router.grpc_url, num_clients=2) as load:
                until_true(
                    lambda: len(load.num_answered) == 3 and min(load.num_answered.values()) > 20, "all are asked"
                )
                asyncio.run_coroutine_threadsafe(goes.server.stop(), goes.loop).result(60)
                before = dict(load.num_answered)
                until_true(lambda: all(load.num_answered[kind] > before[kind] + 20 for kind in before), "they go on")
                place.write_text(listed(stays, comes))
                until_true(lambda: comes.http_url in str(router.router.endpoints.endpoints), "it has joined")
                before = dict(load.num_answered)
                until_true(lambda: all(load.num_answered[kind] > before[kind] + 20 for kind in before), "they go on")
            assert load.failures == []
            assert router.router.replicas.counts.num_lost == 0
