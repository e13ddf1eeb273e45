"""The host's way to a device, on one that has no values: what waits for it fails, and copies to it are recorded."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm.attention.kv_blocks import KvBlocks
from modelserver_backends.llm.attention.paged import AttentionBatch, DeviceInputs, IntArray
from modelserver_backends.llm.attention.sdpa import SdpaAttention
from modelserver_backends.llm.block_tables import DeviceTables
from modelserver_backends.llm.captured_decode import SAMPLED_ENDINGS, CapturedDecode
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.cuda_graphs import Captured, CudaGraphs, capture_each
from modelserver_backends.llm.embedding.head import load_head
from modelserver_backends.llm.grammar.matcher import MaskBatch
from modelserver_backends.llm.models.load import LoadedNetwork, choose_device
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.plan import Chunk, StepPlan
from modelserver_backends.llm.runner import Runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import Sequence
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.checkpoints import network_of
from support.sampling import make_sequence
from support.tiny_tokenizers import byte_level
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Checkpoints = Callable[[str], Path]
META = torch.device("meta")
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.7, seed=3)
REPORTED = SamplingParams(temperature=0.7, seed=3, logprobs=2)


class Copies(TorchDispatchMode):
    """Records whether each copy from the host could go on while the host does: pinned, whole, and not waited for.
    `num_launches`: operations of the device, with copies, without views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.are_free: list[bool] = []
        self.num_launches = 0
        self._pinned: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype)
        pinned.copy_(tensor)
        self._pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        self.num_launches += not func.is_view and any(value.device.type == "meta" for value in outputs)
        source, target = None, None
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to):  # the second in inference mode
            source, is_free = args[0], kwargs.get("non_blocking", False)
            target = kwargs.get("device")
        elif func is torch.ops.aten.copy_.default:
            source, target = args[1], args[0].device
            is_free = (len(args) > 2 and args[2]) or kwargs.get("non_blocking", False)
            is_free = is_free and args[0].is_contiguous()
        if source is not None and source.device.type == "cpu" and target is not None and target.type == "meta":
            is_pinned = source.untyped_storage().data_ptr() in self._pinned
            self.are_free.append(bool(is_free and is_pinned and source.is_contiguous()))
        return result


class FreeMatcher:
    """Of a grammar that takes every token."""

    vocab_size = 300

    def fill(self, batch: MaskBatch, row: int) -> None:
        batch.bits[row] = -1 % 2**32


class EmptyAttention:
    """Its inputs go to the device as those of our kernels do, and it sees nothing."""

    def arrays_of(self, batch: AttentionBatch) -> list[IntArray]:
        return [batch.slots, batch.lens, np.cumsum(batch.num_queries)]

    def inputs_of(self, num_decodes: int, tables: torch.Tensor, arrays: list[torch.Tensor]) -> DeviceInputs:
        return DeviceInputs(num_decodes, *arrays[:2], tables)

    def rope_and_attend(self, _layer: int, heads: torch.Tensor, _rotation: Any, _inputs: Any) -> torch.Tensor:
        return heads.new_empty(heads.shape[0], 4 * heads.shape[2])


