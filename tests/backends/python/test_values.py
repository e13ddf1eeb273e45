"""What models of Triton's time hand over that is not quite what was asked for: none of it may end their process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from modelserver_backends.python import triton_python_backend_utils as pb_utils
from modelserver_backends.python.pb_error import integer_of, text_of
from support.contexts import context_of, instance_of, request_of
from support.python_models import write_model

from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse
from modelserver.errors import ServerError
from modelserver.execution.process.instance import ProcessInstance

SOURCE = """
    import json

    import numpy as np
    import triton_python_backend_utils as pb_utils

    PARAMETERS = {
        "fp64": {"a": np.float64(0.5)},
        "text": {np.str_("a"): np.str_("b")},
        "surrogate": {"a": "\\ud800"},
        "large": {"a": 1 << 63},
    }
    ELEMENTS = {"number": [5, -1], "none": [None, True], "mixed": [b"a", "b", 0.5, np.int64(3)], "half": ["\\udc80"]}
    NAMES = {"bytes": b"Y", "text": np.str_("Y"), "number": 5}


    class TritonPythonModel:
        def execute(self, requests):
            return [getattr(self, kind)(name) for kind, name in map(self.wish, requests)]

        def wish(self, request):
            return json.loads(request.parameters())["do"].split()

        def parameters(self, name):
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1))], parameters=PARAMETERS[name])

        def elements(self, name):
            array = np.array([*ELEMENTS[name], None], dtype=object)[:-1]  # which keeps it one of objects
            return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", array)])

        def named(self, name):
            return pb_utils.InferenceResponse([pb_utils.Tensor(NAMES[name], np.zeros(1))])

        def error(self, name):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError({"bytes": b"no", "half": "n\\udc80"}[name]))

        def fails(self, name):
            raise ValueError("n\\udc80")
"""
CONFIG = """
    input { name: "X" data_type: TYPE_FP32 dims: 1 }
    output { name: "Y" data_type: TYPE_FP64 dims: 1 }
    output { name: "TEXT" data_type: TYPE_STRING dims: -1 }
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessInstance]:
    instance = instance_of("python", context_of(write_model(tmp_path_factory.mktemp("values"), SOURCE, CONFIG)))
    yield instance
    instance.close()


@pytest.fixture(autouse=True)
def _same_process(model: ProcessInstance) -> Iterator[None]:
    pid = model.pid
    yield
    assert model.pid == pid, "the model's process has ended"


def answer(model: ProcessInstance, do: str) -> InferResponse | ServerError:
    request = request_of(X=np.zeros(1, np.float32))
    request.parameters = {"do": do}
    try:
        (entry,) = model.execute([request])
    except ServerError as error:
        return error
    return entry


@pytest.mark.parametrize(("name", "expected"), [("fp64", {"a": 0.5}), ("text", {"a": "b"})])
def test_parameters_of_numpy_are_plain_ones(model: ProcessInstance, name: str, expected: dict[str, Any]) -> None:
    response = answer(model, f"parameters {name}")
    assert isinstance(response, InferResponse)
    assert response.parameters == expected
    assert [type(value) for value in response.parameters.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("name", "message"), [("surrogate", "'a' is not valid UTF-8"), ("large", "'a'.* does not fit 64 bits")]
)
def test_a_parameter_that_cannot_be_sent_fails_its_request(model: ProcessInstance, name: str, message: str) -> None:
    error = answer(model, f"parameters {name}")
    assert isinstance(error, ServerError)
    assert re.search(message, error.message)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("number", [b"5", b"-1"]), ("none", [b"None", b"True"]), ("mixed", [b"a", b"b", b"0.5", b"3"])],
)
def test_elements_of_text_are_what_str_makes_of_them(model: ProcessInstance, name: str, expected: list[bytes]) -> None:
    response = answer(model, f"elements {name}")
    assert isinstance(response, InferResponse)
    (tensor,) = response.outputs
    assert (tensor.datatype, tensor.data.tolist()) == (Datatype.BYTES, expected)


@pytest.mark.parametrize("name", ["bytes", "text"])
def test_a_name_may_be_bytes_or_of_numpy(model: ProcessInstance, name: str) -> None:
    response = answer(model, f"named {name}")
    assert isinstance(response, InferResponse)
    assert [tensor.name for tensor in response.outputs] == ["Y"]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("named number", "the name of a Tensor must be str or bytes, got int"),
        ("elements half", "surrogates not allowed"),
        ("error bytes", "^no$"),
        ("error half", r"^n\\udc80$"),
        ("fails now", r"ValueError: n\\udc80"),
    ],
)
def test_errors_are_told_whatever_is_in_them(model: ProcessInstance, do: str, message: str) -> None:
    error = answer(model, do)
    assert isinstance(error, ServerError)
    assert re.search(message, error.message)


def test_serialized_elements_are_what_str_makes_of_them() -> None:
    raw = pb_utils.serialize_byte_tensor(np.array([[1, "b"], [b"c", None]], dtype=object))
    assert pb_utils.deserialize_bytes_tensor(raw).tolist() == [b"1", b"b", b"c", b"None"]


@pytest.mark.parametrize("value", ["ä", "ä".encode(), np.str_("ä")])
def test_text_is_a_plain_str(value: object) -> None:
    assert text_of("it", value) == "ä"
    assert type(text_of("it", value)) is str


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7)])
def test_an_integer_is_a_plain_int(value: object) -> None:
    assert integer_of("it", value) == 7
    assert type(integer_of("it", value)) is int


@pytest.mark.parametrize("value", [1.0, "1", None, -1, 1 << 64])
def test_what_is_no_integer_is_named(value: object) -> None:
    with pytest.raises(TypeError, match=r"^it must be an integer"):
        integer_of("it", value)


@pytest.mark.parametrize("value", [1, None, ["a"]])
def test_what_is_no_text_is_named(value: object) -> None:
    with pytest.raises(TypeError, match=r"^it must be str or bytes"):
        text_of("it", value)
