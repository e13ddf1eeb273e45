"""Two ranks over gloo, the second in a process of its own, compute what one does."""

from __future__ import annotations

import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest
import torch
from modelserver_backends.llm import cuda_graphs, kernels, rank_process, runner, tensor_parallel
from modelserver_backends.llm.captured_pieces import token_sizes
from modelserver_backends.llm.llm import LLM
from modelserver_backends.llm.lora import layers
from modelserver_backends.llm.lora.adapter import Adapter, LowRank
from modelserver_backends.llm.nodes import Nodes
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.profile import StepMemory, largest_plan
from modelserver_backends.llm.rank_messages import Embedding, Membership, Placing, Pool, packed, unpacked
from modelserver_backends.llm.sampling_params import SamplingParams
from support.generations import generate, loaded_adapters, loaded_engine, random_prompts
from support.llm_models import write_llm
from support.processes import serving_process
from support.recorded_graphs import Device, record_sums, use_recorded_graphs
from support.tiny_adapters import peft_tokens, write_adapter
from support.tiny_checkpoints import reference_tokens
from support.tiny_predictions import write_predicting
from support.torch_adapters import use_torch_adapters
from support.waiting import until_true

from modelserver.backend import InternalError, InvalidArgumentError, UnsupportedError

PROMPTS = random_prompts(4)


@pytest.mark.parametrize(
    "family",
    [
        "llama_tied_biased",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen2_moe", "phi3", "gpt2", "bloom", "falcon", "deepseek_v3")
        ),
    ],
)
def test_two_ranks_generate_what_transformers_does(family: str, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(family)
    with loaded_engine(directory, tensor_parallel_size=2, num_threads=1, block_size=8) as engine:
        results = generate(engine, PROMPTS, 6)
        shared = engine.runner.embed(PROMPTS)
    with loaded_engine(directory) as engine:
        alone = engine.runner.embed(PROMPTS)
    assert [tokens for tokens, _ in results] == [reference_tokens(directory, prompt, 6) for prompt in PROMPTS]
    np.testing.assert_allclose(shared, alone, atol=1e-4)


@pytest.mark.slow
def test_a_size_that_does_not_divide_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="tensor_parallel_size 3 does not divide"),
        loaded_engine(checkpoint("llama"), tensor_parallel_size=3, num_threads=1),
    ):
        pass


@pytest.mark.slow
def test_a_network_that_cannot_be_split_says_so(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedError, match="olmo2"), loaded_engine(checkpoint("olmo2"), tensor_parallel_size=2):
        pass


