"""The kernels of packed weights, on every set of instructions that this processor has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from modelserver_backends.llm.extend import quantized_linear
from modelserver_backends.llm.kernels import PACKED_KERNELS
from modelserver_backends.llm.models.linear import ListedLinears
from modelserver_backends.llm.models.packed_matrix import (
    Form,
    PackedExperts,
    PackedMatrixEmbedding,
    PackedMatrixLinear,
    SideBySide,
    grouped_linears,
    pack_codes,
    pack_floats,
    padded_width,
)
from modelserver_backends.llm.quantization.packing import join_packed, pack
from modelserver_backends.llm.quantization.quantized_weight import QuantizedWeight

from .test_quantized_weight import KINDS, made

CODE_KINDS = [kind for kind in KINDS if kind != "float 8"]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


# (byte of a step, bits of a code there, place of the lowest of these in the code and in the byte)
Place = tuple[int, int, int, int]
# How many inputs a step has, and where the bits of those groups of four inputs are that have no byte of their own.
SHARED_BYTES: dict[Form, tuple[int, Sequence[Sequence[Place]]]] = {
    Form.CODES5: (
        32,
        (
            ((0, 3, 0, 5), (1, 2, 3, 6)),
            ((2, 3, 0, 5), (3, 2, 3, 6)),
            ((4, 3, 0, 5), (1, 1, 3, 5), (3, 1, 4, 5)),
        ),
    ),
    Form.CODES6: (16, (((0, 2, 0, 6), (1, 2, 2, 6), (2, 2, 4, 6)),)),
}


def packed_codes(codes: torch.Tensor, form: Form, lanes: int) -> torch.Tensor:
    """What the kernels read, uint8 [blocks, bytes]: in torch, as `pack_codes` says it."""
    width = padded_width(codes.shape[1], form)
    codes = functional.pad(
        codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.dtype.itemsize]), (0, width - codes.shape[1])
    )
    blocked = functional.pad(codes, (0, 0, 0, -codes.shape[0] % lanes)).unflatten(0, (-1, lanes))
    if form in (Form.F16, Form.FLOAT8, Form.F32):
        ordered = blocked.transpose(1, 2)
    elif form is Form.BF16:
        ordered = blocked.unflatten(2, (-1, 2)).transpose(1, 2)
    elif form is Form.CODES8:
        ordered = blocked.unflatten(2, (-1, 4)).transpose(1, 2)
    elif form in SHARED_BYTES:
        ordered = shared_bytes(blocked, *SHARED_BYTES[form]).transpose(1, 2)
    else:
        halves = blocked.unflatten(2, (-1, 2, 4))
        ordered = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(1, 2)
    return ordered.contiguous().view(torch.uint8).flatten(1)


def shared_bytes(codes: torch.Tensor, step: int, groups: Sequence[Sequence[Place]]) -> torch.Tensor:
    """[blocks, lanes, inputs] -> [blocks, lanes, bytes / 4, 4]; `groups` says where the last of a step's are."""
    parts = codes.unflatten(2, (-1, step // 4, 4))
    num_bytes = step // 4 - len(groups)
    packed = parts[:, :, :, :num_bytes].clone()
    for number, places in enumerate(groups, num_bytes):
        for at, count, lowest, place in places:
            packed[:, :, :, at] |= (parts[:, :, :, number] >> lowest & (1 << count) - 1) << place
    return packed.flatten(2, 3)


def quantized_rows(rows: torch.Tensor) -> torch.Tensor:
    """What the kernels make of rows before they multiply them by codes: 8 bits, with a scale for each 32, as floats."""
    width = rows.shape[1]
    parts = functional.pad(rows, (0, -width % 32)).unflatten(1, (-1, 32))
    largest = parts.abs().amax(dim=2, keepdim=True)
    codes = (parts * torch.where(largest > 0, 127 / largest, 0.0)).round()
    return (codes.double() * (largest / 127).double()).flatten(1)[:, :width]


def linear_of(weight: QuantizedWeight | torch.Tensor, bias: torch.Tensor | None = None) -> PackedMatrixLinear:
    assert PACKED_KERNELS is not None
    floats = isinstance(weight, torch.Tensor)
    matrix = pack_floats(weight, PACKED_KERNELS) if floats else pack(weight, PACKED_KERNELS)
    assert matrix is not None
    return PackedMatrixLinear(matrix, bias)


def ordered(rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Rows that are quantized in the order of the codes, in their own again."""
    if weight.order is None:
        return quantized_rows(rows)
    back = torch.empty_like(rows, dtype=torch.float64)
    back[:, weight.order] = quantized_rows(rows[:, weight.order])
    return back


if PACKED_KERNELS is not None:
    INSTRUCTIONS = PACKED_KERNELS.instructions()

    @pytest.fixture(params=INSTRUCTIONS)
    def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
        PACKED_KERNELS.use(request.param)
        yield request.param
        PACKED_KERNELS.use(INSTRUCTIONS[0])

    @pytest.mark.parametrize("kind", CODE_KINDS)
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (13, 512), (70, 4352)])
    def test_products_of_codes(instructions: str, kind: str, outputs: int, inputs: int) -> None:
        """In float64 of the same quantized rows; of the floats themselves within one in a hundred."""
        generator = torch.Generator().manual_seed(0)
        weight = made(kind, outputs, inputs)
        bias, rows = torch.randn(outputs, generator=generator), torch.randn(71, inputs, generator=generator)
        linear, twin = linear_of(weight, bias), weight.dequantized().double()
        exact = ordered(rows, weight) @ twin.T + bias
        terms = ordered(rows, weight).abs() @ twin.abs().T + bias.abs()
        for count in (1, 2, 3, 7, 71):
            found = linear(rows[:count], None)
            assert ((found - exact[:count]).abs() <= 1e-5 * terms[:count]).all()
            added = linear.add_to(rows.new_ones(count, outputs), rows[:count], None)
            torch.testing.assert_close(added, found + 1)
        if outputs > 1:
            floats = rows.double() @ twin.T + bias
            assert (linear(rows, None) - floats).norm() < 0.01 * floats.norm()

    @pytest.mark.parametrize("kind", [*CODE_KINDS, "float 8"])
    def test_a_row_is_the_same_whatever_is_multiplied_with_it(instructions: str, kind: str) -> None:
        linear, rows = linear_of(made(kind, 100, 2560)), torch.randn(80, 2560)
        alone = torch.cat([linear(row[None], None) for row in rows])
        threads = torch.get_num_threads()
        try:
            for num_threads in (1, 2, 3):
                torch.set_num_threads(num_threads)
                for count in (2, 5, 9, 80):
                    assert torch.equal(linear(rows[:count], None), alone[:count])
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (13, 77), (70, 2050)])
    def test_products_of_floats(instructions: str, dtype: torch.dtype, outputs: int, inputs: int) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        rows = torch.randn(71, inputs, generator=generator)
        linear, exact = linear_of(weight), rows.double() @ weight.double().T
        alone = torch.cat([linear(row[None], None) for row in rows])
        assert ((alone - exact).abs() <= 1e-5 * (rows.double().abs() @ weight.double().abs().T)).all()
        for count in (2, 6, 13, 71):
            assert torch.equal(linear(rows[:count], None), alone[:count])

    def test_float_8(instructions: str) -> None:
        weight, rows = made("float 8", 30, 1024), torch.randn(20, 1024)
        twin = weight.dequantized().double()
        found = linear_of(weight)(rows, None)
        assert ((found - rows.double() @ twin.T).abs() <= 1e-5 * (rows.double().abs() @ twin.abs().T)).all()

    @pytest.mark.parametrize("form", ["codes 4", "codes 5", "codes 6", "table 4", "codes 8"])
    @pytest.mark.parametrize("group", [16, 32])
    def test_integers_are_exact(instructions: str, form: str, group: int) -> None:
        """Values whose scales are powers of two leave nothing to round: the greatest codes and rows of all signs."""
        generator = torch.Generator().manual_seed(0)
        outputs, inputs = 24, 96
        scales = 2.0 ** torch.randint(-3, 1, (outputs, inputs // group), generator=generator)
        table = torch.tensor([-128, 127, *range(14)], dtype=torch.int8)
        codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        if form == "codes 8":
            signed = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
            signed[0], signed[1] = -128, 127
            weight = QuantizedWeight(codes=signed, scales=scales, group=group, bits=8)
        elif form == "table 4":
            codes[0], codes[1] = 0, 1
            weight = QuantizedWeight(codes=codes, scales=scales, table=table, group=group, bits=4)
        else:
            bits = int(form[-1])
            codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
            codes[0] = (1 << bits) - 1
            zeros = torch.randint(0, 16, (outputs, inputs // group), generator=generator, dtype=torch.uint8)
            weight = QuantizedWeight(codes=codes, scales=scales, zeros=zeros, group=group, bits=bits)
        rows = torch.randint(-127, 128, (9, inputs), generator=generator).float()
        rows[:, ::32] = 127.0  # so that a row's scale is 1
        rows[0], rows[1] = 127.0, -127.0
        assert torch.equal(linear_of(weight)(rows, None).double(), rows.double() @ weight.dequantized().double().T)

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_embedding_is_exact(instructions: str, kind: str) -> None:
        weight = made(kind, 21, 512)
        matrix, token_ids = linear_of(weight).matrix, torch.tensor([20, 0, 7, 7])
        found = PackedMatrixEmbedding(matrix, torch.float32)(token_ids)
        assert torch.equal(found, weight.dequantized()[token_ids])
        with pytest.raises(IndexError):
            PackedMatrixEmbedding(matrix, torch.float32)(torch.tensor([21]))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_an_embedding_of_floats_is_exact(instructions: str, dtype: torch.dtype) -> None:
        weight = (torch.randn(19, 33) * 10.0 ** torch.arange(-9, 10)[:, None].float().clamp(-9, 4)).to(dtype)
        found = PackedMatrixEmbedding(linear_of(weight).matrix, torch.float32)(torch.arange(19))
        assert torch.equal(found, weight.float())

    @pytest.mark.parametrize("inputs", [1, 16, 48, 100])
    def test_inputs_that_are_not_whole_blocks(instructions: str, inputs: int) -> None:
        generator = torch.Generator().manual_seed(0)
        group = 16 if inputs % 16 == 0 else inputs
        codes = torch.randint(0, 16, (5, inputs), generator=generator, dtype=torch.uint8)
        scales = torch.rand(5, inputs // group, generator=generator)
        weight = QuantizedWeight(codes=codes, scales=scales, mins=scales, group=group, bits=4)
        rows = torch.randn(3, inputs, generator=generator)
        exact = quantized_rows(rows) @ weight.dequantized().double().T
        torch.testing.assert_close(linear_of(weight)(rows, None).double(), exact, atol=1e-4, rtol=1e-5)

    def test_factors_of_groups_that_are_no_whole_blocks(instructions: str) -> None:
        """Five groups share a factor, and what fills the row up begins a sixth."""
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(0, 16, (9, 80), generator=generator, dtype=torch.uint8)
        small, factors = codes[:, :5].contiguous(), torch.rand(9, 1, generator=generator).half()
        scaled = {"scales": small, "scale_factors": factors, "mins": small, "min_factors": factors}
        weight, rows = QuantizedWeight(codes=codes, **scaled, group=16, bits=4), torch.randn(3, 80)
        exact = quantized_rows(rows) @ weight.dequantized().double().T
        torch.testing.assert_close(linear_of(weight)(rows, None).double(), exact, atol=1e-3, rtol=1e-4)
        assert torch.equal(linear_of(weight).matrix.expanded(torch.arange(9)), weight.dequantized())

    def test_parts_of_a_matrix_are_joined(instructions: str) -> None:
        """Where one needs wider scales than the others, and zeros that are not all the same."""
        parts = [made("symmetric 4", 16, 256, seed=seed) for seed in range(3)] + [made("symmetric 4", 5, 256, seed=3)]
        assert parts[1].zeros is not None
        parts[1] = replace(parts[1], scales=parts[1].scales.float() * 1e-6, zeros=parts[1].zeros.clone())
        parts[1].zeros[3, 1] = 5
        matrix = join_packed((pack(part, PACKED_KERNELS) for part in parts), 53)
        assert matrix is not None
        expected = torch.cat([part.dequantized() for part in parts])
        assert torch.equal(matrix.expanded(torch.arange(53)), expected)
        rows = torch.randn(2, 256)
        exact = quantized_rows(rows) @ expected.double().T
        assert torch.allclose(matrix.multiply(rows, None, None).double(), exact, atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, *FLOATS], ids=str)
    @pytest.mark.parametrize(("outputs", "inputs"), [(45, 544), (16, 7), (3, 256)])
    def test_codes_lie_where_the_kernels_read_them(
        instructions: str, dtype: torch.dtype, outputs: int, inputs: int
    ) -> None:
        """Rows of a wider matrix, too, which are not next to each other."""
        generator = torch.Generator().manual_seed(0)
        size = (outputs, (inputs + 3) * dtype.itemsize)
        stored = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        forms = {
            torch.uint8: (Form.CODES4, Form.TABLE4, Form.CODES5, Form.CODES6),
            torch.int8: (Form.CODES8,),
            torch.float8_e4m3fn: (Form.FLOAT8,),
            torch.bfloat16: (Form.BF16,),
            torch.float16: (Form.F16,),
            torch.float32: (Form.F32,),
        }[dtype]
        for form in forms:
            given = stored & (1 << form.bits) - 1 if form.bits < 8 else stored
            codes = given.view(dtype)[:, :inputs]
            found = pack_codes(codes, form, PACKED_KERNELS)
            assert torch.equal(found, packed_codes(codes, form, PACKED_KERNELS.lanes())), form

    @pytest.mark.parametrize("kind", [*CODE_KINDS, "float 8", "bfloat16", "two forms"])
    @pytest.mark.parametrize("biased", [0, 3])
    def test_all_experts_in_one_product(instructions: str, kind: str, biased: int) -> None:
        """The same bits as expert by expert: with one row, few and many, for experts without rows, by any threads."""
        experts = [expert_of(kind, seed, torch.randn(45) if seed < biased else None) for seed in range(6)]
        grouped = grouped_linears(experts)
        assert isinstance(grouped, PackedExperts)
        assert grouped.num_bytes == sum(expert.num_bytes for expert in experts)
        generator = torch.Generator().manual_seed(1)
        threads = torch.get_num_threads()
        try:
            for counts in ([0, 0, 1, 0, 0, 0], [3, 0, 1, 9, 0, 2], [0, 70, 0, 5, 130, 0], [0] * 6):
                rows = torch.randn(sum(counts), 512, generator=generator)
                expected = ListedLinears(experts)(rows, torch.tensor(counts), None) if len(rows) else rows[:, :45]
                for num_threads in (1, 3):
                    torch.set_num_threads(num_threads)
                    assert torch.equal(grouped(rows, torch.tensor(counts), None), expected)
        finally:
            torch.set_num_threads(threads)

    def expert_of(kind: str, seed: int, bias: torch.Tensor | None) -> PackedMatrixLinear | SideBySide:
        if kind == "bfloat16":
            return linear_of(torch.randn(45, 512).bfloat16(), bias)
        if kind != "two forms":
            return linear_of(made(kind, 45, seed=seed), bias)
        linear = quantized_linear([made("mins 5", 30, seed=seed), made("zeros 6", 15, seed=seed)], bias)
        assert isinstance(linear, SideBySide)
        return linear

    def test_experts_in_unlike_forms_are_multiplied_one_by_one() -> None:
        experts = [linear_of(made(kind)) for kind in ("mins 5", "signed 8")]
        assert isinstance(grouped_linears(experts), ListedLinears)
        for one in experts:
            assert isinstance(grouped_linears([one]), PackedExperts)

    @pytest.mark.parametrize("counts", [[2, 2], [4, 0], [-1, 4], [2, 0]])
    def test_counts_of_rows_that_do_not_add_up_are_refused(counts: list[int]) -> None:
        grouped = grouped_linears([linear_of(made("mins 5", seed=seed)) for seed in range(2)])
        with pytest.raises(ValueError, match="do not add up"):
            grouped(torch.zeros(3, 512), torch.tensor(counts), None)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_parts_in_unlike_forms_stand_side_by_side(dtype: torch.dtype) -> None:
        weights = [made("mins 5", 24), made("zeros 6", 9), made("signed 8", 17)]
        bias, rows = torch.randn(50), torch.randn(3, 512).to(dtype)
        linear = quantized_linear(weights, bias)
        each = [linear_of(weight, part) for weight, part in zip(weights, bias.split([24, 9, 17]), strict=True)]
        expected = torch.cat([one(rows, None) for one in each], dim=1)
        assert torch.equal(linear(rows, None), expected)
        assert torch.equal(linear.add_to(torch.ones_like(expected), rows, None), expected + 1)

    def test_what_is_no_number_stays_none(instructions: str) -> None:
        rows = torch.ones(4, 64)
        rows[1, 3], rows[2, 40] = float("nan"), float("inf")
        rows[3] = 0.0
        for weight in (made("signed 8", 9, 256), torch.ones(9, 256).bfloat16()):
            found = linear_of(weight)(functional.pad(rows, (0, 192)), None)
            assert found[0].isfinite().all()
            assert found[1].isnan().all()
            assert not found[2].isfinite().any()
            assert found[3].count_nonzero() == 0

    def test_weights_of_other_instructions_are_refused() -> None:
        if len(INSTRUCTIONS) < 2:
            return
        linear = linear_of(made("mins 5"))
        PACKED_KERNELS.use("generic")
        try:
            with pytest.raises(ValueError, match="packed for other instructions"):
                linear(torch.zeros(1, 512), None)
        finally:
            PACKED_KERNELS.use(INSTRUCTIONS[0])

    @pytest.mark.parametrize(
        ("name", "arguments", "error"),
        [
            ("multiply", (), TypeError),
            ("multiply", (b"",) + (0,) * 8, ValueError),
            ("multiply", (bytes(200),) + (0,) * 8, ValueError),
            ("expand", ("text",) + (0,) * 4, TypeError),
            ("use", ("abacus",), ValueError),
        ],
    )
    def test_arguments_of_other_kinds_are_refused(
        name: str, arguments: tuple[object, ...], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            getattr(PACKED_KERNELS, name)(*arguments)
