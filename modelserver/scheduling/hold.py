"""Test hooks: a scheduler that executes nothing until a number of requests wait, so that its batches are predictable.

The environment variables are Triton's. Without them none of this code runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelserver.core.numerals import is_digits
from modelserver.core.request import InFlightRequest
from modelserver.scheduling.batch import Batch, FormBatch
from modelserver.scheduling.policy import BatchingRules
from modelserver.scheduling.queue import BucketKey, RequestQueue
from modelserver.scheduling.sequence import SequenceEntry
from modelserver.scheduling.sequence_places import InstanceSlots
from modelserver.scheduling.sequence_policy import SequenceRules
from modelserver.scheduling.sequence_table import SequenceTable

_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
_BACKLOG_VARIABLE = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"


@dataclass(frozen=True, slots=True)
class Hold:
    """Hold until `num_requests` are queued, and `num_backlogged` more of sequences that wait for a slot or turn."""

    num_requests: int = 0
    num_backlogged: int = 0


def hold_from(environ: Mapping[str, str]) -> Hold | None:
    """The hold that the environment asks for; None without one, and where a variable is not a number."""
    numbers = [environ.get(variable, "") for variable in (_VARIABLE, _BACKLOG_VARIABLE)]
    num_requests, num_backlogged = (int(text) if is_digits(text) else 0 for text in numbers)
    return Hold(num_requests, num_backlogged) if num_requests or num_backlogged else None


def held_form(hold: Hold, form: FormBatch) -> FormBatch:
    """`form`, but not before enough requests wait; after that, `form` unchanged."""
    is_open = False

    def form_when_open(queue: RequestQueue, rules: BatchingRules, now_ns: int) -> tuple[Batch | None, int | None]:
        nonlocal is_open
        is_open = is_open or len(queue) >= hold.num_requests
        return form(queue, rules, now_ns) if is_open else (None, None)

    return form_when_open


class HeldSequenceTable(SequenceTable):
    """Gives out no requests before enough of them wait, in slots and in the backlog together.

    The sum counts, because the scheduler queues a sequence behind an ended one of the same id, in its slot. Triton
    leaves it in the backlog.
    """

    def __init__(
        self,
        rules: SequenceRules,
        model_name: str,
        *,
        key: BucketKey | None,
        has_state: bool,
        hold: Hold,
        is_fair: bool = False,
    ) -> None:
        super().__init__(rules, model_name, key=key, has_state=has_state, is_fair=is_fair)
        self._hold = hold
        self._is_open = False
        self._owners: tuple[InstanceSlots, ...] = ()

    def add_instance(self, *, hears_ends: bool) -> InstanceSlots:
        owner = super().add_instance(hears_ends=hears_ends)
        self._owners = (*self._owners, owner)
        return owner

    def add(self, request: InFlightRequest, now_ns: int) -> SequenceEntry:
        entry = super().add(request, now_ns)
        if not self._is_open:
            self.touched.update(self._owners)  # any of them may find that enough requests wait
        return entry

    def take(self, owner: InstanceSlots, now_ns: int) -> tuple[list[SequenceEntry], int | None]:
        self._is_open = self._is_open or self.num_waiting >= self._hold.num_requests + self._hold.num_backlogged
        if not self._is_open:
            return [], None
        return super().take(owner, now_ns)