@pytest.mark.parametrize(
    ("last_words", "statement"),
    [
        ("no room for this rank", "sys.exit('no room for this rank')"),
        pytest.param(
            "a share that cannot be read",
            "module.load_network = lambda *_: sys.exit('a share that cannot be read')",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["before it joins", "while it loads"],
)
def test_a_rank_that_ends_fails_the_load_at_once(
    last_words: str, statement: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = (
        f"import importlib, sys; module = importlib.import_module(sys.argv[1]); {statement}; "
        "module.follow(*map(int, sys.argv[2:]))"
    )
    monkeypatch.setattr(tensor_parallel, "_FOLLOW", follow)
    with (
        pytest.raises(InternalError, match=rf"rank 1 of this LLM ended with code 1; .* wrote: {last_words}"),
        loaded_engine(checkpoint("llama"), tensor_parallel_size=2, num_threads=1),
    ):
        pass


def test_a_rank_that_ends_later_fails_the_step(checkpoint: Callable[[str], Path]) -> None:
    with loaded_engine(checkpoint("llama"), tensor_parallel_size=2, num_threads=1) as engine:
        (follower,) = [each for each in psutil.Process().children() if "follow" in " ".join(each.cmdline())]
        follower.kill()
        with pytest.raises(InternalError, match="rank 1 of this LLM ended with code -9"):
            engine.runner.embed(PROMPTS)


def test_a_rank_that_hangs_fails_the_step_and_is_named(checkpoint: Callable[[str], Path]) -> None:
    with loaded_engine(
        checkpoint("llama"), tensor_parallel_size=2, num_threads=1, distributed_timeout_seconds=1
    ) as engine:
        engine.runner.embed(PROMPTS)
        time.sleep(1.1)  # no step is under way
        assert not engine.has_work
        (follower,) = [each for each in psutil.Process().children() if "follow" in " ".join(each.cmdline())]
        follower.suspend()
        expected = re.escape("has not ended within 1 s (distributed_timeout_seconds): rank 1 has not answered for ")
        with pytest.raises(InternalError, match=expected):
            engine.runner.embed(PROMPTS)
        assert engine.has_work, "its driver calls it once more, and ends it"
        with pytest.raises(InternalError, match=expected):
            engine.step()


def test_a_rank_that_answers_and_does_not_compute_is_named(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that reads a file which never comes."""
    stuck = "module.compute_fresh = lambda *given, **more: __import__('time').sleep(60)"
    follow = f"import importlib, sys; module = importlib.import_module(sys.argv[1]); {stuck}; "
    monkeypatch.setattr(tensor_parallel, "_FOLLOW", follow + "module.follow(*map(int, sys.argv[2:]))")
    options = {"tensor_parallel_size": 2, "num_threads": 1, "distributed_timeout_seconds": 1}
    with (
        loaded_engine(checkpoint("llama"), **options) as engine,
        pytest.raises(InternalError, match="all ranks answer, and the others wait for rank 1"),
    ):
        engine.runner.embed(PROMPTS)


@pytest.mark.slow
def test_a_server_starts_an_engine_again_of_which_a_rank_hangs(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    parameters = {"tensor_parallel_size": 2, "num_threads": 1, "distributed_timeout_seconds": 2}
    write_llm(tmp_path, "shared", checkpoint("llama"), max_model_len=64, **parameters)
    with serving_process(tmp_path) as server:
        server.wait_until_started()
        url = f"http://{server.http_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            ask = partial(client.completions.create, model="shared", prompt="one two", max_tokens=4)
            ask()
            (rank,) = [each for each in server.children() if "follow" in " ".join(each.cmdline())]
            rank.send_signal(signal.SIGSTOP)
            with pytest.raises(openai.InternalServerError, match="rank 1 has not answered for"):
                ask()

            def answers() -> bool:
                try:
                    return ask().usage is not None
                except openai.InternalServerError:  # begun by the process that ends
                    return False

            until_true(answers, "it serves again", interval_s=0.2)
            assert not rank.is_running()


def test_a_rank_that_ends_ends_the_sums_of_gpus(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it, and no host would hear of that. What the step has sampled means nothing then."""
    is_ended = threading.Event()
    join = tensor_parallel.join
    monkeypatch.setattr(tensor_parallel, "join", lambda *given: replace(join(*given), abort=is_ended.set))
    options = {"tensor_parallel_size": 2, "num_threads": 1, "block_size": 8, "max_num_seqs": 2, "max_model_len": 32}
    with loaded_engine(checkpoint("llama"), **options) as engine:
        launched = engine.runner.launch(largest_plan(engine.options, 8, 32))
        (follower,) = [each for each in psutil.Process().children() if "follow" in " ".join(each.cmdline())]
        follower.kill()
        assert is_ended.wait(20)
        with pytest.raises(InternalError, match="rank 1 of this LLM ended with code -9"):
            launched.result()


# A rank that records graphs; one that cannot capture.
RECORDING = (
    "import torch; from support import recorded_graphs; device = recorded_graphs.Device(); device.__enter__(); "
    "recorded_graphs.use_recorded_graphs(device); recorded_graphs.record_sums(device); device.refuses = {refuses}"
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Rank 0 records graphs, too."""
    for module, names in (
        (cuda_graphs, ("DEVICE_TYPES",)),
        (kernels, ("KERNELS", "PACKED_KERNELS")),
        (runner, ("CudaGraphs", "make_attention")),
        (rank_process, ("CudaGraphs", "make_attention", "join")),
        (tensor_parallel, ("join",)),
        (layers, ("device_processors",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # as it is now, again afterwards
    device = Device()
    use_recorded_graphs(device)
    record_sums(device)
    yield device
    device.graphs.clear()  # what they hold of the ranks ends with the test


# Of steps with prompts and of decodes.
IN_GRAPHS = {
    "tensor_parallel_size": 2,
    "num_threads": 1,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 20,
}


@pytest.mark.parametrize(
    "refuses", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["captured", "another rank cannot capture"]
)
def test_ranks_capture_and_replay_their_steps_together(
    refuses: bool, device: Device, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "_FOLLOW", f"{RECORDING.format(refuses=refuses)}; {tensor_parallel._FOLLOW}")
    directory = checkpoint("llama_tied_biased")
    with device, loaded_engine(directory, **IN_GRAPHS) as engine:
        num_graphs, num_layers = len(device.graphs), engine.runner.network.config.num_layers
        results = generate(engine, PROMPTS, 12, logprobs=None)
        assert num_graphs == len(device.graphs) == 3 * 3 + len(token_sizes(20)) * (num_layers + 1)
        num_decodes = engine.statistics.num_steps - (device.num_replays - engine.statistics.num_steps) // num_layers
        assert 5 < num_decodes < engine.statistics.num_steps
        assert device.num_replays == num_decodes + (engine.statistics.num_steps - num_decodes) * (num_layers + 1)
    assert [tokens for tokens, _ in results] == [reference_tokens(directory, prompt, 12) for prompt in PROMPTS]


@pytest.mark.slow
def test_ranks_have_adapters_in_all_their_graphs(
    device: Device, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoint("llama_tied_biased")
    places = {f"a{rank}": write_adapter(base, tmp_path / str(rank), seed=rank, r=rank) for rank in (2, 5)}
    expected = {name: peft_tokens(base, place, PROMPTS, 6) for name, place in places.items()}
    names = ["a2", "a5", None, "a5"]
    monkeypatch.setitem(sys.modules, "modelserver_backends.llm.lora.triton_lora", None)
    use_torch_adapters()
    adapting = "from support.torch_adapters import use_torch_adapters; use_torch_adapters()"
    follow = f"{RECORDING.format(refuses=False)}; {adapting}; {tensor_parallel._FOLLOW}"
    monkeypatch.setattr(tensor_parallel, "_FOLLOW", follow)
    with device, loaded_adapters(base, places, **IN_GRAPHS) as engine:
        device.num_launches = 0
        found = generate(engine, PROMPTS, 6, adapter=names, logprobs=None)
        # Before and after a step, and attention of its layers: a network would be some hundreds.
        assert device.num_launches < 80 * engine.statistics.num_steps
    for index, (name, (tokens, _)) in enumerate(zip(names, found, strict=True)):
        assert tokens == (reference_tokens(base, PROMPTS[index], 6) if name is None else expected[name][index]), name


@pytest.mark.slow
def test_ranks_check_what_the_first_guesses_in_graphs(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's graphs keep states between layers, those of the other do not."""
    follow = f"{RECORDING.format(refuses=False)}; {tensor_parallel._FOLLOW}"
    monkeypatch.setattr(tensor_parallel, "_FOLLOW", follow)
    place = write_predicting(tmp_path / "checkpoint", "mimo")
    prompts = [list(range(5, 25)), [7, 7, 7]]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    config = {"method": "mimo_mtp", "num_speculative_tokens": 3}
    common = {"device": "cpu", "dtype": "float32", "max_model_len": 96}
    with LLM(place, **common, enforce_eager=True) as llm:
        expected = llm.generate(prompts, params)
    with device, LLM(place, **common, **IN_GRAPHS, speculative_config=config) as llm:
        device.num_replays, num_layers = 0, llm.engine.runner.network.config.num_layers
        answers = llm.generate(prompts, params)
        statistics = llm.engine.statistics
        assert statistics.speculation is not None
        assert statistics.speculation.num_draft_tokens > 10
        assert device.num_replays == statistics.num_steps * (num_layers + 1)
    assert [each.outputs[0].token_ids for each in answers] == [each.outputs[0].token_ids for each in expected]


def test_what_ranks_are_told_runs_no_code() -> None:
    adapter = Adapter(
        "a",
        b"digest",
        {
            "q": LowRank(torch.randn(2, 6).bfloat16(), torch.randn(4, 2), torch.rand(4)),
            "k": LowRank(torch.randn(3, 5).t().half()[:2], torch.randn(4, 2)),
        },
    )
    found = unpacked(packed(Placing(3, adapter)))
    assert isinstance(found, Placing)
    assert (found.slot, found.adapter.name, found.adapter.digest) == (3, "a", b"digest")
    for name, module in adapter.modules.items():
        for part in ("down", "up", "gain"):
            expected, given = getattr(module, part), getattr(found.adapter.modules[name], part)
            assert (given is None) if expected is None else torch.equal(given, expected)
    options = EngineOptions(
        max_model_len=64, lora_modules=(("a", "/b"),), nodes=Nodes(2, "::1", 7), kept_prefixes={"p": "text"}
    )
    membership = Membership(Path("/x"), options, 5, 1, "::1")
    assert unpacked(packed(membership)) == replace(membership, options=replace(options, kept_prefixes={}))
    for message in (Pool(3, 16), Embedding(((1, 2), (3,)), True)):
        assert unpacked(packed(message)) == message
    with pytest.raises(ValueError, match="decode"):
        unpacked(pickle.dumps(Pool(3, 16)))


class NoMemory:
    def used(self) -> int:
        return 0

    def begin(self) -> None: ...

    def peak(self) -> int:
        return 0


def test_all_ranks_compute_the_largest_step_and_say_what_it_leaves(checkpoint: Callable[[str], Path]) -> None:
    options = {"tensor_parallel_size": 2, "num_threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 40}
    options["distributed_timeout_seconds"] = 0  # no rank says anything but answers
    with loaded_engine(checkpoint("llama_tied_biased"), **options) as engine:
        followers = engine.runner._followers
        followers.open_pool(Pool(2, engine.runner.block_size))
        assert engine.runner.measure_memory(engine.options, NoMemory()) == StepMemory(0, 0)
        assert 0 < followers.least_left() < psutil.virtual_memory().total
