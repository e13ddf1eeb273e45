"""The parts of pb_utils: what the one that its input names is, or answers, as JSON."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

CONFIG = {"input": [{"name": "A", "data_type": "TYPE_FP32"}], "output": [{"name": "B", "data_type": "TYPE_STRING"}]}


def attempt(call):
    try:
        return repr(call())
    except pb_utils.TritonModelException as error:
        return (
            f"raised TritonModelException: {error}"
            if "should not be empty" in str(error)
            else "raised TritonModelException"
        )
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
    yield "arguments", lambda: {name: attempt(call) for name, call in arguments()}


def made_request(**changes):
    arguments = {"inputs": [pb_utils.Tensor("I", np.zeros(1))], "requested_output_names": ["B"], "model_name": "m"}
    return len(pb_utils.InferenceRequest(**{**arguments, **changes}).inputs())


def arguments():
    tensor = pb_utils.Tensor("T", np.zeros(1))
    for name in ("inputs", "requested_output_names", "model_name", "model_version", "flags", "timeout", "parameters"):
        yield f"no {name}", lambda name=name: made_request(**{name: None})
    for name in ("request_id", "correlation_id", "preferred_memory", "trace"):
        yield f"no {name}", lambda name=name: made_request(**{name: None})
    yield "an input that is None", lambda: made_request(inputs=[None], request_id="r")
    yield "an input that is an array", lambda: made_request(inputs=[np.zeros(1)])
    yield "an output name that is None", lambda: made_request(requested_output_names=[None])
    yield "an empty output name", lambda: made_request(requested_output_names=[""], request_id="r")
    yield "one text as output names", lambda: made_request(requested_output_names="OUTPUT")
    yield "a tuple of inputs", lambda: made_request(inputs=(tensor,))
    yield "a correlation that is a float", lambda: made_request(correlation_id=1.5)
    yield "a correlation that is a bool", lambda: made_request(correlation_id=True)
    yield "a version that is text", lambda: made_request(model_version="1")
    yield "a version that is a float", lambda: made_request(model_version=1.5)
    yield "a request id that is a number", lambda: made_request(request_id=1)
    yield "negative flags", lambda: made_request(flags=-1)
    yield "large flags", lambda: made_request(flags=1 << 32)
    yield "a memory that is a number", lambda: made_request(preferred_memory=1)
    yield "a memory type that is a number", lambda: type(pb_utils.PreferredMemory(1)).__name__
    yield "no memory type", lambda: pb_utils.PreferredMemory(None)
    yield "no device", lambda: pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, None)
    yield "a trace that is text", lambda: made_request(trace="00-1-1-01")
    yield "parameters that are a list", lambda: made_request(parameters=[1])
    yield "a response of None", lambda: pb_utils.InferenceResponse(None)
    yield "a response of no tensor", lambda: pb_utils.InferenceResponse([None])
    yield "a response of nothing", lambda: len(pb_utils.InferenceResponse([]).output_tensors())
    yield "a response of a tuple", lambda: len(pb_utils.InferenceResponse((tensor,)).output_tensors())
    yield "a response of a tensor", lambda: pb_utils.InferenceResponse(tensor)
    yield "a response of arrays", lambda: pb_utils.InferenceResponse([np.zeros(1)])
    yield "an error that is text", lambda: pb_utils.InferenceResponse([], "words")
    yield "no name of a tensor", lambda: pb_utils.Tensor(None, np.zeros(1))
    yield "an empty name of a tensor", lambda: pb_utils.Tensor("", np.zeros(1))
    yield "no array", lambda: pb_utils.Tensor("T", None)
    yield "no name and no array", lambda: pb_utils.Tensor("", None)
    yield "no capsule", lambda: pb_utils.Tensor.from_dlpack("T", None)
    yield "an empty name and no capsule", lambda: pb_utils.Tensor.from_dlpack("", None)
    yield "an empty name of a capsule", lambda: pb_utils.Tensor.from_dlpack("", tensor.to_dlpack())
    yield "no level", lambda: pb_utils.Logger.log("words", None)
    yield "a level that is a number", lambda: pb_utils.Logger.log("words", 1)
    for name in ("log", "log_info", "log_warn", "log_error", "log_verbose"):
        yield f"{name} of None", lambda name=name: getattr(pb_utils.Logger, name)(None)
        yield f"{name} of a number", lambda name=name: getattr(pb_utils.Logger, name)(1)
    yield "log of bytes", lambda: pb_utils.Logger.log(b"words")
    yield "levels of the logger", lambda: str(pb_utils.Logger.LogLevel.WARNING)
    yield "an error without words", lambda: pb_utils.TritonError(None)
    yield "an error of a number", lambda: pb_utils.TritonError(1)
    yield "an error without a code", lambda: pb_utils.TritonError("words", None)
    yield "an error of a code that is a number", lambda: type(pb_utils.TritonError("words", 2)).__name__
    yield "no kind of a metric", lambda: pb_utils.MetricFamily("no_kind", "words", None)
    yield "a kind that is a number", lambda: pb_utils.MetricFamily("no_kind", "words", 0)
    yield "no name of a metric", lambda: pb_utils.MetricFamily(None, "words", pb_utils.MetricFamily.COUNTER)
    yield "no name of a model", lambda: pb_utils.is_model_ready(None)
    yield "no version of a model", lambda: pb_utils.is_model_ready("m", None)
    yield "load without a name", lambda: pb_utils.load_model(None)
    yield "load without a config", lambda: pb_utils.load_model("m", None)
    yield "load of files that are a list", lambda: pb_utils.load_model("m", "", [1])
    yield "unload without a name", lambda: pb_utils.unload_model(None)
    yield "unload with dependents None", lambda: pb_utils.unload_model("nothing", None)


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