class Replayed:
    """A graph of a device that has none."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self.output = compute()

    def replay(self) -> None:
        self.output = self._compute()


def captured_of(
    loaded: LoadedNetwork, attention: Any, capture: Any, tables: DeviceTables | None = None
) -> CapturedDecode:
    return CapturedDecode(
        loaded.network,
        attention,
        device=loaded.device,
        max_num_seqs=4,
        tables=tables or DeviceTables(4, 8, loaded.device),
        capture=capture,
    )


def runner_of(
    loaded: LoadedNetwork,
    directory: Path,
    attention: Any,
    captured: CapturedDecode | None,
    tables: DeviceTables | None = None,
) -> Runner:
    return Runner(
        loaded,
        sampler=Sampler(),
        head=load_head(open_checkpoint(directory), EngineOptions(), default="last", device=loaded.device),
        blocks=KvBlocks(loaded.kv_layout, num_blocks=25, block_size=8, device=loaded.device),
        attention=attention,
        tables=tables,
        captured=captured,
        is_asynchronous=True,
    )


def options_on(device: str) -> EngineOptions:
    return EngineOptions(device=device, dtype="float32", max_model_len=64, max_num_seqs=4, block_size=8)


def sequence_of(seq_id: int, num_tokens: int, params: SamplingParams, blocks: list[int]) -> Sequence:
    token_ids = list(range(9, 9 + num_tokens))
    return Sequence(seq_id, token_ids, num_tokens, params, slot=seq_id, block_ids=array("q", blocks))


@pytest.mark.parametrize("params", [GREEDY, DRAWN, REPORTED], ids=["greedy", "drawn", "logits"])
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "eager"])
def test_a_step_is_launched_by_one_copy_without_waiting_for_the_one_before(
    is_captured: bool, params: SamplingParams, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, then decodes whose tokens only the device knows, in another order than the plan's; a prompt beside them;
    and tokens that were guessed."""
    directory = checkpoint("llama")
    loaded = network_of(directory, options_on("meta"))
    with Copies(monkeypatch) as copies:
        tables = DeviceTables(4, 8, META)
        captured = captured_of(loaded, EmptyAttention(), Replayed, tables) if is_captured else None
        runner = runner_of(loaded, directory, EmptyAttention(), captured, tables)
        short, long, late = (
            sequence_of(*each) for each in ((1, 3, params, [1, 2]), (2, 11, params, [3, 4]), (3, 9, params, [5, 6]))
        )
        guessing = sequence_of(0, 5, params, [7, 8])
        guessing.drafts = [5, 6]
        runner.launch(StepPlan((Chunk(short, 0, 3, 1), Chunk(long, 0, 11, 1))))
        runner.launch(StepPlan((Chunk(short, 3, 1, 1), Chunk(long, 11, 1, 1))))
        del copies.are_free[:]
        for plan in (
            (Chunk(short, 4, 1, 1), Chunk(long, 12, 1, 1)),
            (Chunk(short, 5, 1, 1), Chunk(long, 13, 1, 1), Chunk(late, 0, 5, 0)),
            (Chunk(short, 6, 1, 1), Chunk(late, 5, 4, 1), Chunk(guessing, 4, 3, 3)),
        ):
            runner.launch(StepPlan(plan))
            assert copies.are_free == [True]
            del copies.are_free[:]


