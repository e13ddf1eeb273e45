"""A server in a process of its own, started from the tree, with a language model on the GPU."""

from __future__ import annotations

import itertools
import json
import select
import socket
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu.steps import DEVICE, require, require_device, sized, takes

NUM_STREAMS = sized(256, 8)
NUM_TOKENS = sized(256, 8)
# More than the server may take to compute one token for each stream.
_SILENCE_S = 60.0
_TOKEN = b'"content":"'
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_model(repository: Path, name: str) -> None:
    """Random weights in the shapes of Qwen3-0.6B, and a tokenizer that has a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from benchmarks.llm.shapes import SHAPES, write_checkpoint

    config = SHAPES[sized("Qwen3-0.6B", "tiny (2 M)")]
    checkpoint = write_checkpoint(repository.parent / "checkpoint", config)
    words = {f"word{number}": number for number in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(described))
    (repository / name / "1").mkdir(parents=True)
    model = {"model": str(checkpoint), "device": DEVICE, "max_model_len": 1024, "max_num_seqs": NUM_STREAMS}
    (repository / name / "1" / "model.json").write_text(json.dumps(model))
    (repository / name / "config.pbtxt").write_text('backend: "llm"')


class Chats:
    """Streamed chats that begin at once, read by this thread: when the chunks of each came, in seconds."""

    def __init__(self, port: int, count: int) -> None:
        from benchmarks.streams import request_of

        self.times_s: dict[int, list[float]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._answers: dict[int, bytes] = {}
        self._poll = select.epoll()
        for index in range(count):
            content = " ".join(f"word{(index * 37 + place) % 2000 + 10}" for place in range(sized(100, 5)))
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
            connected = socket.create_connection(("127.0.0.1", port))
            number = connected.fileno()
            self._sockets[number], self._answers[number], self.times_s[number] = connected, b"", []
            self._poll.register(connected, select.EPOLLIN)
            connected.sendall(request_of("/v1/chat/completions", json.dumps(body).encode()))

    def read(self) -> int:
        """To the end of all; how many tokens came."""
        left = set(self._sockets)
        while left:
            ready = self._poll.poll(_SILENCE_S)
            assert ready, f"{len(left)} streams are silent"
            for number, _ in ready:
                data, now_s = self._sockets[number].recv(1 << 16), time.perf_counter()
                assert data, f"a stream was closed: {self._answers[number][-500:]!r}"
                before = self._answers[number]
                self._answers[number] += data
                # A mark may be cut in two.
                new = self._answers[number].count(_TOKEN) - before.count(_TOKEN)
                self.times_s[number] += [now_s] * new
                if self._answers[number].endswith(b"0\r\n\r\n"):
                    left.discard(number)
                    self._poll.unregister(number)
        for answer in self._answers.values():
            assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
            assert b'"finish_reason":"length"' in answer, answer[-500:]
        return sum(map(len, self.times_s.values()))

    def close(self) -> None:
        self._poll.close()
        for each in self._sockets.values():
            each.close()


@takes(75, worth=56)
def step_256_chats_are_streamed() -> dict[str, Any]:
    """Tokens per second, CPU of the event loop per token, time to the first chunk and between chunks."""
    require_device()
    require("benchmarks", "tokenizers", "psutil", *sized(("triton",), ()))
    from benchmarks.llm.measure import percentile
    from benchmarks.servers.ours import modelserver
    from benchmarks.streams import spent

    with TemporaryDirectory() as place:
        repository = Path(place) / "repository"
        write_model(repository, "m")
        with modelserver(repository) as server:
            for is_measured in (False, True):
                before, began_s = spent(server.process.pid), time.perf_counter()
                chats = Chats(server.ports["http"], NUM_STREAMS)
                try:
                    num_tokens = chats.read()
                finally:
                    chats.close()
                took_s, used = time.perf_counter() - began_s, spent(server.process.pid).since(before)
                assert num_tokens >= NUM_STREAMS * NUM_TOKENS // 2, f"only {num_tokens} chunks with text came"
                if is_measured:
                    ttft = [times[0] - began_s for times in chats.times_s.values()]
                    itl = [
                        later - sooner
                        for times in chats.times_s.values()
                        for sooner, later in itertools.pairwise(times)
                    ]
    total = NUM_STREAMS * NUM_TOKENS
    return {
        "streams": f"{NUM_STREAMS} of {NUM_TOKENS} tokens, in {num_tokens} chunks",
        "speed": f"{total / took_s:.0f} tokens/s",
        "cpu per token": f"{used.loop_s / total * 1e6:.0f} us of the loop, {used.others_s / total * 1e6:.0f} of others",
        "time to the first": " ".join(
            f"p{share * 100:.0f} {percentile(ttft, share) * 1e3:.0f} ms" for share in (0.5, 0.99)
        ),
        "between chunks": " ".join(
            f"p{share * 100:.0f} {percentile(itl, share) * 1e3:.1f} ms" for share in (0.5, 0.99)
        ),
    }
