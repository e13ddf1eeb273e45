"""Checks answers: their outputs are present, and equal the expected data."""

from __future__ import annotations

from collections.abc import Mapping

from modelserver.bench.work import Template, Transport, Work
from modelserver.client.grpc_messages import unframe
from modelserver.client.http_lane import HttpLane
from modelserver.client.infer_answer import grpc_outputs, http_outputs
from modelserver.client.lane import Lane
from modelserver.pb import grpc_service_pb2 as pb

MAX_SHOWN = 8


def problem_of(lane: Lane, work: Work, template: Template) -> str | None:
    """The problem of the answer that `lane` has kept; None if it is correct."""
    try:
        outputs = _outputs(lane, work)
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"the answer cannot be read: {type(error).__name__}: {error}"
    missing = [name for name in work.output_names if name not in outputs]
    if missing and not work.is_decoupled:
        return f"the answer lacks output '{missing[0]}' (it has {', '.join(sorted(outputs)) or 'none'})"
    for name, expected in template.expected.items():
        if name not in outputs:
            return f"the answer lacks output '{name}', which validation_data gives"
        actual = outputs[name]
        if actual is not None and actual != expected:
            return f"output '{name}' is not what validation_data says: {_difference(expected, actual)}"
    return None


def _difference(expected: bytes, actual: bytes) -> str:
    if len(expected) != len(actual):
        return f"expected {len(expected)} bytes, got {len(actual)}"
    place = next(place for place in range(len(expected)) if expected[place] != actual[place])
    shown = slice(place, place + MAX_SHOWN)
    return f"from byte {place} on expected {expected[shown].hex()}, got {actual[shown].hex()}"


def _outputs(lane: Lane, work: Work) -> Mapping[str, bytes | None]:
    """The outputs' bytes by name; None for an output without bytes."""
    if work.transport is Transport.HTTP:
        assert isinstance(lane, HttpLane), "HTTP has its own lanes"
        _, outputs = http_outputs(lane.answer, lane.json_len)
    elif work.transport is Transport.GRPC:
        outputs = grpc_outputs(pb.ModelInferResponse.FromString(unframe(lane.answer, work.algorithm)))
    elif lane.answer:
        outputs = grpc_outputs(pb.ModelStreamInferResponse.FromString(lane.answer).infer_response)
    else:
        outputs = []
    return {output.name: output.raw for output in outputs}
