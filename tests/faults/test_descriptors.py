"""File descriptors that run out: connections beyond them are refused, and what is open goes on."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from support.asking import ask, infer, infer_body, is_ready, wait_for
from support.layouts import ADDRESS
from support.model_files import write_identity
from support.processes import serving_process
from support.raw_http1 import Http1Peer

LIMIT = 96


def test_a_flood_of_connections_costs_no_request_of_those_that_are_open(tmp_path: Path) -> None:
    write_identity(tmp_path)
    write_identity(tmp_path, "late")
    before = ["prlimit", f"--nofile={LIMIT}:{LIMIT}"]
    flags = ["--model-control-mode=explicit", "--load-model=identity"]
    with serving_process(tmp_path, *flags, before=before) as server:
        server.wait_until_started()
        port, url = server.port("HTTP"), server.http_url
        body = infer_body(5.0)
        request = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        with Http1Peer((ADDRESS, port)) as peer:
            peer.send(request)
            assert peer.read_answer().status == 200
            flood = [socket.create_connection((ADDRESS, port), 10) for _ in range(3 * LIMIT)]
            for _ in range(20):
                peer.send(request)
                answer = peer.read_answer()
                assert answer.status == 200
                assert json.loads(answer.body)["outputs"][0]["data"] == [5.0, 5.0]
            for each in flood:
                each.close()
        wait_for(lambda: can_ask(url), "new connections are taken again")
        assert infer(url, 6.0) == (200, 6.0)
        assert ask(url, "POST", "/v2/repository/models/late/load", b"{}")[0] == 200
        assert is_ready(url, "late"), "files can be opened again"
        assert "Traceback" not in server.output
        server.signal()
        assert server.wait() == 0


def can_ask(url: str) -> bool:
    try:
        return ask(url, "GET", "/v2/health/ready")[0] == 200
    except OSError:
        return False
