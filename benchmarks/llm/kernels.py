"""`python -m benchmarks.llm.kernels`: linear layers in every form on one thread, beside torch's and the memory's speed.

Times are of the thread's CPU, in turns, and the median of several. Enough copies of a weight are multiplied in
turn that none of them is in a cache, as in a network.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as functional
from modelserver_backends.llm.kernels import PACKED_KERNELS
from modelserver_backends.llm.models.decoder_config import MoeConfig
from modelserver_backends.llm.models.linear import GroupedLinear, ListedLinears, PackedLinear
from modelserver_backends.llm.models.mlp import activation_of
from modelserver_backends.llm.models.moe import Experts, Moe, Router
from modelserver_backends.llm.models.packed_matrix import PackedMatrixLinear, grouped_linears, pack_floats
from modelserver_backends.llm.quantization.packing import pack
from modelserver_backends.llm.quantization.quantized_weight import QuantizedWeight
from modelserver_backends.llm.step_context import StepContext

Product = Callable[[torch.Tensor], object]
SHAPES = [(4096, 4096), (1024, 3072)]
ROWS = [1, 4, 8, 32, 256]
_COLD_BYTES = 100 << 20
_TABLE = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def _grid(outputs: int, inputs: int, group: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(outputs, inputs // group) * 0.01 + 0.001).to(dtype)


def _codes(outputs: int, inputs: int, most: int) -> torch.Tensor:
    return torch.randint(0, most + 1, (outputs, inputs), dtype=torch.uint8)


def quantized(form: str, outputs: int, inputs: int) -> QuantizedWeight:
    codes, grid = partial(_codes, outputs, inputs), partial(_grid, outputs, inputs)
    match form:
        case "W4 g32":
            zeros = torch.full((outputs, inputs // 32), 8, dtype=torch.uint8)
            return QuantizedWeight(codes=codes(15), scales=grid(32), zeros=zeros, group=32, bits=4)
        case "W4 g128":
            zeros = torch.randint(0, 16, (outputs, inputs // 128), dtype=torch.uint8)
            return QuantizedWeight(codes=codes(15), scales=grid(128), zeros=zeros, group=128, bits=4)
        case "W4K":
            least = torch.randint(0, 64, (outputs, inputs // 32), dtype=torch.uint8)
            return QuantizedWeight(
                codes=codes(15),
                scales=least,
                mins=least,
                scale_factors=grid(256),
                min_factors=grid(256),
                group=32,
                bits=4,
            )
        case "W4L":
            return QuantizedWeight(codes=codes(15), scales=grid(32), table=_TABLE, group=32, bits=4)
        case "W5":
            return QuantizedWeight(
                codes=codes(31), scales=grid(32), zeros=torch.full_like(grid(32), 16).byte(), group=32, bits=5
            )
        case "W6 g16":
            return QuantizedWeight(
                codes=codes(63),
                scales=codes(63)[:, : inputs // 16].to(torch.int8),
                zeros=torch.full((outputs, inputs // 16), 32, dtype=torch.uint8),
                scale_factors=grid(256),
                group=16,
                bits=6,
            )
        case "W8 row":
            signed = (codes(254).int() - 127).to(torch.int8)
            return QuantizedWeight(codes=signed, scales=grid(inputs, torch.float32), group=inputs, bits=8)
        case "W8 g32":
            signed = (codes(254).int() - 127).to(torch.int8)
            return QuantizedWeight(codes=signed, scales=grid(32), group=32, bits=8)
        case _:
            floats = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
            return QuantizedWeight(codes=floats, scales=grid(128, torch.float32), group=128, bits=8)


def ours(form: str, outputs: int, inputs: int) -> tuple[Product, int]:
    """A product, and the bytes of its weight."""
    linear = packed(form, outputs, inputs)
    return lambda rows: linear(rows, None), linear.num_bytes


def packed(form: str, outputs: int, inputs: int) -> PackedMatrixLinear:
    assert PACKED_KERNELS is not None, "the part in C is needed"
    if form in ("W16 bf16", "W16 f16"):
        weight = torch.randn(outputs, inputs) * 0.02
        matrix = pack_floats(weight.to(torch.bfloat16 if form == "W16 bf16" else torch.float16), PACKED_KERNELS)
    else:
        found = pack(quantized(form, outputs, inputs), PACKED_KERNELS)
        assert found is not None, form
        matrix = found
    return PackedMatrixLinear(matrix, None)


def torchs(form: str, outputs: int, inputs: int) -> tuple[Product, int]:
    weight = torch.randn(outputs, inputs) * 0.02
    match form:
        case "torch f32 BLAS":
            return lambda rows: functional.linear(rows, weight), weight.nbytes
        case "torch f32 oneDNN":
            linear = PackedLinear(weight, None)
            return lambda rows: linear(rows, None), weight.nbytes
        case "torch int8 bf16":
            codes, scales = (
                torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8),
                torch.ones(outputs).bfloat16(),
            )
            return lambda rows: torch._weight_int8pack_mm(rows.bfloat16(), codes, scales), codes.nbytes
        case _:
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_codes(outputs, inputs, 15).int(), 2)
            scales = torch.ones(inputs // 32, outputs, 2).bfloat16()
            return (
                lambda rows: torch._weight_int4pack_mm_for_cpu(rows.bfloat16(), codes, 32, scales),
                codes.nbytes + scales.nbytes,
            )


OURS = ["W16 bf16", "W16 f16", "F8 g128", "W8 row", "W8 g32", "W6 g16", "W5", "W4 g32", "W4 g128", "W4K", "W4L"]
TORCHS = ["torch f32 BLAS", "torch f32 oneDNN", "torch int8 bf16", "torch int4 bf16"]


def measure(products: Sequence[Product], rows: torch.Tensor, rounds: int) -> float:
    """The median seconds of a product. Of each copy of the weight, once; then again."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for product in products:
            product(rows)
        times.append((time.thread_time() - start) / len(products))
    return statistics.median(times)


