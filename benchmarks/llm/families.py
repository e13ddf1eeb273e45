"""`python -m benchmarks.llm.families [FAMILY ...]`: our engine beside transformers, by kinds of networks.

Random weights in float32, of one network for each kind: a mixture of experts, latent attention, layers that keep
states, and one that runs on transformers' own code. Figures are tokens per second of CPU time, as in
`benchmarks.llm.llama_cpp`; both run in one process, in turns, and of several rounds the best of each counts.
transformers generates in one batch, padded on the left and run to the longest output; what was asked for counts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.engine import Engine
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.runner import load_runner
from modelserver_backends.llm.sampler import Sampler

from benchmarks.llm.llama_cpp import CASES, Run, measure_cases
from benchmarks.llm.measure import run_engine

_COMMON: dict[str, Any] = {
    "vocab_size": 20_480,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
# By name: the type that transformers knows it by, and what differs from the common config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": ("qwen3_moe", {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "latent": (  # DeepSeek V2 Lite's attention
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": None,
            "first_k_dense_replace": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
        },
    ),
    "gated delta": (
        "qwen3_next",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 256,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
        },
    ),
    "mamba 2": (
        "bamba",
        {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "attn_layer_indices": [3]},
    ),
    "convolutions": (
        "lfm2",
        {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False},
    ),
    "fallback": ("starcoder2", {"intermediate_size": 2048, "use_bias": True}),
}


def write_model(place: Path, family: str) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model_type, values = FAMILIES[family]
    config = {name: value for name, value in (_COMMON | values).items() if value is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    for parameter in model.parameters():  # some networks begin with zeros
        if parameter.dim() == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(place)
    return place


def theirs(place: Path) -> Run:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def run(prompts: Sequence[list[int]], lengths: Sequence[int]) -> object:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            return model.generate(ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=False)

    return run


def measure(family: str, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as root:
        place = write_model(Path(root), family)
        options = EngineOptions(
            device="cpu", dtype="float32", max_num_seqs=8, max_model_len=2048, num_threads=arguments.threads
        )
        with open_checkpoint(place) as checkpoint:
            engine = Engine(options=options, runner=load_runner(checkpoint, options, Sampler), tokenizer=None)
        ways: list[Run] = [lambda prompts, lengths: run_engine(engine, prompts, lengths), theirs(place)]
        found: list[list[dict[str, float]]] = [[], []]
        for _ in range(arguments.rounds):
            for way, each in zip(ways, found, strict=True):
                each.append(measure_cases(way, CASES[:3]))
        engine.close()
    best = [{case: max(one[case] for one in each) for case in CASES[:3]} for each in found]
    cells = [f"{best[0][case]:.0f} / {best[1][case]:.0f} ({best[0][case] / best[1][case]:.2f}x)" for case in CASES[:3]]
    print("| " + " | ".join([f"{family} ({FAMILIES[family][0]})", *cells]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.families", description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| tokens per CPU second, ours / transformers | " + " | ".join(CASES[:3]) + " |\n|---" + "|--:" * 3 + "|")
    for family in arguments.families:
        measure(family, arguments)


if __name__ == "__main__":
    main()
