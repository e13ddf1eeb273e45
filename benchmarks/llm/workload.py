"""nano-vllm's workload, scaled to the machine: lengths of prompt and output uniform between two bounds, seed 0."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """`batch`: how many run at once, here and in the static batches of the peer."""

    num_requests: int
    shortest: int
    longest: int
    batch: int

    def prompts(self, vocab_size: int, seed: int = 0) -> list[list[int]]:
        """Another seed gives others of their kind, to warm up with: the prefix cache knows none of them."""
        draw = random.Random(seed)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.num_requests)]
        return [[draw.randrange(10, vocab_size) for _ in range(length)] for length in lengths]

    def output_lens(self) -> list[int]:
        draw = random.Random(1)
        return [draw.randint(self.shortest, self.longest) for _ in range(self.num_requests)]
