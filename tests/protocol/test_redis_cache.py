"""A response cache in Redis: shared by servers, and never a reason for a request to fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.gate import BACKEND_DIRECTORY, gate_of, until, write_gated
from support.layouts import free_port
from support.redis_server import redis_server
from support.serving import running_server

INPUTS = {"INPUT0": np.array([[1, 2]], np.int32)}


@pytest.mark.tool("redis-server")
async def test_servers_share_answers_and_need_no_redis(async_protocol: type[AsyncClient], tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_gated(root, "cached", more="response_cache { enable: true }")
    gate = gate_of("cached")
    with redis_server(tmp_path, free_port()) as redis:
        options = {
            "backend_directory": (BACKEND_DIRECTORY,),
            "cache_config": (f"redis,host=127.0.0.1,port={redis.port}", "redis,ttl=60"),
        }
        with running_server(root, **options) as first, running_server(root, **options) as second:
            async with async_protocol(first) as client, async_protocol(second) as other:
                await client.infer("cached", INPUTS, request_id="a")
                await until(lambda: redis.num_keys() == 1, "the answer was kept")
                for each in (client, other):
                    answer = await each.infer("cached", INPUTS, request_id="b")
                    assert answer.outputs["OUTPUT0"].tolist() == [[1, 2]]
                assert gate.batches == [("a",)]
                redis.stop()
                for each in (client, other):
                    answer = await each.infer("cached", INPUTS, request_id="c")
                    assert answer.outputs["OUTPUT0"].tolist() == [[1, 2]]
                assert gate.batches == [("a",), ("c",), ("c",)]
