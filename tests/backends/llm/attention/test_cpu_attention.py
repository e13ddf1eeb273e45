"""The kernels in C attend as attention written out does, whatever the shapes, and refuse what is outside of memory."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from modelserver_backends.llm.attention import cpu_attention, twins
from modelserver_backends.llm.attention.choose import make_attention
from modelserver_backends.llm.attention.cpu_attention import CpuAttention
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvLayout, write_pages
from modelserver_backends.llm.attention.paged import AttentionBatch, AttentionSpec, Rotation
from modelserver_backends.llm.attention.sdpa import SdpaAttention
from modelserver_backends.llm.kernels import KERNELS

from modelserver.backend import UnsupportedError

CPU = torch.device("cpu")
COUNTS, LENS = np.array([1, 1, 1, 1, 5, 20, 30]), np.array([301, 63, 30, 9, 5, 41, 30])
NUM_TOKENS = int(COUNTS.sum())
WIDTHS = [] if KERNELS is None else KERNELS.widths()
CODES = [torch.int8, torch.float8_e4m3fn]
HEADS = [(4, 2), (3, 3), (6, 1), (12, 2)]
# Heads of whole vectors, of parts of one, and of both; blocks that hold a vector's tokens and such that do not.
SHAPES = list(zip([16, 12, 32, 40, 64, 80, 128, 6], [8, 4, 32, 16, 32, 5, 16, 1], itertools.cycle(HEADS)))


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    """Vectors of so many floats: what other processors do is tried on this one, too."""
    assert KERNELS is not None
    KERNELS.use(request.param)
    yield request.param
    KERNELS.use(WIDTHS[0])


class Step:
    """A step of decodes and chunks over blocks in any order, with keys and values of tokens before it."""

    def __init__(
        self,
        head_dim: int,
        block_size: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        codes: torch.dtype | None = None,
        shared_width: int = 0,
    ) -> None:
        """`shared_width`: keys hold the values, as latent attention has them."""
        torch.manual_seed(0)
        per_row = -(-int(LENS.max()) // block_size)
        num_blocks = len(LENS) * per_row + 1
        shape = KvLayout.uniform(num_layers=1, num_kv_heads=heads[1], head_dim=head_dim, dtype=dtype)
        if shared_width:
            shape = KvLayout((replace(shape.group, value_width=0, shared_width=shared_width),))
        shape = shape if codes is None else shape.coded(codes)
        self.blocks = KvBlocks(shape, num_blocks=num_blocks, block_size=block_size, device=CPU)
        if codes is None:
            self.blocks.layers[0].normal_()
        else:
            cells = torch.arange(num_blocks * 2 * heads[1] * block_size)
            write_pages(self.blocks.pages, cells, torch.randn(len(cells), head_dim), shape.group)
        self.tables = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).reshape(len(LENS), per_row)
        places = [
            (row, at)
            for row, (count, length) in enumerate(zip(COUNTS, LENS, strict=True))
            for at in range(length - count, length)
        ]
        self.slots = np.array([self.tables[row, at // block_size] * block_size + at % block_size for row, at in places])
        num_kept = shape.group.num_parts * heads[1]
        self.heads = torch.randn(NUM_TOKENS, heads[0] + num_kept, head_dim).to(dtype)
        self.batch = AttentionBatch(4, COUNTS, LENS, self.tables, self.slots)

    def expected(self, spec: AttentionSpec, rotation: Rotation | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and what is kept of all slots, computed by the twins in float32."""
        group = self.blocks.layout.group
        heads = self.heads.clone().float()
        if rotation is not None:
            turned = heads[:, : spec.num_heads + group.num_heads]
            Rotation(rotation.cosines.float(), rotation.sines.float()).apply_rope(turned)
        heads = heads.to(self.heads.dtype)
        reference = SdpaAttention(self.blocks, spec)
        kept = reference.kept(0)
        kept[torch.from_numpy(self.slots)] = reference.as_kept(
            heads[:, spec.num_heads :].unflatten(1, (group.num_parts, group.num_heads))
        )
        output = twins.prefill_attention(
            heads[:, : spec.num_heads],
            kept.unflatten(0, (self.blocks.num_blocks, self.blocks.block_size)),
            torch.from_numpy(self.tables),
            torch.from_numpy(LENS),
            num_queries=torch.from_numpy(COUNTS),
            scale=spec.scale,
            window=spec.windows[0],
            softcap=spec.softcap,
            sinks=spec.sinks_of(0),
            shared_width=group.shared_width or None,
        )
        return output, kept


