"""What changes a server: models come and go; and what it counts: statistics and metrics."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from support.differential.facts import Case, http_facts, rpc_facts
from support.differential.inference import Inference, Input
from support.differential.models import LOADED, SOURCES, UNLOADED
from support.differential.target import Target
from tritonclient.grpc import service_pb2

_NUM_EQUAL = 5

_ONE = Inference("counted", (Input("INPUT0", "FP32", (1, 2), (1.0, 2.0)),))
_THREE = Inference("counted", (Input("INPUT0", "FP32", (3, 1), (1.0, 2.0, 3.0)),))
_WRONG = Inference("counted", (Input("INPUT0", "INT32", (1, 2), (1, 2)),))


def _post(path: str, body: Any, target: Target, *wanted: str) -> Any:
    return http_facts(target.http("POST", path, body), *wanted)


def _index(name: str, target: Target) -> Any:
    """The rows of one model; whether there are reasons."""
    rows = target.http("POST", "/v2/repository/index").document()
    return [
        {**{key: row.get(key, "") for key in ("name", "version", "state")}, "has_reason": bool(row.get("reason"))}
        for row in sorted(rows, key=lambda row: row.get("version", ""))
        if row["name"] == name
    ]


def _control(steps: tuple[tuple[str, Any], ...], name: str, target: Target) -> Any:
    """After each step its status, the model's rows of the index, and whether it is ready."""
    seen = []
    for verb, body in steps:
        reply = target.http("POST", f"/v2/repository/models/{name}/{verb}", body)
        ready = _settled(name, verb, target)
        seen.append({"verb": verb, "status": reply.status, "index": _index(name, target), "ready": ready})
    return seen


def _settled(name: str, verb: str, target: Target) -> bool:
    """Whether the model is ready; after an unload, which returns before its end, once it is not."""
    for _ in range(_PATIENCE):
        is_ready = target.http("GET", f"/v2/models/{name}/ready").status == 200
        states = {row["state"] for row in _index(name, target)}
        if not states & {"LOADING", "UNLOADING"} and not (verb == "unload" and is_ready):
            return is_ready
        time.sleep(0.05)
    return is_ready


# Times 50 ms.
_PATIENCE = 200

_LOAD = ("load", None)
_UNLOAD = ("unload", None)
_OVERRIDE = json.dumps(
    {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
)
_FILE = base64.b64encode((SOURCES / "echo.py").read_bytes()).decode()

_CONTROLS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "load, again, unload": ("later", (_LOAD, _LOAD, _UNLOAD, _UNLOAD)),
    "versions": ("later_versions", (_LOAD, _UNLOAD)),
    "an override": ("overridden", (("load", {"parameters": {"config": _OVERRIDE}}), _LOAD, _UNLOAD)),
    "an override that is none": ("overridden", (("load", {"parameters": {"config": "nonsense"}}),)),
    "an override of another backend": (
        "overridden",
        (("load", {"parameters": {"config": _OVERRIDE.replace('"python"', '"no_such"')}}),),
    ),
    "files": (
        "from_files",
        (("load", {"parameters": {"config": _OVERRIDE, "file:7/model.py": _FILE}}), _LOAD, _UNLOAD),
    ),
    "files without a config": ("from_files", (("load", {"parameters": {"file:7/model.py": _FILE}}),)),
    "a file outside": (
        "from_files",
        (("load", {"parameters": {"config": _OVERRIDE, "file:../../model.py": _FILE}}),),
    ),
    "an unknown parameter": ("never", (("load", {"parameters": {"something": 1}}),)),
    "an ensemble and its part": ("dependent", (_LOAD, ("unload", {"parameters": {"unload_dependents": False}}))),
    "an ensemble with its part": ("dependent", (_LOAD, ("unload", {"parameters": {"unload_dependents": True}}))),
    "nothing": ("no_such_model", (_LOAD, _UNLOAD)),
    **{f"load {name}": (name, (_LOAD,)) for name in UNLOADED if name.startswith("bad_")},
}


_DEADLY = {"load bad_no_file": "the load never ends"}


def _part_after(target: Target) -> Any:
    return _index("dependent_part", target)


def _rpc_control(name: str, target: Target) -> Any:
    load = service_pb2.RepositoryModelLoadRequest(model_name=name)
    unload = service_pb2.RepositoryModelUnloadRequest(model_name=name)
    loaded = rpc_facts(target.rpc("RepositoryModelLoad", load))
    return [loaded, rpc_facts(target.rpc("RepositoryModelUnload", unload)), _settled(name, "unload", target)]


def _statistics(name: str, ask: Callable[[Target], None], target: Target) -> Any:
    """Counts of a model after these requests, from both protocols; times by whether there are any."""
    ask(target)
    return _steady(lambda: _counts(name, target))


def _counts(name: str, target: Target) -> Any:
    reply = target.http("GET", f"/v2/models/{name}/stats").document()["model_stats"]
    message = target.rpc("ModelStatistics", service_pb2.ModelStatisticsRequest(name=name)).document()
    return {"http": _timeless(reply), "grpc": _timeless(message["model_stats"])}


