"""A language model that does what its prompt says, written as a Python model; and directories of it.

Its tokens are words with the space before them. It repeats its prompt (of a conversation, the last message), a token at
a time. A prompt that begins with `do: ` and a JSON object is a script instead:

    text        what to say, cut into tokens of `cut` characters where that is given
    finish      the reason to give at the end, "stop" if none
    mark        a last token that is not a part of the text, such as the mark of the end
    error       how many tokens to say before the request fails
    hang        how many tokens to say before it waits until it is cancelled; `num_cancelled` says how often that was
    endless     the tokens never end, until it is cancelled
    report      say, as JSON, which inputs came

A message of the user in which `do turns: ` and an array of scripts stand is a script of a whole session: the model does
the next one each time that it is asked again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

INPUTS = {
    "text_input": "STRING",
    "messages": "STRING",
    "input_ids": "INT32",
    "stream": "BOOL",
    "sampling_parameters": "STRING",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_token_ids": "BOOL",
    "return_num_cached_tokens": "BOOL",
    "return_prompt_logprobs": "BOOL",
    "operation": "STRING",
    "add_special_tokens": "BOOL",
    "dimensions": "INT32",
}
OUTPUTS = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "stop_reason": "STRING",
    "cumulative_logprob": "FP32",
    "logprobs": "STRING",
    "prompt_logprobs": "STRING",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "num_cached_tokens": "UINT32",
    "token_ids": "INT32",
    "choice_token_ids": "STRING",
    "index": "INT32",
    "token_strs": "STRING",
    "max_model_len": "UINT32",
    "embedding": "FP32",
}
# The least that makes a language model.
PLAIN_INPUTS, PLAIN_OUTPUTS = ("text_input",), ("text_output",)

SOURCE = """
import asyncio
import json
import re

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
WORD = re.compile(r"\\s*\\S+|\\s+")
MAX_MODEL_LEN = 512


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.inputs = {each["name"] for each in config["input"]}
        self.outputs = {each["name"]: each["data_type"] for each in config["output"]}
        self.vocabulary = ["<none>"]
        self.num_cancelled = 0

    async def execute(self, requests):
        await asyncio.gather(*map(self.serve, requests))

    async def serve(self, request):
        sender = request.get_response_sender()
        try:
            await Run(self, request, sender).run()
        except Refused as refusal:
            error = pb_utils.TritonError(str(refusal), pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=error), FINAL)
        except Broken as broken:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(broken))), FINAL)
        except Left:
            self.num_cancelled += 1
            sender.send(flags=FINAL)

    def ids(self, tokens):
        for token in tokens:
            if token not in self.vocabulary:
                self.vocabulary.append(token)
        return [self.vocabulary.index(token) for token in tokens]


class Refused(Exception):
    pass


class Broken(Exception):
    pass


class Left(Exception):
    pass


def words(text):
    return WORD.findall(text)