def rotation_of(dtype: torch.dtype, rotated: int) -> Rotation:
    angles = torch.rand(NUM_TOKENS, 1, rotated) * 6
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


if KERNELS is not None:

    @pytest.mark.parametrize(("head_dim", "block_size", "heads"), SHAPES)
    @pytest.mark.parametrize(
        ("window", "softcap", "sink_size"), [(None, None, 0), (7, None, 0), (40, 3.0, 0), (None, None, 3), (7, 3.0, 30)]
    )
    def test_a_mixed_step(
        width: int,
        head_dim: int,
        block_size: int,
        heads: tuple[int, int],
        window: int | None,
        softcap: float | None,
        sink_size: int,
    ) -> None:
        step = Step(head_dim, block_size, heads, torch.float32)
        sinks = torch.randn(heads[0]) * sink_size if sink_size else None
        spec = AttentionSpec(num_heads=heads[0], windows=(window,), scale=0.3, softcap=softcap, sinks=(sinks,))
        rotation = rotation_of(torch.float32, head_dim // 2 // 2 * 2)
        expected, kept = step.expected(spec, rotation)
        attention = CpuAttention(KERNELS, step.blocks, spec)
        found = attention.rope_and_attend(0, step.heads, rotation, attention.prepare(step.batch))
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)
        torch.testing.assert_close(SdpaAttention(step.blocks, spec).kept(0), kept, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *CODES], ids=str)
    @pytest.mark.parametrize(("head_dim", "block_size", "heads"), [SHAPES[2], SHAPES[4], SHAPES[5], (128, 16, (3, 3))])
    def test_a_token_has_the_same_bits_in_any_chunk(
        width: int, head_dim: int, block_size: int, heads: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """Whatever shares the keys that are read for it, and through a window whose beginning moves."""
        codes = dtype if dtype in CODES else None
        step = Step(head_dim, block_size, heads, torch.float32 if codes else dtype, codes)
        threads = torch.get_num_threads()
        try:
            for window, sinks in ((None, torch.randn(heads[0])), (7, None), (40, None)):
                spec = AttentionSpec(num_heads=heads[0], windows=(window,), scale=0.3, sinks=(sinks,))
                attention, found = CpuAttention(KERNELS, step.blocks, spec), []
                for torch_threads in (1, 5):
                    torch.set_num_threads(torch_threads)
                    found.append(attention.rope_and_attend(0, step.heads, None, attention.prepare(step.batch)))
                alone = []
                for token, slot in enumerate(step.slots):
                    row = int((COUNTS.cumsum() <= token).sum())
                    length = LENS[row] - COUNTS[: row + 1].sum() + token + 1
                    batch = AttentionBatch(
                        1, np.array([1]), np.array([length]), step.tables[row : row + 1], np.array([slot])
                    )
                    one = attention.prepare(batch)
                    alone.append(attention.rope_and_attend(0, step.heads[token : token + 1].clone(), None, one))
                assert torch.equal(found[0], torch.cat(alone))
                assert torch.equal(*found)
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize(("head_dim", "block_size", "heads"), SHAPES[1:6])
    def test_half_precision(width: int, head_dim: int, block_size: int, heads: tuple[int, int]) -> None:
        step = Step(head_dim, block_size, heads, torch.bfloat16)
        spec = AttentionSpec(num_heads=heads[0], windows=(None,), scale=0.3, sinks=(torch.randn(heads[0]),))
        rotation = rotation_of(torch.bfloat16, head_dim)
        expected, kept = step.expected(spec, rotation)
        attention = CpuAttention(KERNELS, step.blocks, spec)
        found = attention.rope_and_attend(0, step.heads, rotation, attention.prepare(step.batch))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(SdpaAttention(step.blocks, spec).kept(0), kept, atol=2e-2, rtol=2e-2)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("head_dim", "shared_width", "block_size", "heads"),
        [(32, 24, 8, (4, 1)), (20, 14, 5, (7, 1)), (576, 512, 16, (6, 1)), (40, 40, 32, (2, 1))],
    )
    def test_values_within_the_keys(
        width: int,
        head_dim: int,
        shared_width: int,
        block_size: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Latent attention, by the kernels, by SDPA, and by both in one step."""
        tolerance = 5e-5 if dtype == torch.float32 else 3e-2
        spec = AttentionSpec(num_heads=heads[0], windows=(None,), scale=0.3 * 32**0.5 / head_dim**0.5)
        for most_queries, kind in ((512, CpuAttention), (4, CpuAttention), (0, SdpaAttention)):
            monkeypatch.setattr(cpu_attention, "_MOST_QUERIES", most_queries)
            step = Step(head_dim, block_size, heads, dtype, shared_width=shared_width)
            rotation = rotation_of(dtype, head_dim - shared_width)
            expected, kept = step.expected(spec, rotation)
            attention = kind(KERNELS, step.blocks, spec) if kind is CpuAttention else kind(step.blocks, spec)
            found = attention.rope_and_attend(0, step.heads, rotation, attention.prepare(step.batch))
            assert found.shape == (NUM_TOKENS, heads[0] * shared_width)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(SdpaAttention(step.blocks, spec).kept(0), kept, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("codes", CODES)
    @pytest.mark.parametrize(("head_dim", "block_size", "heads"), [SHAPES[1], *SHAPES[4:7]])
    def test_codes_are_read_as_what_they_stand_for(
        width: int, head_dim: int, block_size: int, heads: tuple[int, int], codes: torch.dtype
    ) -> None:
        for dtype, window, tolerance in (
            (torch.float32, None, 3e-5),
            (torch.float32, 40, 3e-5),
            (torch.bfloat16, 7, 5e-2),
        ):
            step = Step(head_dim, block_size, heads, dtype, codes)
            spec = AttentionSpec(num_heads=heads[0], windows=(window,), scale=0.3, sinks=(torch.randn(heads[0]),))
            expected, kept = step.expected(spec, None)
            attention = CpuAttention(KERNELS, step.blocks, spec)
            found = attention.rope_and_attend(0, step.heads, None, attention.prepare(step.batch))
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
            assert torch.equal(SdpaAttention(step.blocks, spec).kept(0), kept)

    @pytest.mark.parametrize("codes", CODES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_kernels_write_the_codes_of_their_twin_bit_for_bit(
        width: int, codes: torch.dtype, dtype: torch.dtype
    ) -> None:
        spec = AttentionSpec(num_heads=2, windows=(None,), scale=0.3)
        pieces = []
        for kind in (CpuAttention, SdpaAttention):
            step = Step(20, 8, (2, 1), dtype, codes)
            heads = step.heads
            heads[:30] *= torch.logspace(-44, 30, 30)[:, None, None]  # from subnormal numbers on
            heads[30] = 0
            heads[31] = torch.arange(-10, 10) / 10  # in steps between two codes
            heads[32] = torch.tensor([127, 448, *(x / 2 for x in range(18))])  # in the middle of two codes
            heads[33] = torch.tensor([448, -(2.0**-6), *(x * 2.0**-10 for x in range(18))])
            attention = kind(KERNELS, step.blocks, spec) if kind is CpuAttention else kind(step.blocks, spec)
            attention.rope_and_attend(0, heads, None, attention.prepare(step.batch))
            pieces.append(step.blocks.pages.clone())
        assert torch.equal(*pieces)

    @pytest.mark.parametrize("codes", CODES)
    def test_a_fresh_prompt_attends_to_what_later_steps_find_of_it(codes: torch.dtype) -> None:
        step = Step(16, 8, (4, 2), torch.float32, codes)
        spec = AttentionSpec(num_heads=4, windows=(None,), scale=0.3)
        expected, _ = step.expected(spec, None)
        for attention in (CpuAttention(KERNELS, step.blocks, spec), SdpaAttention(step.blocks, spec)):
            found = attention.rope_and_attend(0, step.heads.clone(), None, attention.prepare(step.batch))
            torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)

    def test_threads_share_a_step() -> None:
        step = Step(64, 16, (12, 2), torch.float32)
        spec = AttentionSpec(num_heads=12, windows=(None,), scale=0.1)
        attention = CpuAttention(KERNELS, step.blocks, spec)
        found = []
        before = torch.get_num_threads()
        try:
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                found.append(attention.rope_and_attend(0, step.heads, None, attention.prepare(step.batch)))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(*found)

    @pytest.mark.parametrize(
        ("name", "at", "value", "problem"),
        [
            ("block_tables", (0, 0), 10**6, "a block that does not exist"),
            ("block_tables", (0, 0), -1, "a block that does not exist"),
            ("lens", 0, 10**9, "longer than its table"),
            ("lens", 6, 3, "do not fit"),
            ("num_queries", 0, 0, "do not fit"),
            ("num_queries", 0, 2**62, "do not fit"),
            ("slots", 0, -1, "outside of the blocks"),
            ("slots", 9, 10**6, "outside of the blocks"),
        ],
    )
    def test_what_lies_outside_of_memory_is_refused(name: str, at: object, value: int, problem: str) -> None:
        step = Step(16, 8, (4, 2), torch.float32)
        attention = CpuAttention(KERNELS, step.blocks, AttentionSpec(num_heads=4, windows=(None,), scale=0.3))
        parts = {field: getattr(step.batch, field).copy() for field in ("num_queries", "lens", "block_tables", "slots")}
        parts[name][at] = value
        with pytest.raises(ValueError, match=problem):
            attention.prepare(AttentionBatch(4, **parts))

    def test_a_plan_is_only_what_plan_has_made_of_this_geometry() -> None:
        step = Step(16, 8, (4, 2), torch.float32)
        attention = CpuAttention(KERNELS, step.blocks, AttentionSpec(num_heads=4, windows=(None,), scale=0.3))
        plan = attention.prepare(step.batch).plan
        others = struct.pack("9q2d", 4, 2, 16, 8, 2, 0, 0, 1 << 20, 0, 0.3, 0.0)
        addresses = (0,) * 8
        bad_coding = struct.pack("9q2d", 4, 2, 16, 8, step.blocks.num_blocks, 0, 3, 1 << 20, 0, 0.3, 0.0)
        for geometry, made in (
            (others, plan),
            (others, b""),
            (others[:-1], plan),
            (bytes(88), plan),
            (bad_coding, plan),
        ):
            with pytest.raises(ValueError, match="geometry"):
                KERNELS.attend(geometry, made, *addresses)
        with pytest.raises(TypeError):
            KERNELS.attend(others, plan)
        with pytest.raises(ValueError, match="int64"):
            KERNELS.plan(others, step.batch.lens.astype(np.int32), LENS, step.tables, step.slots, 1, 1)
        for heads in (step.heads[:, 1:].contiguous(), step.heads[1:]):
            with pytest.raises(AssertionError, match="heads of a step"):
                attention.rope_and_attend(0, heads, None, attention.prepare(step.batch))

    def test_it_is_chosen_where_it_can_be() -> None:
        spec = AttentionSpec(num_heads=4, windows=(None,), scale=0.3)

        def chosen(name: str, head_dim: int, dtype: torch.dtype) -> type:
            shape = KvLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
            return type(make_attention(name, KvBlocks(shape, num_blocks=2, block_size=4, device=CPU), spec))

        assert chosen("auto", 16, torch.float32) is chosen("cpu", 16, torch.bfloat16) is CpuAttention
        assert chosen("auto", 16, torch.float16) is chosen("auto", 1024, torch.float32) is SdpaAttention
        with pytest.raises(UnsupportedError, match="attention_backend cpu needs"):
            chosen("cpu", 16, torch.float16)
