"""Checks answers: their outputs are present, and equal the expected data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelserver.bench.work import Template, Transport, Work
from modelserver.client.grpc_messages import unframe
from modelserver.client.http_lane import HttpLane
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
        return _http_outputs(lane.answer, lane.json_len)
    if work.transport is Transport.STREAM:
        if not lane.answer:
            return {}
        return _grpc_outputs(pb.ModelStreamInferResponse.FromString(lane.answer).infer_response)
    return _grpc_outputs(pb.ModelInferResponse.FromString(unframe(lane.answer, work.algorithm)))


def _http_outputs(body: bytes, json_len: int | None) -> dict[str, bytes | None]:
    offset = len(body) if json_len is None else json_len
    entries: Sequence[dict[str, Any]] = json.loads(body[:offset])["outputs"]
    found: dict[str, bytes | None] = {}
    for entry in entries:
        size = entry.get("parameters", {}).get("binary_data_size")
        if size is None:
            found[entry["name"]] = None
            continue
        found[entry["name"]] = body[offset : offset + size]
        offset += size
    if offset != len(body):
        raise ValueError(f"its tensors end at byte {offset} of {len(body)}")
    return found


def _grpc_outputs(response: pb.ModelInferResponse) -> dict[str, bytes | None]:
    raws: Sequence[bytes | None] = response.raw_output_contents or [None] * len(response.outputs)
    return {output.name: raw for output, raw in zip(response.outputs, raws, strict=True)}
