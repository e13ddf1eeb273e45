"""Blocks beyond the pool: in host memory when the pool forgets them, and named prefixes in files, across engines."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvLayout
from modelserver_backends.llm.blocks import BlockPool
from modelserver_backends.llm.engine import Engine
from modelserver_backends.llm.kept_blocks import HostBlocks, PrefixFiles
from modelserver_backends.llm.llm import LLM
from modelserver_backends.llm.sampling_params import SamplingParams
from support.generations import generate, loaded_engine, random_prompts
from torch.utils._python_dispatch import TorchDispatchMode

from modelserver.backend import InvalidArgumentError, ServerError, UnsupportedError

Checkpoints = Callable[[str], Path]
PREFIX = random_prompts(1, longest=60, seed=5)[0] + list(range(10, 60))
DIGEST = b"a model"


def _tokens(found: list[tuple[list[int], list[float]]]) -> list[list[int]]:
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}], ids=["floats", "codes"])
def test_the_host_keeps_what_the_pool_forgets(checkpoint: Checkpoints, options: dict[str, Any]) -> None:
    """A pool for one prompt only: without the host's part each prompt would be computed whole, every time."""
    prompts = [list(range(first, first + 64)) for first in (5, 100, 200)]
    small = {"block_size": 8, "num_gpu_blocks_override": 11, "max_num_seqs": 1, **options}
    with loaded_engine(checkpoint("llama"), **small) as engine:
        expected = [generate(engine, [prompt], 6)[0] for prompt in prompts * 2]
    with loaded_engine(checkpoint("llama"), **small, kv_offloading_size=1e-3) as engine:
        found = [generate(engine, [prompt], 6)[0] for prompt in prompts * 2]
        assert engine.statistics.num_prefix_hit_tokens == 3 * 56
        assert engine._host_blocks is not None
        assert engine._host_blocks.num_restored >= 3 * 7
    assert _tokens(found) == _tokens(expected)
    for (_, logprobs), (_, expected_logprobs) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_the_longest_unused_leaves_the_host_first() -> None:
    layout = KvLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    blocks = KvBlocks(layout, num_blocks=4, block_size=2, device=torch.device("cpu"))
    host = HostBlocks(blocks, 2 * layout.block_bytes(2))
    for number in (1, 2, 3):
        blocks.pieces(number)[0].fill_(number)
        if number == 3:
            host.restore(b"1", 1)
        host.keep(str(number).encode(), number)
    assert [each in host for each in (b"1", b"2", b"3")] == [True, False, True]
    host.restore(b"3", 1)
    assert blocks.pieces(1)[0].unique().tolist() == [3]
    host.close()


