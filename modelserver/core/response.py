"""The responses to a request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from modelserver.core.tensor import Tensor
from modelserver.errors import ServerError

ParameterValue = bool | int | float | str


class InferResponse(msgspec.Struct, eq=False):
    """One response of a request: outputs, or an error. `is_final` marks the last one.

    A decoupled model may end with an *empty* final response: no outputs and no error.
    """

    outputs: list[Tensor] = []
    error: ServerError | None = None
    parameters: Mapping[str, ParameterValue] | None = None
    is_final: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether it has neither outputs nor an error; it may still be the last one."""
        return not self.outputs and not self.parameters and self.error is None


# As an entry of what an instance returns: the request is not done and must be executed once more. Only for models with
# `iterative_sequence`; compared by identity.
RESCHEDULE = InferResponse(is_final=False)
