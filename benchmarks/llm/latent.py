"""`python -m benchmarks.llm.latent`: prompts of a model with latent attention, beside transformers.

Random weights with the attention of DeepSeek V2 Lite in a few dense layers. CPU seconds of a prompt as a whole: by this
engine, by this engine with all queries attending to latents, as few queries do, and by transformers; medians, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from modelserver_backends.llm.attention import cpu_attention
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine, GenerationRequest
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampling_params import SamplingParams
from transformers import AutoModelForCausalLM, DeepseekV2Config

_NEVER = 1 << 30


def write_model(place: Path, num_layers: int) -> Path:
    config = DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_group=1,
        topk_group=1,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        vocab_size=1000,
        max_position_embeddings=16384,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    return place


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.latent", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    most = cpu_attention._MOST_QUERIES
    with tempfile.TemporaryDirectory() as root:
        place = write_model(Path(root) / "model", arguments.layers)
        options = EngineOptions(
            device="cpu",
            dtype="float32",
            max_num_seqs=1,
            max_model_len=max(arguments.tokens) + 8,
            max_num_batched_tokens=max(arguments.tokens),
            enable_prefix_caching=False,
            num_threads=arguments.threads,
        )
        with open_checkpoint(place) as checkpoint:
            engine = Engine(options=options, runner=load_runner(checkpoint, options, Sampler), tokenizer=None)
        reference = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)

        def ours(prompt: list[int], most_queries: int) -> None:
            cpu_attention._MOST_QUERIES = most_queries
            engine.compute(GenerationRequest(prompt, SamplingParams(max_tokens=1, temperature=0)))

        def theirs(prompt: list[int]) -> None:
            with torch.inference_mode():
                reference(torch.tensor([prompt]), logits_to_keep=1)

        print("| tokens | this engine | attending to latents | transformers | ratio |")
        print("|" + "---|" * 5)
        for count in arguments.tokens:
            prompt = [5 + token % 900 for token in range(count)]
            kinds: list[Callable[[], object]] = [
                lambda prompt=prompt: ours(prompt, most),  # type: ignore[misc]
                lambda prompt=prompt: ours(prompt, _NEVER),  # type: ignore[misc]
                lambda prompt=prompt: theirs(prompt),  # type: ignore[misc]
            ]
            times = [[cpu_seconds(kind) for kind in kinds] for _ in range(arguments.rounds + 1)][1:]
            medians = [statistics.median(each) for each in zip(*times, strict=True)]
            cells = [count, *(f"{each:.2f}" for each in medians), f"{medians[2] / medians[0]:.2f}x"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
