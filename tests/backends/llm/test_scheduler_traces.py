"""The scheduler driven by traces: a command, then what it is expected to print, then an empty line."""

from __future__ import annotations

from pathlib import Path

import pytest
from modelserver_backends.llm.blocks import BlockPool
from modelserver_backends.llm.kv_cache import KvManager
from modelserver_backends.llm.plan import SampledToken, StepPlan
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.scheduler import Scheduler
from modelserver_backends.llm.sequence import Sequence
from support.llm_integrity import check_integrity

TRACES = sorted((Path(__file__).parent / "scheduler_traces").glob("*.txt"))


class Trace:
    """One scheduler. Its tokens are numbers that name sequence and position, so that none are equal by chance."""

    def __init__(self) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.pending: list[StepPlan] = []

    def run(self, command: str) -> str:
        verb, *words = command.split()
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=") for word in words if "=" in word)
        lines = getattr(self, verb)(*names, **options) or []
        check_integrity(self.scheduler)
        return "\n".join(lines) or "ok"

    def config(self, blocks: str, size: str = "4", policy: str = "fcfs", **options: str) -> None:
        """`blocks` without the null block; `seqs`, `budget`, `caching`, `chunked`, `window`."""
        pool = BlockPool(int(blocks) + 1)
        window = int(options["window"]) if "window" in options else None
        is_caching = options.get("caching", "yes") == "yes"
        budget = int(options.get("budget", "64"))
        is_chunked = options.get("chunked", "yes") == "yes"
        self.kv = KvManager(
            pool,
            int(size),
            is_prefix_caching=is_caching,
            window=window,
            chunk_len=budget if is_chunked else None,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=int(options.get("seqs", "4")),
            max_num_batched_tokens=budget,
            is_by_priority=policy == "priority",
            is_chunked=is_chunked,
        )

    def add(self, name: str, prompt: str, **options: str) -> None:
        """`like=NAME:COUNT`: begins with that sequence's tokens; `of=NAME`: another choice of its request."""
        number = len(self.sequences)
        tokens = [1000 * (number + 1) + position for position in range(int(prompt))]
        if "like" in options:
            other, _, count = options["like"].partition(":")
            tokens[: int(count)] = self.sequences[other].token_ids[: int(count)]
        source = self.sequences.get(options.get("of", ""))
        if source is not None:
            tokens = source.token_ids[: source.num_prompt_tokens]
        sequence = Sequence(
            seq_id=number,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            params=SamplingParams(prompt_logprobs=0 if "prompt_logprobs" in options else None),
            arrival=number,
            priority=int(options.get("priority", "0")),
            cache_salt=options.get("salt", ""),
            max_num_tokens=len(tokens) + int(options["max"]) if "max" in options else self.kv.most_tokens(1000),
            is_host_bound="host_bound" in options,
            source=source,
        )
        self.sequences[name] = sequence
        self.scheduler.add(sequence)

    def plan(self) -> list[str]:
        plan = self.scheduler.plan()
        self.pending.append(plan)
        lines = [f"{self._name(sequence)} preempted" for sequence in plan.preempted]
        for chunk in plan.chunks:
            admitted = " admitted" if chunk.sequence in plan.admitted else ""
            sampled = " sampled" if chunk.num_sampled else ""
            end = chunk.start + chunk.num_tokens
            lines.append(f"{self._name(chunk.sequence)} [{chunk.start}:{end}]{sampled}{admitted}")
        return lines or ["nothing"]

    def update(self) -> list[str]:
        """Take in the oldest plan; sequences that had ended are named."""
        plan = self.pending.pop(0)
        chunks = [chunk for chunk in plan.chunks if chunk.num_sampled]
        sampled = [(SampledToken(-1 - chunk.sequence.seq_id * 1000 - chunk.start),) for chunk in chunks]
        grown = self.scheduler.update(plan, sampled)
        return [
            f"{self._name(chunk.sequence)} had ended"
            for chunk, after in zip(chunks, grown, strict=True)
            if after is None
        ]

    def step(self, times: str = "1") -> list[str]:
        """Plans that are updated at once; the lines of the last."""
        lines: list[str] = []
        for _ in range(int(times)):
            lines = self.plan()
            lines += self.update()
        return lines

    def finish(self, name: str) -> None:
        self.scheduler.finish(self.sequences[name])

    def blocks(self, *names: str) -> list[str]:
        """Block tables, or without names the free blocks in the order in which they would be allocated."""
        if not names:
            return ["free " + " ".join(map(str, self.kv.pool.free_order()))]
        return [f"{name}: " + (" ".join(map(str, self.sequences[name].block_ids)) or "none") for name in names]

    def status(self) -> list[str]:
        kv, scheduler = self.kv, self.scheduler
        return [
            f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, {kv.pool.num_free} blocks free, "
            f"{kv.num_hit_tokens} of {kv.num_query_tokens} tokens hit, {scheduler.num_preemptions} preemptions"
        ]

    def _name(self, sequence: Sequence) -> str:
        return next(name for name, known in self.sequences.items() if known is sequence)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    trace = Trace()
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for block in filter(None, (block.strip() for block in text.split("\n\n"))):
        command, _, expected = block.partition("\n")
        assert trace.run(command) == expected, f"after: {command}"
