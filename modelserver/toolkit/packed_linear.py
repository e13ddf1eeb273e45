"""A linear layer with int4 weights, two in a byte, in plain operators that every torch can execute."""

from __future__ import annotations

from typing import Any


def pack_linear(torch: Any, layer: Any, group_size: int) -> Any:
    """The layer that torchao has given int4 weights in bytes (one scale for each group of a row), packed.

    Its weights are unpacked at every call: half the memory of int8, for some time.
    """
    values = layer.weight.qdata.to(torch.int8)
    scales = layer.weight.scale.detach().clone()
    zeros = layer.weight.zero_point
    if zeros is not None and bool((zeros != 0).any()):
        raise AssertionError("int4 weights are symmetric: torchao was asked for no zero points")
    return _packed_class(torch)(values, scales, layer.bias, group_size)


def _packed_class(torch: Any) -> Any:
    class PackedLinear(torch.nn.Module):  # type: ignore[misc]
        """`packed` uint8 [out, in / 2]: the even columns in the low half, the odd ones in the high half, plus 8."""

        def __init__(self, values: Any, scales: Any, bias: Any, group_size: int) -> None:
            super().__init__()
            offset = (values + 8).to(torch.uint8)
            self.register_buffer("packed", offset[:, 0::2] | (offset[:, 1::2] << 4))
            self.register_buffer("scales", scales)
            self.bias = bias
            self._num_groups = values.shape[1] // group_size
            self._shape = tuple(values.shape)

        def forward(self, rows: Any) -> Any:
            # By name, not as & and >>: those are traced to operators that some servers refuse in a file.
            low = torch.bitwise_and(self.packed, 15).to(torch.int8) - 8
            high = torch.bitwise_right_shift(self.packed, 4).to(torch.int8) - 8
            values = torch.stack((low, high), dim=-1).reshape(self._shape[0], self._num_groups, -1)
            weight = (values.to(self.scales.dtype) * self.scales.unsqueeze(-1)).reshape(self._shape)
            return torch.nn.functional.linear(rows, weight, self.bias)

    return PackedLinear
