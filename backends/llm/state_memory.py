"""Memory for what layers without attention keep of sequences: of all that may run at once, when a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .device_memory import Reservation, available_bytes, device_memory
from .options import EngineOptions

if TYPE_CHECKING:
    from .models.recurrent_states import RecurrentStates


def reserve_states(states: RecurrentStates, options: EngineOptions, *, device: torch.device, what: str) -> Reservation:
    """Slots for `max_num_seqs` sequences, allocated. UnavailableError, if there is too little memory for them."""
    num_bytes = states.num_bytes(options.max_num_seqs)
    reservation = device_memory(device).reserve(
        num_bytes,
        available=available_bytes(device, options.gpu_memory_utilization),
        least=num_bytes,
        what=what,
        purpose=f" for the states of max_num_seqs {options.max_num_seqs} sequences",
        advice="lower max_num_seqs, or unload a model",
    )
    try:
        states.allocate(options.max_num_seqs)
    except BaseException:
        reservation.release()
        raise
    reservation.settle()
    return reservation