def stream_gb_per_s() -> float:
    """How fast one thread reads memory."""
    values = torch.ones(64 << 20)
    return values.nbytes / measure([lambda _: values.sum()], values, 7) / 1e9


# Sixteen sums that do not wait for each other: more than the instructions under way. For each set of instructions, what
# to compile for, the type of a vector, what adds products of 8 bits to it, and the products in it.
_PEAK = """
#include <immintrin.h>
void multiply(long rounds)
{
    VECTOR sums[16] = {0}, ones = {0};
    for (long round = 0; round < rounds; round++)
#pragma GCC unroll 16
        for (int at = 0; at < 16; at++) {
            ADD
            __asm__ volatile("" : "+v"(sums[at]), "+v"(ones));
        }
}
"""
_DOT = "sums[at] = {}_dpbusd{}_epi32(sums[at], ones, ones);"
_IN_16_BITS = "sums[at] = {0}_add_epi16(sums[at], {0}_maddubs_epi16(ones, sums[at]));"
_PEAKS = {
    "avx512vnni": ("-mavx512f -mavx512vnni", "__m512i", _DOT.format("_mm512", ""), 64),
    "avx512": ("-mavx512f -mavx512bw", "__m512i", _IN_16_BITS.format("_mm512"), 64),
    "avxvnni": ("-mavx2 -mavxvnni", "__m256i", _DOT.format("_mm256", "_avx"), 32),
    "avx2": ("-mavx2", "__m256i", _IN_16_BITS.format("_mm256"), 32),
}


