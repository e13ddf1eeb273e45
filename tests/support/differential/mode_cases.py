"""What the mode of a repository changes (none, poll, namespaces), and batches of requests of different shapes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from support.differential.facts import Case, http_facts, rpc_facts
from support.differential.inference import Inference, Input
from support.differential.models import Entry, config
from support.differential.target import Target
from tritonclient.grpc import service_pb2

_ECHO = {"inputs": ("INPUT0 FP32",), "outputs": ("OUTPUT0 FP32",)}
_STILL_S = 2.5  # two scans, and a load
_PATIENCE_S = 60.0
_NUM_TRIES = 20
_NUM_PREFERRED = 2  # of the models that form batches


def _company(ragged: str, more: str = "") -> Entry:
    text = config(
        inputs=(f"INPUT0 FP32 -1 {ragged}",),
        outputs=("COMPANY INT32 1", "SHAPE INT32 2", "SUM FP32 1"),
        max_batch_size=4,
        more="dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 2000000 }\n" + more,
    )
    return Entry(text, "company")


def _batch_input(kind: str, data_type: str = "INT32", source: str = "INPUT0") -> str:
    target = f'target_name: "EXTRA_{kind}" data_type: TYPE_{data_type}'
    return f'batch_input {{ kind: {kind} {target} source_input: "{source}" }}\n'


def _placed(kind: str) -> Entry:
    group = f"instance_group [ {{ count: 2 kind: {kind} }} ]"
    return Entry(config(inputs=("INPUT0 INT32 1",), outputs=("TOLD STRING 1",), more=group), "placed")


_RAGGED = ", allow_ragged_batch: true"
KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)
_ALL_KINDS = "".join(map(_batch_input, KINDS))

# In mode none.
FIXED: dict[str, Entry] = {
    "echo": Entry(config(**_ECHO, max_batch_size=8), "echo"),
    "regular": _company(""),
    "ragged": _company(_RAGGED),
    "ragged_told": _company(_RAGGED, _ALL_KINDS),
    "ragged_unbatched": Entry(config(inputs=(f"INPUT0 FP32 -1 {_RAGGED}",), outputs=("OUTPUT0 FP32",)), "echo"),
    "kind_model": _placed("KIND_MODEL"),
    "kind_cpu": _placed("KIND_CPU"),
    "kind_auto": _placed("KIND_AUTO"),
    "ragged_no_source": _company(_RAGGED, _batch_input("BATCH_ELEMENT_COUNT", source="NOTHING")),
    "ragged_wrong_type": _company(_RAGGED, _batch_input("BATCH_ELEMENT_COUNT", "FP64")),
}
# In mode poll, at the start.
POLLED: dict[str, Entry] = {
    "stays": Entry(config(**_ECHO), "echo"),
    "changes": Entry(config(**_ECHO, max_batch_size=2), "echo"),
    "goes": Entry(config(**_ECHO), "echo"),
    "breaks": Entry(config(**_ECHO), "echo"),
    "grows": Entry(config(**_ECHO), "echo"),
}
_COMES = Entry(config(**_ECHO), "echo")

_ENSEMBLE = (
    'platform: "ensemble"\nmax_batch_size: 0\n'
    'input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] }\n'
    'output { name: "B" data_type: TYPE_FP32 dims: [ -1 ] }\n'
    'ensemble_scheduling { step { model_name: "part" model_version: -1 '
    'input_map { key: "INPUT0" value: "A" } output_map { key: "OUTPUT0" value: "B" } } }\n'
)
_NEGATE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", -pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""
# With namespaces: the models of two repositories, some with equal names.
SPACES: dict[str, dict[str, Entry]] = {
    "first": {
        "part": Entry(config(**_ECHO), "echo"),
        "only_first": Entry(config(**_ECHO), "echo"),
        "first_pipeline": Entry(_ENSEMBLE),
        "pipeline": Entry(_ENSEMBLE),
    },
    "second": {
        "part": Entry(config(**_ECHO), files={"1/model.py": _NEGATE}),
        "second_pipeline": Entry(_ENSEMBLE),
        "pipeline": Entry(_ENSEMBLE),
    },
}


def _floats(*values: float, name: str = "INPUT0", rows: int = 0) -> Input:
    shape = (rows, len(values) // rows) if rows else (len(values),)
    return Input(name, "FP32", shape, values)


def _ask(model: str, target: Target, *, tensor: str = "INPUT0") -> Any:
    return Inference(model, (_floats(1.0, 2.0, name=tensor),)).ask(target, "http-json")


def _control(verb: str, name: str, target: Target) -> Any:
    rpc = {"load": "RepositoryModelLoad", "unload": "RepositoryModelUnload"}[verb]
    message = getattr(service_pb2, f"{rpc}Request")(model_name=name)
    over_http = target.http("POST", f"/v2/repository/models/{name}/{verb}", {})
    return {
        "http": http_facts(over_http, "not allowed"),
        "grpc": rpc_facts(target.rpc(rpc, message), "not allowed"),
    }


def _index(target: Target) -> list[Any]:
    """Names, versions and states; reasons by whether there is one."""
    rows = target.http("POST", "/v2/repository/index", {}).document()
    told = [{**row, "reason": bool(row.get("reason"))} for row in rows]
    return sorted(told, key=lambda row: (row["name"], row.get("version", ""), row.get("state", "")))


def _rows(name: str, target: Target) -> list[Any]:
    return [row for row in _index(target) if row["name"] == name]


def _together(model: str, shapes: tuple[int, ...], target: Target) -> Any:
    """Requests of one row each at the same time: what each saw.

    Asked again if a batch has more than the preferred rows: Triton makes one when its thread is late.
    """
    requests = [Inference(model, (_floats(*map(float, range(size)), rows=1),)) for size in shapes]
    seen: list[Any] = []
    for _ in range(_NUM_TRIES):
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda request: request.ask(target, "http-json"), requests))
        seen = [
            {output["name"]: output["data"] for output in answer["outputs"]} if "outputs" in answer else answer
            for answer in answers
        ]
        if all(each.get("COMPANY", [0])[0] <= _NUM_PREFERRED for each in seen):
            break
    return seen


def _polled(
    change: Callable[[Path], None],
    has_come: Callable[[Target], bool] | None,
    look: Callable[[Target], Any],
    target: Target,
) -> Any:
    """Change the files, wait until that has come (None: until it would have), and look."""
    assert target.repository is not None, "the fixture says where the files are"
    change(target.repository)
    if has_come is None:
        time.sleep(_STILL_S)
    else:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not has_come(target) and time.monotonic() < deadline_s:
            time.sleep(0.1)
    return look(target)


def _is_ready(name: str, target: Target) -> bool:
    return target.http("GET", f"/v2/models/{name}/ready").status == 200


def _limit(name: str, target: Target) -> Any:
    return target.http("GET", f"/v2/models/{name}/config").document().get("max_batch_size")


def _break(root: Path) -> None:
    (root / "breaks" / "config.pbtxt").write_text("nonsense {")


def _remove(root: Path) -> None:
    shutil.rmtree(root / "goes")


def _new_version(root: Path) -> None:
    (root / "grows" / "2").mkdir()
    (root / "grows" / "2" / "model.py").write_text((root / "grows" / "1" / "model.py").read_text())


def _metadata(name: str, target: Target) -> Any:
    return http_facts(target.http("GET", f"/v2/models/{name}"), name)


def _config_of(name: str, target: Target) -> Any:
    return http_facts(target.http("GET", f"/v2/models/{name}/config"), name)


def _placement(name: str, target: Target) -> Any:
    """What the instances are told; several are asked, in whatever order."""
    request = Inference(name, (Input("INPUT0", "INT32", (1,), (1,)),))
    answers = [request.ask(target, "grpc-raw") for _ in range(2)]
    told = [answer["outputs"][0]["data"][0] for answer in answers if "outputs" in answer]
    return {"num_answers": len(told), "kinds": [{**each, "name": re.sub(r"\d+$", "N", each["name"])} for each in told]}


NONE_CASES = [
    *(
        Case(f"none: {verb} {name}", partial(_control, verb, name))
        for verb in ("load", "unload")
        for name in ("echo", "no")
    ),
    *(Case(f"none: index of {name}", partial(_rows, name)) for name in ("echo", "regular", "no")),
    Case("none: it serves", partial(_ask, "echo")),
    *(Case(f"kinds: {kind}", partial(_placement, kind)) for kind in ("kind_model", "kind_cpu", "kind_auto")),
    *(Case(f"kinds: config of {kind}", partial(_config_of, kind)) for kind in ("kind_model", "kind_cpu", "kind_auto")),
    *(
        Case(f"ragged: {what} in {model}", partial(_together, model, shapes))
        for what, shapes in {"equal shapes": (3, 3), "different shapes": (3, 4), "four": (2, 3, 4, 5)}.items()
        for model in ("ragged", "ragged_told")
    ),
    Case("ragged: equal shapes in regular", partial(_together, "regular", (3, 3))),
    Case("ragged: different shapes in regular", partial(_together, "regular", (3, 4))),
    *(Case(f"ragged: config of {model}", partial(_config_of, model)) for model in ("ragged", "ragged_told")),
    *(
        Case(f"ragged: index of {model}", partial(_rows, model))
        for model in ("ragged_unbatched", "ragged_no_source", "ragged_wrong_type")
    ),
]

# In this order: each changes the files of one model, which no other case asks.
POLL_CASES = [
    *(Case(f"poll: {verb}", partial(_control, verb, "stays")) for verb in ("load", "unload")),
    Case("poll: index at the start", partial(_rows, "stays")),
    Case(
        "poll: a model comes",
        partial(
            _polled, lambda root: _COMES.write(root / "comes"), partial(_is_ready, "comes"), partial(_ask, "comes")
        ),
    ),
    Case(
        "poll: a config changes",
        partial(
            _polled,
            lambda root: (root / "changes" / "config.pbtxt").write_text(config(**_ECHO, max_batch_size=7)) and None,
            lambda target: _limit("changes", target) == 7,
            partial(_limit, "changes"),
        ),
    ),
    Case(
        "poll: a version comes",
        partial(
            _polled,
            _new_version,
            lambda target: {row.get("state") for row in _rows("grows", target)} == {"READY", "UNAVAILABLE"},
            lambda target: {"metadata": _metadata("grows", target), "index": _rows("grows", target)},
        ),
    ),
    Case(
        "poll: a config breaks",
        partial(
            _polled, _break, None, lambda target: {"ask": _ask("breaks", target), "index": _rows("breaks", target)}
        ),
    ),
    Case(
        "poll: a model goes",
        partial(
            _polled,
            _remove,
            lambda target: {row.get("state") for row in _rows("goes", target)} <= {"UNAVAILABLE"},
            lambda target: {"ask": _ask("goes", target), "index": _rows("goes", target)},
        ),
    ),
    Case("poll: what was not touched", partial(_ask, "stays")),
]

SPACE_CASES = [
    Case("spaces: index", _index),
    Case("spaces: a name of one repository", partial(_ask, "only_first")),
    Case("spaces: a name of two repositories", partial(_ask, "part")),
    *(
        Case(f"spaces: {model} finds its own part", partial(_ask, model, tensor="A"))
        for model in ("first_pipeline", "second_pipeline", "pipeline")
    ),
    *(Case(f"spaces: metadata of {model}", partial(_metadata, model)) for model in ("only_first", "part", "no")),
    Case("spaces: config of an ensemble", partial(_config_of, "first_pipeline")),
    Case(
        "spaces: ready",
        lambda target: {name: _is_ready(name, target) for name in ("only_first", "part", "pipeline", "no")},
    ),
    Case(
        "spaces: statistics",
        lambda target: sorted(
            row["name"] for row in target.http("GET", "/v2/models/stats").document().get("model_stats", ())
        ),
    ),
    Case(
        "spaces: labels of metrics",
        lambda target: sorted(
            re.sub(r'namespace="[^"]*/', 'namespace="', line.partition(" ")[0])
            for line in target.metrics().splitlines()
            if line.startswith("nv_inference_request_success{")
        ),
    ),
]