def _steady(read: Callable[[], Any]) -> Any:
    """What several readings in a row agree on: Triton counts a request to an ensemble only after it has answered it."""
    counts, num_equal = read(), 0
    while num_equal < _NUM_EQUAL:
        time.sleep(0.02)
        last, counts = counts, read()
        num_equal = num_equal + 1 if last == counts else 0
    return counts


def _timeless(document: Any, key: str = "") -> Any:
    if isinstance(document, dict):
        return {name: _timeless(value, name) for name, value in document.items()}
    if isinstance(document, list):
        return [_timeless(each) for each in document]
    return int(document) > 0 if key in ("ns", "last_inference") else document


def _ask_counted(target: Target) -> None:
    for request in (_ONE, _THREE, _ONE, _WRONG):
        request.ask(target, "grpc-raw")
        request.ask(target, "http-json")


def _ask_failing(target: Target) -> None:
    for way in ("fine", "raise", "NOT_FOUND", "no output"):
        Inference("counted_failing", (Input("INPUT0", "BYTES", (1,), (way,)),)).ask(target, "grpc-raw")


def _ask_repeat(target: Target) -> None:
    for number in (2, 0, -1, 3):
        request = Inference("counted_repeat", (Input("IN", "INT32", (1,), (number,)),)).message()
        target.stream([request])


def _ask_sequence(target: Target) -> None:
    for start, end in ((True, False), (False, False), (False, True), (False, False)):
        parameters = {"sequence_id": 9, "sequence_start": start, "sequence_end": end}
        Inference("counted_sequence", (Input("INPUT", "INT32", (1, 1), (1,)),), parameters=parameters).ask(
            target, "grpc-raw"
        )


def _ask_ensemble(target: Target) -> None:
    four = (1.0, 2.0, 3.0, 4.0)
    inputs = (Input("A", "FP32", (4,), four), Input("B", "FP32", (4,), four))
    for _ in range(2):
        Inference("counted_ensemble", inputs).ask(target, "grpc-raw")


_COUNTED: dict[str, Callable[[Target], None]] = {
    "counted": _ask_counted,
    "counted_failing": _ask_failing,
    "counted_repeat": _ask_repeat,
    "counted_sequence": _ask_sequence,
    "counted_ensemble": _ask_ensemble,
}


def _metrics(name: str, target: Target) -> Any:
    """Families with samples of this model, and the counts among them."""
    seen: dict[str, Any] = {}
    for line in target.metrics().splitlines():
        match = re.fullmatch(r"(nv_\w+)\{(.*)\} (\S+)", line)
        if match and f'model="{name}"' in match[2]:
            is_count = match[1].startswith("nv_inference") and not match[1].endswith("_us") and "_us_" not in match[1]
            labels = ",".join(sorted(re.findall(r'(\w+)="', match[2])))
            reason = "".join(re.findall(r'reason="(\w+)"', match[2]))
            seen[f"{match[1]} {labels} {reason}"] = float(match[3]) if is_count else "a time"
    return seen


def _families(target: Target) -> Any:
    """What each family of Triton's is, by name."""
    lines = target.metrics().splitlines()
    return {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE nv_")}


CASES = [
    *(Case(f"index: {name}", partial(_index, name)) for name in (*LOADED, "never", "bad_initialize", "no_such_model")),
    Case(
        "index: ready only",
        lambda target: sorted(
            row["name"] for row in target.http("POST", "/v2/repository/index", {"ready": True}).document()
        ),
    ),
    Case("index: of a repository", partial(_post, "/v2/repository/r/index", None)),
    *(Case(f"statistics: {name}", partial(_statistics, name, ask)) for name, ask in _COUNTED.items()),
    Case("statistics: part", partial(_statistics, "counted_part", lambda target: None)),
    Case("statistics: nothing", lambda target: http_facts(target.http("GET", "/v2/models/nothing/stats"), "nothing")),
    Case(
        "statistics: all",
        lambda target: sorted(row["name"] for row in target.http("GET", "/v2/models/stats").document()["model_stats"]),
    ),
    *(Case(f"metrics: {name}", partial(_metrics, name)) for name in (*_COUNTED, "counted_part")),
    Case("metrics: families", _families),
]

# They load and unload, and want servers of their own.
CONTROL_CASES = [
    *(
        Case(f"control: {name}", partial(_control, steps, model), _DEADLY.get(name, ""))
        for name, (model, steps) in _CONTROLS.items()
    ),
    Case("control: the part of an unloaded ensemble", _part_after),
    Case("control: over gRPC", partial(_rpc_control, "later")),
    Case("control: of nothing over gRPC", partial(_rpc_control, "no_such_model")),
    Case("control: of a bad model over gRPC", partial(_rpc_control, "bad_initialize")),
    Case("control: in a repository", partial(_post, "/v2/repository/r/models/later/load", None)),
]
