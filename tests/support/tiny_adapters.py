"""Random adapters of tiny checkpoints, made and saved by PEFT, and what it says of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.numpy import load_file
from support.gguf_models import converted


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT uses names of transformers that are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def write_adapter(base: Path, place: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """An adapter whose matrices are drawn wide enough to change texts, in the directory `place`."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with _quiet():
        adapted = peft.get_peft_model(model, peft.LoraConfig(**values))
    for name, parameter in adapted.named_parameters():
        if "lora_magnitude" in name:
            parameter.data = parameter.data * (1 + 0.3 * torch.randn(parameter.shape))
        elif "lora_" in name:
            parameter.data = (torch.randn(parameter.shape) * 0.25).to(dtype)
    with _quiet():
        adapted.save_pretrained(place)
    return place


def peft_tokens(base: Path, place: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of the base with an adapter."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with _quiet():
        adapted = peft.PeftModel.from_pretrained(model, place).float().eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            made = adapted.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(made[0, len(prompt) :].tolist())
    return found


def write_gguf_adapter(base: Path, place: Path, path: Path) -> Path:
    """A PEFT adapter of a Llama as llama.cpp's converter writes it."""
    config = json.loads((base / "config.json").read_text())
    adapter = json.loads((place / "adapter_config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(adapter["lora_alpha"]))
    for key, tensor in load_file(place / "adapter_model.safetensors").items():
        module, _, matrix = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if matrix == "lora_B":
            tensor = converted(config, "llama", module, tensor)
        writer.add_tensor(f"{names.get_name(module)}.weight.{matrix.lower()}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
