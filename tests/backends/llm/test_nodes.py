"""Ranks of one network on several nodes, which are programs of their own on this machine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import psutil
import pytest
from modelserver_backends.llm import nodes
from modelserver_backends.llm.nodes import Meeting, Nodes, connect_rank
from support.generations import generate, loaded_engine, random_prompts
from support.layouts import free_port
from support.processes import ENVIRONMENT, ServerProcess, serving_process
from support.tiny_checkpoints import reference_tokens
from support.waiting import until_true

from modelserver.backend import InternalError, InvalidArgumentError, UnavailableError

MODELS = Path(__file__).resolve().parents[3] / "model_repository"


@contextmanager
def follower(leader: Nodes, node: int = 1) -> Iterator[ServerProcess]:
    """`modelserver serve` on a node that is not the leader."""
    flags = [f"--nnodes={leader.count}", f"--node-rank={node}", f"--dist-init-addr={leader.host}:{leader.port}"]
    process = ServerProcess(flags)
    try:
        yield process
    finally:
        process.close()


def two_nodes() -> Nodes:
    return Nodes(2, "127.0.0.1", free_port())


def test_two_nodes_generate_what_transformers_does(checkpoint: Callable[[str], Path]) -> None:
    directory, prompts, leader = checkpoint("llama_tied_biased"), random_prompts(4), two_nodes()
    options = {"tensor_parallel_size": 2, "num_threads": 1, "block_size": 8, "nodes": leader}
    with follower(leader) as other:
        with loaded_engine(directory, **options) as engine:
            results = generate(engine, prompts, 6)
        assert [tokens for tokens, _ in results] == [reference_tokens(directory, prompt, 6) for prompt in prompts]
        # The model was unloaded: its rank ends, and its node waits for the next one.
        until_true(lambda: "a rank has ended with code 0" in other.output, "the rank ends", interval_s=0.05)
        other.signal()
        assert other.wait() == 0


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(checkpoint: Callable[[str], Path]) -> None:
    leader = two_nodes()
    options = {"tensor_parallel_size": 2, "num_threads": 1, "nodes": leader}
    with (
        follower(leader),
        pytest.raises((InternalError, InvalidArgumentError), match="does not divide"),
        loaded_engine(checkpoint("llama"), **{**options, "tensor_parallel_size": 6}),
    ):
        pass


def test_ranks_that_cannot_be_shared_and_nodes_that_do_not_come_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="tensor_parallel_size 3 cannot be shared by 2 nodes"):
        Meeting(two_nodes(), 3)
    with pytest.raises(UnavailableError, match=r"nodes \[1, 2\] of 3 have not joined at 127.0.0.1:\d+ within"):
        Meeting(Nodes(3, "127.0.0.1", free_port(), patience_s=0.1), 6).gather()


def joined(leader: Nodes, token: str) -> Connection:
    """Rank 1, once its leader listens."""
    deadline_s = time.monotonic() + 10
    while True:
        try:
            return connect_rank(leader.host, leader.port, 1, token)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_strangers_at_the_port_neither_end_nor_delay_a_meeting(caplog: pytest.LogCaptureFixture) -> None:
    """Without a key, too. Some say nothing, some say their words slowly, and some what is no greeting."""
    leader = two_nodes()
    with ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
        meeting = Meeting(leader, 2)
        gathered = pool.submit(meeting.gather)
        strangers.callback(joined(leader, "unknown").close)
        said = [
            *[b""] * 8,
            b"\0",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 16,
            *[
                struct.pack("!i", len(text)) + text
                for text in (
                    b"[" * 60_000,
                    b'{"version": "0.0.1", "node": 1}',
                    b'{"version": "%s", "node": Infinity}' % nodes._version().encode(),
                    b'{"version": "%s", "node": -1}' % nodes._version().encode(),
                )
            ],
        ]
        for words in said:
            stranger = strangers.enter_context(socket.create_connection((leader.host, leader.port)))
            stranger.sendall(words)
        rank = strangers.enter_context(joined(leader, meeting._token))
        (pipe,) = gathered.result(5).values()
        strangers.callback(pipe.close)
        pipe.send_bytes(b"welcome")
        assert rank.recv_bytes() == b"welcome"
    assert "its version is 0.0.1, and this node's" in caplog.text


def test_only_who_knows_the_key_and_was_asked_for_becomes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = two_nodes()
    monkeypatch.setenv("MODELSERVER_GROUP_KEY", "ours")
    with ThreadPoolExecutor(1) as pool:
        meeting = Meeting(leader, 2)
        gathered = pool.submit(meeting.gather)

        stranger = joined(leader, "a token that was not given out")
        with pytest.raises((EOFError, OSError)):
            stranger.recv_bytes()
        monkeypatch.setenv("MODELSERVER_GROUP_KEY", "theirs")
        with pytest.raises((OSError, nodes.AuthenticationError)):
            joined(leader, meeting._token)
        monkeypatch.setenv("MODELSERVER_GROUP_KEY", "ours")
        rank = joined(leader, meeting._token)
        (pipe,) = gathered.result(10).values()
        pipe.send_bytes(b"welcome")
        assert rank.recv_bytes() == b"welcome"
        for each in (stranger, rank, pipe):
            each.close()


@pytest.mark.slow
def test_a_server_outlives_the_loss_of_a_rank_and_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "MODELSERVER_GROUP_KEY", "secret")
    shutil.copytree(MODELS / "tiny_chat", tmp_path / "tiny_chat")
    config = tmp_path / "tiny_chat" / "config.pbtxt"
    with config.open("a") as added:
        for name, value in {"tensor_parallel_size": 2, "num_threads": 1, "distributed_timeout_seconds": 2}.items():
            added.write(f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n')
    leader = two_nodes()
    flags = ("--nnodes=2", f"--master-addr={leader.host}", f"--master-port={leader.port}")

    def ask(num_tokens: int = 16) -> httpx.Response:
        body = {"model": "tiny_chat", "prompt": "The list of", "max_tokens": num_tokens, "temperature": 0}
        url = f"http://{server.http_url}/v1/completions"
        return httpx.post(url, json={**body, "ignore_eos": True}, timeout=60)

    def answers() -> bool:
        return ask().status_code == 200

    with serving_process(MODELS / "tiny_chat") as alone:
        alone.wait_until_started()
        server = alone
        expected = ask().json()["choices"][0]["text"]
    with follower(leader) as other, serving_process(tmp_path, *flags) as server:
        server.wait_until_started()
        assert ask().json()["choices"][0]["text"] == expected

        # A rank dies while it computes: the request fails at once, and the engine comes back.
        lost: list[httpx.Response] = []
        request = threading.Thread(target=lambda: lost.append(ask(1000)))
        request.start()
        time.sleep(0.3)
        (rank,) = other.children()
        rank.kill()
        request.join(20)
        assert [each.status_code for each in lost] == [500]
        assert "rank 1 of this LLM, on another node, has ended" in json.dumps(lost[0].json())
        until_true(answers, "it serves again", interval_s=0.2)

        # A rank hangs: its kernel still answers.
        (rank,) = other.children()
        rank.suspend()
        hung = ask()
        assert hung.status_code == 500
        assert "rank 1, on another node, has not answered for" in json.dumps(hung.json())
        until_true(answers, "it serves again", interval_s=0.2)
        rank.kill()

        # Its node dies with the ranks, and another takes its place.
        ranks = other.children()
        other.signal(signal.SIGKILL)
        psutil.wait_procs(ranks, timeout=10)
        assert not any(each.is_running() for each in ranks)
        with follower(leader) as another:
            until_true(answers, "it serves again", interval_s=0.2)
            assert ask().json()["choices"][0]["text"] == expected
            # Nodes are stopped together: this one stays until the leader has finished.
            another.signal()
            time.sleep(0.5)
            assert answers()
            server.signal()
            assert server.wait() == 0
            assert another.wait() == 0
    assert re.search(r"the engine ends with it", server.output)
