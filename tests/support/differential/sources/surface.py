"""The parts of pb_utils: what the one that its input names is, or answers, as JSON."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

CONFIG = {"input": [{"name": "A", "data_type": "TYPE_FP32"}], "output": [{"name": "B", "data_type": "TYPE_STRING"}]}


def attempt(call):
    try:
        return repr(call())
    except Exception as error:
        return f"raised {type(error).__name__}"


def describe():
    tensor = pb_utils.Tensor("T", np.arange(6, dtype=np.float32).reshape(2, 3))
    request = pb_utils.InferenceRequest(
        inputs=[tensor],
        requested_output_names=["B"],
        model_name="m",
        request_id="r",
        correlation_id=7,
        flags=3,
        timeout=9,
        parameters={"a": 1, "b": "x", "c": True},
    )
    error = pb_utils.TritonError("words", pb_utils.TritonError.NOT_FOUND)
    yield "tensor", lambda: (tensor.name(), tensor.is_cpu())
    yield "tensor shape", lambda: list(tensor.shape())
    yield "tensor datatype", lambda: int(tensor.triton_dtype())
    yield "dlpack", lambda: pb_utils.Tensor.from_dlpack("D", tensor.to_dlpack()).as_numpy().tolist()
    yield "dlpack device", lambda: tuple(int(each) for each in tensor.__dlpack_device__())
    yield "from numpy dlpack", lambda: pb_utils.Tensor.from_dlpack("D", np.arange(3)).as_numpy().tolist()
    yield "to numpy dlpack", lambda: np.from_dlpack(tensor).tolist()
    yield "text tensor", lambda: pb_utils.Tensor("T", np.array(["a", b"b"], dtype=object)).as_numpy().tolist()
    yield "fixed text tensor", lambda: pb_utils.Tensor("T", np.array([b"ab", b"c"])).as_numpy().tolist()
    yield "wrong tensor", lambda: pb_utils.Tensor("T", [1])
    yield "request id", lambda: (request.request_id(), request.correlation_id(), request.flags(), request.timeout())
    yield "request parameters", lambda: json.loads(request.parameters())
    yield "request inputs", lambda: [each.name() for each in request.inputs()]
    yield "request names", lambda: sorted(request.requested_output_names())
    yield "set flags", lambda: (request.set_flags(1), request.flags())
    yield "no model name", lambda: pb_utils.InferenceRequest(inputs=[tensor], requested_output_names=["B"]).exec()
    yield (
        "text correlation",
        lambda: pb_utils.InferenceRequest(
            inputs=[], requested_output_names=[], model_name="m", correlation_id="text"
        ).correlation_id(),
    )
    yield (
        "float parameter",
        lambda: pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="m", parameters={"a": 0.5}),
    )
    yield (
        "list parameter",
        lambda: pb_utils.InferenceRequest(inputs=[], requested_output_names=[], model_name="m", parameters={"a": [1]}),
    )
    yield "error", lambda: (error.message(), error.code() == pb_utils.TritonError.NOT_FOUND)
    yield (
        "codes",
        lambda: [
            hasattr(pb_utils.TritonError, name)
            for name in ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "CANCELLED")
        ],
    )
    yield "already exists", lambda: hasattr(pb_utils.TritonError, "ALREADY_EXISTS")
    yield "error default", lambda: pb_utils.TritonError("x").code() == pb_utils.TritonError.INTERNAL
    yield (
        "flags",
        lambda: (
            pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
            pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
            pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        ),
    )
    yield (
        "release flags",
        lambda: (
            pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL,
            pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
        ),
    )
    yield "memory", lambda: (int(pb_utils.TRITONSERVER_MEMORY_GPU), int(pb_utils.TRITONSERVER_MEMORY_CPU))
    yield "preferred memory", lambda: type(pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)).__name__
    yield (
        "response",
        lambda: (
            pb_utils.InferenceResponse([tensor]).has_error(),
            len(pb_utils.InferenceResponse([tensor]).output_tensors()),
        ),
    )
    yield "error response", lambda: pb_utils.InferenceResponse(error=error).error().message()
    yield "no error", lambda: pb_utils.InferenceResponse([tensor]).error()
    yield "response parameters", lambda: json.loads(pb_utils.InferenceResponse([], parameters={"a": 1}).parameters())
    yield "input config", lambda: pb_utils.get_input_config_by_name(CONFIG, "A")["data_type"]
    yield "no input config", lambda: pb_utils.get_input_config_by_name(CONFIG, "Z")
    yield "output config", lambda: pb_utils.get_output_config_by_name(CONFIG, "B")["data_type"]
    yield "no output config", lambda: pb_utils.get_output_config_by_name(CONFIG, "Z")
    yield "is decoupled", lambda: pb_utils.using_decoupled_model_transaction_policy(CONFIG)
    yield (
        "was decoupled",
        lambda: pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}}),
    )
    yield (
        "string to numpy",
        lambda: [
            np.dtype(pb_utils.triton_string_to_numpy(f"TYPE_{name}")).name
            for name in ("BOOL", "INT8", "INT64", "UINT8", "UINT64", "FP16", "FP32", "FP64", "STRING")
        ],
    )
    yield "bf16 to numpy", lambda: pb_utils.triton_string_to_numpy("TYPE_BF16")
    yield "unknown to numpy", lambda: pb_utils.triton_string_to_numpy("TYPE_X")
    yield "table", lambda: sorted(pb_utils.TRITON_STRING_TO_NUMPY)
    yield "bytes", lambda: pb_utils.serialize_byte_tensor(np.array([b"ab", b""], dtype=object)).tobytes()
    yield "no bytes", lambda: pb_utils.serialize_byte_tensor(np.array([], dtype=object)).tobytes()
    yield "from bytes", lambda: pb_utils.deserialize_bytes_tensor(b"\x02\x00\x00\x00ab").tolist()
    yield "logger", lambda: (pb_utils.Logger.log_verbose("x"), pb_utils.Logger.log("x", pb_utils.Logger.VERBOSE))
    yield (
        "log levels",
        lambda: [str(getattr(pb_utils.Logger, name)) for name in ("INFO", "WARNING", "ERROR", "VERBOSE")],
    )
    yield "output by name", lambda: pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([tensor]), "T").name()
    yield "no output by name", lambda: pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([tensor]), "Z")
    yield "no input by name", lambda: pb_utils.get_input_tensor_by_name(request, "Z")
    yield "model exception", lambda: str(pb_utils.TritonModelException("words"))
    yield "counter", counter
    yield "gauge", gauge
    yield "histogram", histogram
    yield "wrong metric", lambda: pb_utils.MetricFamily(name="bad", description="", kind=7)
    yield "unload nothing", lambda: pb_utils.is_model_ready("nothing")


def counter():
    family = pb_utils.MetricFamily(name="diff_counter", description="A counter", kind=pb_utils.MetricFamily.COUNTER)
    metric = family.Metric(labels={"of": "counter"})
    metric.increment(2.5)
    same = family.Metric(labels={"of": "counter"})
    same.increment(1)
    return metric.value(), attempt(lambda: metric.set(1)), attempt(lambda: metric.increment(-1)), same.value()


def gauge():
    family = pb_utils.MetricFamily(name="diff_gauge", description="A gauge", kind=pb_utils.MetricFamily.GAUGE)
    metric = family.Metric(labels={"of": "gauge"})
    metric.set(5)
    metric.increment(-2)
    return metric.value(), attempt(lambda: metric.observe(1))


def histogram():
    family = pb_utils.MetricFamily(name="diff_histogram", description="H", kind=pb_utils.MetricFamily.HISTOGRAM)
    metric = family.Metric(labels={"of": "histogram"}, buckets=[1, 10])
    metric.observe(2)
    return attempt(metric.value), attempt(lambda: metric.set(1)), attempt(lambda: family.Metric(labels={"of": "none"}))


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        wanted = pb_utils.get_input_tensor_by_name(request, "WAY").as_numpy()[0].decode()
        described = {name: attempt(call) for name, call in describe() if name == wanted}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("TOLD", np.array([json.dumps(described).encode()], dtype=object))]
        )