class Queued(TorchDispatchMode):
    """A device without values: records of each copy between it and the host whether the host could go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self._pinned: set[int] = set()
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or {args[0].device.type, args[1].device.type} != {"cpu", "meta"}:
            return func(*args, **(kwargs or {}))
        host = next(each for each in args[:2] if each.device.type == "cpu")
        is_free = len(args) > 2 and args[2] and all(each.is_contiguous() for each in args[:2])
        direction = "to the host" if host is args[0] else "to the device"
        self.found.append((direction, bool(is_free) and host.untyped_storage().data_ptr() in self._pinned))
        return args[0]


def test_copies_to_and_from_a_device_are_queued_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KvLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.bfloat16)
    with Queued(monkeypatch) as copies:
        blocks = KvBlocks(layout, num_blocks=4, block_size=2, device=torch.device("meta"))
        host = HostBlocks(blocks, 2 * layout.block_bytes(2))
        pool = BlockPool(4)
        pool.on_forgotten = host.keep
        (first,) = pool.allocate(1)
        pool.register(first, b"a prefix")
        pool.free([first])
        taken = pool.allocate(3)  # all of them: what the first held is kept before it is overwritten
        host.restore(b"a prefix", taken[0])
    assert copies.found == [("to the host", True), ("to the device", True)]
    host.close()


def _kept(engine: Engine, directory: Path) -> list[Path]:
    engine.open_prefixes(DIGEST)
    return sorted(directory.glob("*.kv"))


def test_a_prefix_is_found_by_the_next_engine(checkpoint: Checkpoints, tmp_path: Path) -> None:
    prompt = [*PREFIX, 7, 8, 9]
    options = {"block_size": 8, "kept_prefixes": {"rules": PREFIX}, "kept_prefix_directory": str(tmp_path)}
    with loaded_engine(checkpoint("llama"), block_size=8) as engine:
        expected = generate(engine, [prompt], 6)
    with loaded_engine(checkpoint("llama"), **options) as engine:
        (path,) = _kept(engine, tmp_path)
        written = path.stat().st_mtime_ns
    with loaded_engine(checkpoint("llama"), **options) as engine:
        assert _kept(engine, tmp_path) == [path]
        found = generate(engine, [prompt], 6)
        assert engine.statistics.num_prefix_hit_tokens == len(PREFIX) // 8 * 8
    assert path.stat().st_mtime_ns == written
    assert _tokens(found) == _tokens(expected)


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "other magic", "empty"])
def test_a_damaged_file_is_made_again(checkpoint: Checkpoints, tmp_path: Path, damage: str) -> None:
    options = {"block_size": 8, "kept_prefixes": {"rules": PREFIX}, "kept_prefix_directory": str(tmp_path)}
    with loaded_engine(checkpoint("llama"), **options) as engine:
        (path,) = _kept(engine, tmp_path)
        whole = path.read_bytes()
        damaged = {
            "shorter": whole[:-1],
            "other bytes": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
            "other magic": b"x" + whole[1:],
            "empty": b"",
        }[damage]
        path.write_bytes(damaged)
        assert _kept(engine, tmp_path) == [path]
    assert path.read_bytes() == whole


def test_a_full_disk_keeps_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    layout = KvLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    blocks = KvBlocks(layout, num_blocks=4, block_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidArgumentError, match=r"kept_prefix_directory: .* No space left"):
        PrefixFiles(blocks, tmp_path, DIGEST).write("a", [b"1"], [1])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_becomes_shorter_fails_its_request_only(checkpoint: Checkpoints, tmp_path: Path) -> None:
    options = {"block_size": 8, "kept_prefixes": {"rules": PREFIX}, "kept_prefix_directory": str(tmp_path)}
    with loaded_engine(checkpoint("llama"), **options) as engine:
        (path,) = _kept(engine, tmp_path)
        engine.reset()
        path.write_bytes(path.read_bytes()[:900])
        with pytest.raises(ServerError, match="shorter"):
            generate(engine, [[*PREFIX, 4]], 2)
        engine.reset()
        assert len(generate(engine, [[*PREFIX, 4]], 2)[0][0]) == 2


def test_conversations_and_texts_have_our_template(tmp_path: Path) -> None:
    place = Path(__file__).parents[3] / "model_repository" / "tiny_chat" / "1"
    system = {"role": "system", "content": "You answer questions about the library of Python. " * 4}
    options: dict[str, Any] = {
        "kept_prefixes": {"system": {"messages": [system]}},
        "kept_prefix_directory": str(tmp_path),
        "block_size": 8,
        "kv_cache_memory_bytes": 1 << 24,
    }
    hits = []
    for _ in range(2):
        with LLM(place, **options) as llm:
            question = [system, {"role": "user", "content": "What is a list?"}]
            llm.chat(question, SamplingParams(max_tokens=2, temperature=0))
            hits.append(llm.engine.statistics.num_prefix_hit_tokens)
    assert hits[0] == hits[1] > 40


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("llama", {"kept_prefixes": {"short": [5]}}, "kept in blocks of 8"),
        ("llama", {"kept_prefixes": {"wrong": [10**6] * 9}}, "wrong: the prompt has token id 1000000"),
        ("llama", {"kept_prefixes": {"text": "as text"}}, "has no tokenizer"),
        ("llama", {"kept_prefixes": {"rules": PREFIX}, "enable_prefix_caching": False}, "prefixes are not cached"),
        ("mistral", {"kept_prefixes": {"rules": PREFIX}}, "sliding window"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    checkpoint: Checkpoints, tmp_path: Path, family: str, options: dict[str, Any], told: str
) -> None:
    usual = {"block_size": 8, "kept_prefix_directory": str(tmp_path)}
    with (
        loaded_engine(checkpoint(family), **usual, **options) as engine,
        pytest.raises((InvalidArgumentError, UnsupportedError), match=told),
    ):
        engine.open_prefixes(DIGEST)
