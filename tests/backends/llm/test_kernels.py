"""The kernels in C do what torch does, and are nowhere when they are not wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from modelserver_backends.llm import kernels
from modelserver_backends.llm.attention.choose import make_attention
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvLayout
from modelserver_backends.llm.attention.paged import AttentionSpec
from modelserver_backends.llm.kernels import KERNELS, device_processors, has_triton, kernels_for, load
from modelserver_backends.llm.models import mlp
from modelserver_backends.llm.models.linear import PlainLinear
from modelserver_backends.llm.models.load import choose_dtype
from modelserver_backends.llm.models.mlp import Mlp, activation_of
from modelserver_backends.llm.models.norm import RmsNorm
from torch.nn import functional

from modelserver.backend import UnsupportedError

GPU_LAYOUT = KvLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float16)
ROOT = Path(__file__).parents[3]
WIDTHS = [] if KERNELS is None else KERNELS.widths()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def test_an_environment_variable_turns_them_off() -> None:
    assert load({"MODELSERVER_PURE_PYTHON": "1"}) is None
    environment = {**os.environ, "MODELSERVER_PURE_PYTHON": "yes"}
    code = "from modelserver_backends.llm.kernels import KERNELS; print(KERNELS)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "None", done.stderr


def test_they_are_not_for_other_devices_and_datatypes() -> None:
    assert kernels_for(torch.device("meta"), torch.float32) is None
    assert kernels_for(torch.device("cpu"), torch.float16) is None
    assert kernels_for(torch.device("cpu"), torch.float32) is KERNELS


def test_a_gpu_whose_triton_cannot_start_computes_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some of its versions compile a part of themselves first, which needs a C compiler."""

    class Unstarted:
        @property
        def active(self) -> object:
            raise RuntimeError("Failed to find C compiler")

    for name in ("triton", "triton.runtime"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.__dict__["driver"] = Unstarted()
    has_triton.cache_clear()
    try:
        assert device_processors(torch.device("cuda:0")) is None
        assert device_processors(torch.device("cuda:0")) is None
    finally:
        has_triton.cache_clear()
    (message,) = caplog.messages
    assert message.endswith("Triton may need gcc and Python's headers: Failed to find C compiler")


@pytest.mark.parametrize(("major", "expected"), [(7, None), (8, 40)])
def test_gpus_before_ampere_compute_by_torch(major: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=major, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    gpu = torch.device("cuda:0")
    assert device_processors(gpu) == expected
    assert choose_dtype("auto", "bfloat16", gpu) is (torch.float16 if expected is None else torch.bfloat16)
    blocks = KvBlocks(GPU_LAYOUT, num_blocks=1, block_size=8, device=torch.device("cpu"))
    blocks.device = gpu
    if expected is None:
        with pytest.raises(UnsupportedError, match=r"attention_backend triton needs compute capability 8\.0"):
            make_attention("triton", blocks, AttentionSpec(num_heads=2, windows=(None,), scale=1))


if KERNELS is not None:

    @pytest.fixture(params=WIDTHS)
    def width(request: pytest.FixtureRequest) -> Iterator[int]:
        """Vectors of so many floats: what other processors do is tried on this one, too."""
        KERNELS.use(request.param)
        yield request.param
        KERNELS.use(WIDTHS[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 15), (33, 192), (70, 1000)])
    def test_rows_are_normalised(width: int, rows: int, size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        values, weight = (10 * torch.randn(rows, size)).to(dtype), torch.randn(size).to(dtype)
        expected = functional.rms_norm(values.float(), (size,), weight.float(), 1e-5)
        for given in (values, values.repeat(1, 2)[:, :size]):
            found = RmsNorm(weight, 1e-5)(given)
            torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype] * 10, rtol=TOLERANCE[dtype])
        assert RmsNorm(weight, 1e-5)(torch.zeros_like(values)).count_nonzero() == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 15), (33, 192), (70, 1000)])
    def test_rows_are_gated(width: int, rows: int, size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        values = (torch.randn(rows, 2 * size) * 30).to(dtype)
        values[:1, :1] = -200.0
        expected = functional.silu(values[:, :size].float()) * values[:, size:].float()
        found = mlp._gated_by_kernel(KERNELS, values).float()
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype] * 2)

    def test_what_is_no_number_stays_none() -> None:
        values = torch.tensor([[1.0, float("nan"), 2.0, 3.0], [float("inf"), 1.0, 2.0, 3.0]])
        normalised = RmsNorm(torch.ones(4), 1e-5)(values)
        assert normalised[0].isnan().all()
        assert normalised[1].tolist()[1:] == [0.0, 0.0, 0.0]
        gated = mlp._gated_by_kernel(KERNELS, values.bfloat16())
        assert gated[0].isnan().tolist() == [False, True]

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [("normalise", ()), ("normalise", (0,) * 7), ("gate", (0,)), ("plan", (b"",)), ("attend", ()), ("use", ("a",))],
    )
    def test_arguments_of_other_kinds_are_refused(name: str, arguments: tuple[object, ...]) -> None:
        with pytest.raises(TypeError):
            getattr(KERNELS, name)(*(arguments[:1] if name == "use" else arguments))

    def test_vectors_that_the_processor_lacks_are_refused() -> None:
        with pytest.raises(ValueError, match="no kernels for vectors of 5 floats"):
            KERNELS.use(5)


def test_without_them_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows, weight, down = torch.randn(5, 24), torch.randn(24, 24), torch.randn(24, 12)

    def computed() -> torch.Tensor:
        activation = activation_of("silu", is_gated=True)
        feed = Mlp(PlainLinear(weight, None), PlainLinear(down, None), activation=activation)
        return feed(RmsNorm(weight[0], 1e-5)(rows), None)

    with_kernels = computed()
    monkeypatch.setattr(kernels, "KERNELS", None)
    torch.testing.assert_close(computed(), with_kernels, atol=1e-4, rtol=1e-5)
