"""Train the small language model of model_repository/: `python -m training.language_model` (some 15 minutes on a core).

A Llama of two million parameters with a byte-level BPE tokenizer of its own; what it learns is in `conversations`.
Seeds are fixed: running it again on the same machine writes the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from training.conversations import conversations, prose

DIRECTORY = Path(__file__).parents[1] / "model_repository" / "tiny_chat" / "1"

VOCABULARY_LEN = 2048
BEGIN, END = "<|begin|>", "<|end|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles of this model are system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% if not (loop.last and continue_final_message) %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MAX_LEN = 1024

ROWS = 16
ROW_LEN = 256
PEAK_RATE = 4e-3
PROSE_SHARE = 0.2
SEED = 7


def make_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Bytes are the alphabet, so that any text can be written; digits stand alone."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LEN,
        special_tokens=[BEGIN, END, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def chat_text(messages: list[dict[str, str]]) -> str:
    """A conversation as the chat template writes it."""
    return BEGIN + "".join(f"<|{message['role']}|>{message['content']}{END}" for message in messages)


def rows_of(tokenizer: tokenizers.Tokenizer, generator: random.Random) -> Iterator[list[int]]:
    """Endlessly, token ids of whole texts one after the other, cut where a row is full: each begins with a text."""
    paragraphs = [tokenizer.encode(BEGIN + text + END, add_special_tokens=False).ids for text in prose()]
    while True:
        row: list[int] = []
        is_prose = generator.random() < PROSE_SHARE
        while len(row) <= ROW_LEN:
            if is_prose:
                row += generator.choice(paragraphs)
            else:
                [messages] = conversations(generator, 1)
                row += tokenizer.encode(chat_text(messages), add_special_tokens=False).ids
        yield row[: ROW_LEN + 1]


def make_model(tokenizer: tokenizers.Tokenizer) -> LlamaForCausalLM:
    end = tokenizer.token_to_id(END)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_LEN,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LEN,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.token_to_id(BEGIN),
            eos_token_id=end,
            pad_token_id=end,
        )
    )


def train(model: LlamaForCausalLM, rows: Iterator[list[int]], num_steps: int) -> None:
    """Train in place, the rate rising for a moment and then falling to nothing."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PEAK_RATE, total_steps=num_steps, pct_start=0.05, anneal_strategy="cos"
    )
    began_s = time.monotonic()
    losses: list[float] = []
    for step in range(num_steps):
        tokens = torch.tensor([next(rows) for _ in range(ROWS)])
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"step {step + 1:5} loss {sum(losses[-50:]) / 50:.3f} {time.monotonic() - began_s:.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """A checkpoint in the layout of Hugging Face."""
    directory.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def answer(model: LlamaForCausalLM, tokenizer: tokenizers.Tokenizer, question: str) -> str:
    """What the model says when it takes the likeliest token each time."""
    prompt = chat_text([{"role": "user", "content": question}]) + "<|assistant|>"
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    parser.add_argument("--steps", type=int, default=900)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    generator = random.Random(SEED)
    texts = prose() + [message["content"] for messages in conversations(generator, 4000) for message in messages]
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    train(model, rows_of(tokenizer, generator), arguments.steps)
    model.eval()
    for question in (
        "Hello",
        "What does str.strip do?",
        "What is len for?",
        "Explain the if statement.",
        "who are you?",
    ):
        print(f"{question}\n    {answer(model, tokenizer, question)}")
    save(model, tokenizer, arguments.directory)


if __name__ == "__main__":
    main()
