"""`python -m benchmarks.llm.host_overhead`: what a step costs the host besides the network.

The engine runs over a runner that computes nothing: all sequences decode, each gets a token per step. Measured are the
scheduler's plan, the flat inputs that a network would take, and what is done with the tokens (stop checks, statistics,
outputs; text where outputs are streamed), as CPU time of the engine's thread. The tokens' text comes from a byte-level
BPE tokenizer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modelserver_backends.llm.block_tables import BlockTables
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.plan import SampledToken, StepPlan, StepResult
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.step_inputs import StepInputs
from modelserver_backends.llm.text.tokenizer import Tokenizer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

PROMPT_LEN = 64
NUM_STEPS = 300
WARMUP_STEPS = 20
WORDS = "the engine of a server answers every request that it is given and then it waits for the next one to come"


@dataclass
class Computed:
    value: StepResult

    def result(self) -> StepResult:
        return self.value


@dataclass
class FreeRunner:
    """Tokens in turn, for nothing. `inputs_ns`: what making the network's inputs took; `own_ns`: the rest of itself."""

    num_blocks: int
    vocab_size: int
    block_size: int = 16
    max_model_len: int = 4096
    is_asynchronous: bool = False
    has_states: bool = False
    window: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    inputs_ns: int = 0
    own_ns: int = 0
    tables: BlockTables = field(default_factory=BlockTables)

    def launch(self, plan: StepPlan) -> Computed:
        begin_ns = time.thread_time_ns()
        _ = StepInputs(plan.chunks, self.block_size, tables=self.tables).batch
        self.inputs_ns = time.thread_time_ns() - begin_ns
        sampled = tuple((SampledToken(4 + chunk[1] % (self.vocab_size - 4)),) for chunk in plan.chunks if chunk[3])
        self.own_ns = time.thread_time_ns() - begin_ns
        return Computed(StepResult(sampled, {}))


@contextmanager
def tokenizer() -> Iterator[Tokenizer]:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator([WORDS] * 4, trainers.BpeTrainer(vocab_size=384, initial_alphabet=alphabet))
    with tempfile.TemporaryDirectory() as directory:
        library.save(str(Path(directory) / "tokenizer.json"))
        yield Tokenizer.from_checkpoint(open_checkpoint(Path(directory)))


def measure(
    num_running: int, prompt_len: int, *, is_streamed: bool, text: Tokenizer
) -> tuple[list[float], list[float]]:
    """Milliseconds of `NUM_STEPS` decode steps: of the engine, and of the network's inputs."""
    runner = FreeRunner(num_running * (40 + prompt_len // 16) + 1, text.vocab_size, max_model_len=4096 + prompt_len)
    engine = Engine(
        options=EngineOptions(max_num_seqs=num_running, max_num_batched_tokens=8192),
        runner=runner,  # type: ignore[arg-type]  # what of it the engine calls
        tokenizer=text,
    )
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    for number in range(num_running):
        prompt = [(number * 7 + position) % text.vocab_size for position in range(prompt_len)]
        engine.add(GenerationRequest(prompt, params, is_streamed=is_streamed))
    while engine.statistics.num_running < num_running or engine.statistics.num_steps < WARMUP_STEPS:
        engine.step()
    gc.collect()
    gc.freeze()
    engine_ms, inputs_ms = [], []
    for _ in range(NUM_STEPS):
        begin_ns = time.thread_time_ns()
        engine.step()
        engine_ms.append((time.thread_time_ns() - begin_ns - runner.own_ns) / 1e6)
        inputs_ms.append(runner.inputs_ns / 1e6)
    gc.unfreeze()
    return engine_ms, inputs_ms


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256], help="sequences that decode at once")
    parser.add_argument("--prompt", type=int, default=PROMPT_LEN, help="tokens of each prompt")
    arguments = parser.parse_args()
    print(f"CPU of the host per decode step in ms, {NUM_STEPS} steps")
    print("| running | streamed | engine p50 | engine p99 | inputs p50 | both p50 |")
    print("|---|---|---|---|---|---|")
    with tokenizer() as text:
        for num_running in arguments.running:
            for is_streamed in (True, False):
                engine_ms, inputs_ms = measure(num_running, arguments.prompt, is_streamed=is_streamed, text=text)
                both = statistics.median(a + b for a, b in zip(engine_ms, inputs_ms, strict=True))
                print(
                    f"| {num_running} | {'yes' if is_streamed else 'no'} | {statistics.median(engine_ms):.3f} "
                    f"| {percentile(engine_ms, 99):.3f} | {statistics.median(inputs_ms):.3f} | {both:.3f} |"
                )


if __name__ == "__main__":
    main()