def peak_gmac_per_s(instructions: str) -> float | None:
    """Products of 8 bits that one thread adds up in its registers; None where there is no compiler, or on ARM."""
    if instructions not in _PEAKS or (compiler := shutil.which("cc")) is None:
        return None
    options, vector, add, products = _PEAKS[instructions]
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "peak.c"), Path(directory, "peak.so")
        source.write_text(_PEAK.replace("VECTOR", vector).replace("ADD", add))
        command = [compiler, "-O3", *options.split(), "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        multiply = ctypes.CDLL(str(library)).multiply
    rounds = 1_000_000
    seconds = measure([lambda _: multiply(ctypes.c_long(rounds))], torch.empty(0), 7)
    return rounds * 16 * products / seconds / 1e9


def measure_experts(form: str) -> None:
    """A mixture of 64 experts of Qwen3-30B-A3B's shape, 8 for a row: expert by expert, and in one product."""
    num_experts, hidden, width = 64, 2048, 768
    ups = [packed(form, 2 * width, hidden) for _ in range(num_experts)]
    downs = [packed(form, hidden, width) for _ in range(num_experts)]
    activation = activation_of("silu", is_gated=True)
    config = MoeConfig(num_experts=num_experts, num_experts_per_tok=8, intermediate_size=width, is_normalised=True)
    router = Router(PackedLinear(torch.randn(num_experts, hidden), None), config)
    kinds: list[Callable[[Sequence[PackedMatrixLinear]], GroupedLinear]] = [ListedLinears, grouped_linears]
    layers = [
        Moe(
            router,
            Experts(make(ups), make(downs), num_experts=num_experts, activation=activation),
            shared=None,
        )
        for make in kinds
    ]
    step = StepContext(positions=torch.empty(0), attention=None, inputs=None)
    for count in (1, 8, 32, 256):
        times: list[list[float]] = [[], []]
        for seed in range(30 if count < 100 else 6):
            rows = torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))
            for layer, found in zip(layers, times, strict=True):
                start = time.perf_counter()
                layer(rows, step)
                found.append(time.perf_counter() - start)
        loop, one = (statistics.median(found) * 1e3 for found in times)
        print(f"| {form}, {count} rows | {loop:.2f} | {one:.2f} | {loop / one:.2f}x |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm.kernels", description=__doc__)
    parser.add_argument("--only", nargs="*", help="forms, beginning with these words")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="one of the shapes alone")
    parser.add_argument("--instructions", help="another set of instructions than the fastest")
    parser.add_argument("--experts", type=int, metavar="THREADS", help="mixtures of experts instead, with this many")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.experts or 1)
    torch.manual_seed(0)
    assert PACKED_KERNELS is not None, "the part in C is needed"
    if arguments.instructions is not None:
        PACKED_KERNELS.use(arguments.instructions)
    if arguments.experts is not None:
        print(f"{arguments.experts} threads\n\n| 64 experts | loop ms | one product ms | ratio |\n|---|--:|--:|--:|")
        with torch.inference_mode():
            for form in ("W4K", "W8 g32", "W16 bf16"):
                measure_experts(form)
        return
    instructions = arguments.instructions or PACKED_KERNELS.instructions()[0]
    print(f"{instructions}; reads {stream_gb_per_s():.1f} GB/s of memory")
    peak = peak_gmac_per_s(instructions)
    print("" if peak is None else f"Adds {peak:.0f} G products of 8 bits a second in its registers\n")
    for outputs, inputs in SHAPES if arguments.shape is None else [SHAPES[arguments.shape]]:
        print(f"{outputs} x {inputs}: ms (GMAC/s) for rows of each number, and what one row reads of the weight")
        print("| form | MB | " + " | ".join(map(str, ROWS)) + " | GB/s |\n" + "|---" * (len(ROWS) + 3) + "|")
        for form in OURS + TORCHS:
            if arguments.only and not any(form.startswith(word) for word in arguments.only):
                continue
            make = partial(ours if form in OURS else torchs, form, outputs, inputs)
            made = [make()]
            num_bytes = made[0][1]
            made += [make() for _ in range(min(31, _COLD_BYTES // num_bytes))]
            products = [product for product, _ in made]
            cells, speed = [], 0.0
            with torch.inference_mode():
                for count in ROWS:
                    rows = torch.randn(count, inputs)
                    few = products[: max(1, len(products) // max(1, count // 16))]
                    seconds = measure(few, rows, 3 if count > 100 else 7)
                    cells.append(f"{seconds * 1e3:.2f} ({count * outputs * inputs / seconds / 1e9:.0f})")
                    speed = speed or num_bytes / seconds / 1e9
            print(f"| {form} | {num_bytes / 1e6:.1f} | " + " | ".join(cells) + f" | {speed:.1f} |", flush=True)
        print()


if __name__ == "__main__":
    main()
