"""nginx (grpc_pass, proxy_pass) and HAProxy (HTTP/2 to the server), in front of a server."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.layouts import free_port
from support.tools import tool

NGINX = """
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
events {{ }}
http {{
    access_log off;
    client_max_body_size 80m;
    client_body_buffer_size 8m;
    proxy_buffering off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream server {{ server {server}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{grpc_port} http2;
        location / {{ grpc_pass grpc://server; }}
    }}
    server {{
        listen 127.0.0.1:{http_port};
        location / {{ proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
}}
"""

HAPROXY = """
defaults
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    mode http
frontend grpc
    bind 127.0.0.1:{grpc_port} proto h2
    default_backend http2
backend http2
    server one {server} proto h2
defaults
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    mode http
    option abortonclose
frontend http
    bind 127.0.0.1:{http_port}
    default_backend http1
backend http1
    server one {server}
"""


class Proxy:
    """A proxy that runs: where it takes gRPC, and where HTTP/1.1."""

    def __init__(self, grpc_port: int, http_port: int) -> None:
        self.grpc_url = f"127.0.0.1:{grpc_port}"
        self.http_url = f"http://127.0.0.1:{http_port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running_proxy(name: str, server: str, directory: Path) -> Iterator[Proxy]:
    """`name` is "nginx" or "haproxy"; `server` the HOST:PORT behind it."""
    template = {"nginx": NGINX, "haproxy": HAPROXY}[name]
    ports = (free_port(), free_port())
    config = directory / "proxy.conf"
    config.write_text(template.format(directory=directory, server=server, grpc_port=ports[0], http_port=ports[1]))
    arguments = {"nginx": ["-p", str(directory), "-c", str(config)], "haproxy": ["-f", str(config)]}[name]
    with _started([tool(name), *arguments], ports) as running:
        yield running


@contextmanager
def _started(command: list[str], ports: tuple[int, int]) -> Iterator[Proxy]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        for port in ports:
            while not _listens(port):
                assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command[0]} does not listen"
                time.sleep(0.02)
        yield Proxy(*ports)
    finally:
        process.terminate()
        process.wait(10)