class Run:
    def __init__(self, model, request, sender):
        self.model, self.request, self.sender = model, request, sender
        self.given = {tensor.name(): self.read(tensor) for tensor in request.inputs()}
        self.parameters = json.loads(self.given.get("sampling_parameters", "{}"))

    @staticmethod
    def read(tensor):
        values = tensor.as_numpy().reshape(-1).tolist()
        if tensor.name() == "input_ids":
            return values
        return values[0].decode() if isinstance(values[0], bytes) else values[0]

    def send(self, columns, flags=0):
        tensors = []
        for name, values in columns.items():
            kind = self.model.outputs.get(name)
            if kind is None:
                continue
            dtype = np.object_ if kind == "TYPE_STRING" else pb_utils.triton_string_to_numpy(kind)
            if kind == "TYPE_STRING":
                values = [value.encode() for value in values]
            tensors.append(pb_utils.Tensor(name, np.array(values, dtype)))
        self.sender.send(pb_utils.InferenceResponse(tensors), flags)

    async def run(self):
        operation = self.given.get("operation", "generate" if "text_output" in self.model.outputs else "embed")
        if operation not in ("generate", "embed", "tokenize", "detokenize"):
            raise Refused(f"input 'operation': expected generate, embed, tokenize or detokenize, got '{operation}'")
        await getattr(self, operation)()

    def prompt(self):
        if "messages" in self.given:
            return self.last_words(json.loads(self.given["messages"])["messages"])
        if "input_ids" in self.given:
            unknown = [each for each in self.given["input_ids"] if each >= len(self.model.vocabulary)]
            if unknown:
                raise Refused(f"token id {unknown[0]} is not in the vocabulary of {len(self.model.vocabulary)}")
            return "".join(self.model.vocabulary[each] for each in self.given["input_ids"])
        return self.given["text_input"]

    @staticmethod
    def last_words(messages):
        for place, message in enumerate(messages):
            content = message.get("content") or ""
            text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            if message["role"] == "user" and "do turns: " in text:
                turns, _ = json.JSONDecoder().raw_decode(text.split("do turns: ", 1)[1])
                done = sum(each["role"] == "assistant" for each in messages[place + 1 :])
                return "do: " + json.dumps(turns[min(done, len(turns) - 1)])
        return messages[-1]["content"]

    async def tokenize(self):
        tokens = words(self.prompt())
        ids = self.model.ids(tokens)
        self.send({"token_ids": ids, "token_strs": tokens, "max_model_len": [MAX_MODEL_LEN]}, FINAL)

    async def detokenize(self):
        self.send({"text_output": [self.prompt()]}, FINAL)

    async def embed(self):
        size = self.given.get("dimensions", 4)
        tokens = words(self.prompt())
        vector = [float(len(tokens) + at) / 8 for at in range(size)]
        self.send({"embedding": vector, "num_input_tokens": [len(tokens)]}, FINAL)

    async def generate(self):
        prompt = self.prompt()
        script = json.loads(prompt[4:]) if prompt.startswith("do: ") else {"text": prompt}
        if script.get("report"):
            more = {"sampling_parameters": self.parameters, "parameters": json.loads(self.request.parameters() or "{}")}
            script["text"] = json.dumps({**self.given, **more}, sort_keys=True)
        self.num_inputs = len(words(prompt))
        if self.num_inputs > MAX_MODEL_LEN:
            raise Refused(f"the prompt has {self.num_inputs} tokens, the model takes at most {MAX_MODEL_LEN}")
        if script.get("refuse"):
            raise Refused(script["refuse"])
        choices = [self.choice(script, number) for number in range(self.parameters.get("n", 1))]
        if self.given.get("stream"):
            await self.stream(script, choices)
        else:
            await self.answer(script, choices)

    def choice(self, script, number):
        text = script["text"] if not number or script.get("same") else f"{number}: {script['text']}"
        cut = script.get("cut")
        tokens = [text[at : at + cut] for at in range(0, len(text), cut)] if cut else words(text)
        reason, stop_reason = script.get("finish", "stop"), script.get("stop_reason")
        for stop in self.parameters.get("stop", []):
            if stop in text and not script.get("report"):
                tokens, stop_reason = words(text[: text.index(stop)]), stop
        most = self.parameters.get("max_tokens")
        if most is not None and len(tokens) > most:
            tokens, reason = tokens[:most], "length"
        return Choice(self, tokens, reason, stop_reason, script.get("mark"))

    async def pause(self, script, at):
        if at == script.get("error"):
            raise Broken("the model broke")
        if at == script.get("hang"):
            while not self.request.is_cancelled():
                await asyncio.sleep(0.005)
        await asyncio.sleep(script.get("pause", 0))
        if at % 16 == 0 and self.request.is_cancelled():
            raise Left
        if at == script.get("hang"):
            raise Left

    async def stream(self, script, choices):
        if script.get("endless"):
            at = 0
            while True:
                await self.pause(script, at)
                self.send(self.columns([0], [choices[0].endless(at)]))
                at += 1
        for at in range(max(len(choice.tokens) for choice in choices) or 1):
            await self.pause(script, at)
            for number, choice in enumerate(choices):
                if at < max(1, len(choice.tokens)):
                    self.send(self.columns([number], [choice.delta(at)], is_first=at == 0 and number == 0))
        await self.pause(script, -1)
        self.sender.send(flags=FINAL)

    async def answer(self, script, choices):
        for at in range(max(len(choice.tokens) for choice in choices) or 1):
            await self.pause(script, at)
        self.send(self.columns(range(len(choices)), [choice.whole() for choice in choices], is_first=True), FINAL)

    def columns(self, numbers, deltas, is_first=False):
        names = deltas[0].keys()
        columns = {name: [delta[name] for delta in deltas] for name in names}
        columns["index"] = list(numbers)
        ids = columns.pop("ids")
        given = self.given
        if given.get("return_token_ids"):
            if len(ids) == 1:
                columns["token_ids"] = ids[0]
            else:
                columns["choice_token_ids"] = [json.dumps(ids)]
        if given.get("return_num_input_tokens"):
            columns["num_input_tokens"] = [self.num_inputs] * len(ids)
        if given.get("return_num_cached_tokens"):
            columns["num_cached_tokens"] = [self.num_inputs // 2] * len(ids)
        for name in ("finish_reason", "num_output_tokens", "cumulative_logprob", "logprobs"):
            if not given.get("return_" + name):
                columns.pop(name)
        if given.get("return_prompt_logprobs") and is_first:
            tokens = words(self.prompt())
            entries = [None, *(self.entry(token, at + 1) for at, token in enumerate(tokens[1:]))]
            columns["prompt_logprobs"] = [json.dumps(entries)] * len(ids)
        return columns

    def entry(self, token, at):
        number = self.parameters.get("logprobs") or self.parameters.get("prompt_logprobs") or 0
        top = [(token, -0.5 - at), *((f" other{rank}", -1.0 - at - rank) for rank in range(number - 1))][:number]
        entry = [
            {"token_id": self.model.ids([name])[0], "token": name, "bytes": list(name.encode()), "logprob": value}
            for name, value in [(token, -0.5 - at), *top]
        ]
        return {**entry[0], "rank": 1, "top": entry[1:]}


class Choice:
    def __init__(self, run, tokens, reason, stop_reason, mark=None):
        self.run, self.tokens, self.reason, self.stop_reason, self.mark = run, tokens, reason, stop_reason, mark

    def delta(self, at):
        return self.part(at, min(at + 1, len(self.tokens)), at + 1 >= len(self.tokens))

    def whole(self):
        return self.part(0, len(self.tokens), True)

    def endless(self, at):
        self.tokens = self.tokens or ["word"]
        return self.part(0, 1, False)

    def part(self, begin, end, is_last):
        tokens = self.tokens[begin:end]
        text = "".join(tokens)
        if is_last and self.mark:
            tokens = [*tokens, self.mark]
        return {
            "text_output": text,
            "finish_reason": self.reason if is_last else "None",
            "stop_reason": json.dumps(self.stop_reason if is_last else None),
            "num_output_tokens": len(tokens),
            "cumulative_logprob": -0.5 * end + len("".join(self.tokens)) / 1000,
            "logprobs": json.dumps([self.run.entry(token, begin + at) for at, token in enumerate(tokens)]),
            "ids": self.run.model.ids(tokens),
        }
"""


def say(**script: object) -> str:
    """A prompt that is a script."""
    return "do: " + json.dumps(script)


def say_in_turns(*turns: Mapping[str, object]) -> str:
    """A prompt that is a script of a session."""
    return "do turns: " + json.dumps(turns)


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def write_mock_llm(
    root: Path,
    name: str,
    *,
    parameters: Mapping[str, str] | None = None,
    inputs: tuple[str, ...] = tuple(INPUTS),
    outputs: tuple[str, ...] = tuple(OUTPUTS),
    more: str = "",
) -> Path:
    """A model of that name in `root`, with some of the tensors, and parameters of its config."""
    lines = ['backend: "python"', "model_transaction_policy { decoupled: true }", more]
    for tensor in inputs:
        dims = -1 if tensor == "input_ids" else 1
        optional = " optional: true" if len(inputs) > 1 else ""
        lines.append(f'input {{ name: "{tensor}" data_type: TYPE_{INPUTS[tensor]} dims: [ {dims} ]{optional} }}')
    lines += [f'output {{ name: "{tensor}" data_type: TYPE_{OUTPUTS[tensor]} dims: [ -1 ] }}' for tensor in outputs]
    for key, value in (parameters or {}).items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    directory = root / name
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text("\n".join(lines) + "\n")
    (directory / "1" / "model.py").write_text(SOURCE)
    return directory