RULES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {1: 2.0, 5: -3.0}},
    "bans": {"allowed_token_ids": (1, 2, 3), "min_tokens": 9, "stop_token_ids": (2,), "bad_words": ("so",)},
    "repetitions": {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    "grammar": {},
    "reported": {"logprobs": 1, "repetition_penalty": 1.1},
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_all_rows_are_as_few_launches_as_those_of_one(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the rows, one that has none."""
    tokenizer = Tokenizer(byte_level())
    params = SamplingParams(temperature=0.7, **RULES[rule])
    numbers = set()
    for num_rows in (1, 256):
        sequences = [
            make_sequence(
                params, output=[7 + row, 8, 7 + row], seed=row, matcher=FreeMatcher() if rule == "grammar" else None
            )
            for row in range(num_rows)
        ]
        sequences.append(make_sequence(DRAWN))
        with Copies(monkeypatch) as copies, torch.inference_mode():
            sampler = Sampler(tokenizer=tokenizer)
            sampler.start(torch.zeros(num_rows + 1, tokenizer.vocab_size, device=META), sequences)
        assert all(copies.are_free)
        numbers.add((len(copies.are_free), copies.num_launches))
    ((num_copies, num_launches),) = numbers
    assert num_copies <= 3
    assert num_launches <= 70


def generated(runner: Runner) -> list[int]:
    """Of two sequences in turn; the second step is made of decodes alone."""
    short, long = sequence_of(1, 3, GREEDY, [1, 2]), sequence_of(2, 11, GREEDY, [3, 4])
    first = runner.launch(StepPlan((Chunk(short, 0, 3, 1), Chunk(long, 0, 11, 1)))).result().sampled
    second = runner.launch(StepPlan((Chunk(short, 3, 1, 1), Chunk(long, 11, 1, 1)))).result().sampled
    return [token.token_id for (token,) in (*first, *second)]


@pytest.mark.parametrize("is_at_load", [True, False])
def test_what_cannot_be_captured_is_computed_without_graphs(
    is_at_load: bool, checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint("llama")
    loaded = network_of(directory, options_on("cpu"))
    tried = []

    def refuse(compute: Callable[[], torch.Tensor]) -> Captured:
        tried.append(compute)
        raise RuntimeError("operation not permitted when stream is capturing")

    def new_attention() -> SdpaAttention:
        blocks = KvBlocks(loaded.kv_layout, num_blocks=25, block_size=8, device=loaded.device)
        return SdpaAttention(blocks, loaded.attention)

    expected = generated(runner_of(loaded, directory, new_attention(), None))
    runner = runner_of(loaded, directory, new_attention(), captured_of(loaded, EmptyAttention(), refuse))
    if is_at_load:
        runner.capture_all()
    assert generated(runner) == expected
    assert len(tried) == 1
    assert "without CUDA graphs: operation not permitted" in caplog.text


def test_all_graphs_are_captured_the_largest_first(
    checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = network_of(checkpoint("llama"), options_on("meta"))
    caplog.set_level("INFO")
    sizes: list[int] = []

    def capture(compute: Callable[[], torch.Tensor]) -> Captured:
        output = compute()
        sizes.append(output.shape[0])
        return Captured(output, lambda: None)

    with Copies(monkeypatch), torch.inference_mode():
        captured_of(loaded, EmptyAttention(), capture).capture_all()
    assert sizes == [size for size in (4, 2, 1) for _ in SAMPLED_ENDINGS]
    assert f"captured {len(sizes)} of {len(sizes)} graphs" in caplog.text


def test_a_terminal_shows_a_bar_in_place_of_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    capture_each("graphs", [lambda: True, lambda: True])
    assert terminal.getvalue().endswith(f"\rcapturing graphs [{'#' * 30}] 2/2, 0 s left \n")
    capture_each("others", [lambda: False, lambda: True])
    assert not caplog.text


class Stream:
    def wait_stream(self, _other: Any) -> None: ...

    def synchronize(self) -> None: ...


class Graph:
    """Of torch. `log` has what was called on all."""

    log: list[Any]

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.log.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self.log.append("end")

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def graph_log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []
    graph = type("LoggedGraph", (Graph,), {"log": log})
    for name, fake in (("Stream", Stream), ("current_stream", Stream), ("CUDAGraph", graph)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(CudaGraphs, "borrowed", lambda _graphs, tensor: tensor)
    return log


def test_captures_share_memory_and_do_not_mind_what_other_threads_do(graph_log: list[Any]) -> None:
    graphs, output = CudaGraphs(), torch.zeros(1)
    captured = graphs(lambda: output)
    assert captured.output is output
    captured.replay()
    graphs(lambda: output)
    assert graph_log == [
        ("begin", None, "thread_local"),
        "end",
        "replay",
        ("begin", "pool", "thread_local"),
        "end",
    ]


def test_a_capture_that_fails_is_ended(graph_log: list[Any]) -> None:
    graphs = CudaGraphs()
    was_enabled = gc.isenabled()

    def compute() -> torch.Tensor:
        if graph_log:
            assert not gc.isenabled()
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs(compute)
    assert graph_log == [("begin", None, "thread_local"), "end"]
    assert gc.isenabled() is was_enabled


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_gpu_has_an_index(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that compute choose their GPU by it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device(asked) == torch.device("cuda:1")
    assert choose_device("cuda:0") == torch.device("cuda:0")
