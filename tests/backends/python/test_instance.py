"""Models written for Triton, in their child processes."""

from __future__ import annotations

import json
import logging
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.contexts import context_of, instance_of, request_of
from support.python_models import write_model
from support.waiting import until_true

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import ConfigError, ErrorCode, InternalError, ServerError
from modelserver.execution.process.instance import ProcessInstance

ROOT = Path(__file__).resolve().parent.parent.parent.parent

# Does what the parameter `do` says; the answer is text.
OBEDIENT = """
    import asyncio
    import json
    import os
    import sys

    import numpy as np
    import triton_python_backend_utils as pb_utils
    import beside
    from . import beside as relative
    from shared import SHARED


    class TritonPythonModel:
        def initialize(self, args):
            self.args = args
            print("initialized", flush=True)

        def execute(self, requests):
            answers = []
            for request in requests:
                parameters = json.loads(request.parameters())
                answer = getattr(self, parameters.get("do", "echo"))(request)
                if answer == "broken batch":
                    return None
                if answer == "short batch":
                    return answers
                if isinstance(answer, str):
                    tensor = pb_utils.Tensor("TEXT", np.array([answer], dtype=object))
                    answer = pb_utils.InferenceResponse(output_tensors=[tensor])
                answers.append(answer)
            return answers

        def finalize(self):
            print("finalized")

        def echo(self, request):
            tensor = pb_utils.get_input_tensor_by_name(request, "X")
            outputs = [pb_utils.Tensor("Y", tensor.as_numpy() * 2), pb_utils.Tensor("EXTRA", np.zeros(1))]
            return pb_utils.InferenceResponse(outputs, parameters={"b": True, "i": 3, "s": "x", "f": 0.25})

        def tell_args(self, request):
            return json.dumps(self.args)

        def tell_files(self, request):
            return json.dumps([__file__, __name__, pb_utils.get_model_dir(), beside.VALUE, relative.VALUE, SHARED])

        def tell_request(self, request):
            return json.dumps([request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                               sorted(request.requested_output_names()), request.is_cancelled()])

        def tell_trace(self, request):
            return request.trace().get_context() or "null"

        def write_input(self, request):
            array = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            array += 1
            return str(float(array.sum()))

        def refuse(self, request):
            error = pb_utils.TritonError("not this one", pb_utils.TritonError.NOT_FOUND)
            return pb_utils.InferenceResponse(error=error)

        def raise_error(self, request):
            raise RuntimeError("out of luck")

        def leave_by_exit(self, request):
            raise SystemExit("out of here")

        def interrupt(self, request):
            raise KeyboardInterrupt

        def cancel(self, request):
            raise asyncio.CancelledError("a task")

        def raise_model_exception(self, request):
            raise pb_utils.TritonModelException("as the author wants")

        def wrong_dtype(self, request):
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(2))])

        def wrong_type(self, request):
            return {"Y": 1}

        def no_list(self, request):
            return "broken batch"

        def too_few(self, request):
            return "short batch"

        def call_another(self, request):
            return pb_utils.InferenceRequest(model_name="o", requested_output_names=[], inputs=[]).exec()

        def speak(self, request):
            pb_utils.Logger.log_warn("two\\nlines")
            pb_utils.Logger.log("plain", pb_utils.Logger.VERBOSE)
            print("printed")
            return "spoken"

        def fork(self, request):
            leave = json.loads(request.parameters())["leave"]
            copy = os.fork()
            if not copy:
                if leave == "exit":
                    sys.exit(3)
                if leave == "raise":
                    raise RuntimeError("in the copy")
                return "from the copy"
            return json.dumps(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))

        def leave(self, request):
            os._exit(7)
"""
CONFIG = """
    input { name: "X" data_type: TYPE_FP32 dims: -1 }
    output { name: "Y" data_type: TYPE_FP32 dims: -1 }
    output { name: "TEXT" data_type: TYPE_STRING dims: 1 }
"""
FILES = {"1/beside.py": "VALUE = 'beside'\n", "shared.py": "SHARED = 'shared'\n"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("repository"), OBEDIENT, CONFIG, FILES)


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[ProcessInstance]:
    instance = instance_of("python", context_of(directory))
    yield instance
    instance.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ProcessInstance]]:
    """Starts the model of a source; it is closed after the test."""
    started: list[ProcessInstance] = []

    def start_one(source: str, config: str = CONFIG) -> ProcessInstance:
        started.append(instance_of("python", context_of(write_model(tmp_path, source, config))))
        return started[-1]

    yield start_one
    for instance in started:
        instance.close()


def request(do: str = "echo", **fields: Any) -> InFlightRequest:
    made = request_of(X=np.array([1, 2], np.float32))
    made.parameters = {"do": do}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def response(entry: InferResponse | ServerError) -> InferResponse:
    assert isinstance(entry, InferResponse), entry
    assert entry.error is None
    return entry


def told(model: ProcessInstance, do: str, **fields: Any) -> Any:
    (entry,) = model.execute([request(do, **fields)])
    (tensor,) = response(entry).outputs
    return json.loads(tensor.data[0])


# ---- what works


def test_add_sub_of_the_example_repository() -> None:
    instance = instance_of("python", context_of(ROOT / "model_repository" / "add_sub"))
    try:
        left, right = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
        (entry,) = instance.execute([request_of(INPUT0=left, INPUT1=right)])
        answer = {tensor.name: tensor.data.tolist() for tensor in response(entry).outputs}
        assert answer == {"OUTPUT0": [1, 2, 3, 4], "OUTPUT1": [-1, 0, 1, 2]}
    finally:
        instance.close()


def test_outputs_are_cut_to_the_config_and_the_request(model: ProcessInstance) -> None:
    entries = model.execute([request(), request(outputs=("TEXT",)), request(outputs=("Y",))])
    assert [[tensor.name for tensor in response(entry).outputs] for entry in entries] == [["Y"], [], ["Y"]]
    assert response(entries[0]).outputs[0].data.tolist() == [2, 4]
    assert response(entries[0]).parameters == {"b": True, "i": 3, "s": "x", "f": 0.25}


def test_initialize_gets_all_seven_arguments_as_text(model: ProcessInstance, directory: Path) -> None:
    args = told(model, "tell_args")
    config = json.loads(args.pop("model_config"))
    assert (config["backend"], config["input"][0]["data_type"]) == ("python", "TYPE_FP32")
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0",
        "model_instance_device_id": "0",
        "model_repository": str(directory),
        "model_version": "1",
        "model_name": "m",
    }


def test_files_beside_the_model_can_be_imported(model: ProcessInstance, directory: Path) -> None:
    version = directory / "1"
    expected = [str(version / "model.py"), "1.model", str(version), "beside", "beside", "shared"]
    assert told(model, "tell_files") == expected


def test_the_request_is_seen_as_it_was_sent(model: ProcessInstance) -> None:
    fields = {"id": "r", "sequence_id": "s", "sequence_end": True, "timeout_us": 5, "is_cancelled": True}
    assert told(model, "tell_request", **fields) == ["r", "s", 2, 5, ["TEXT", "Y"], True]
    assert told(model, "tell_request", outputs=("TEXT",)) == ["", 0, 0, 0, ["TEXT"], False]


def test_the_clients_trace_is_seen(model: ProcessInstance) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert told(model, "tell_trace", trace_parent=parent) == {"traceparent": parent}
    assert told(model, "tell_trace") is None


def test_inputs_may_be_changed_in_place(model: ProcessInstance) -> None:
    made = request("write_input")
    (entry,) = model.execute([made])
    assert response(entry).outputs[0].data[0] == b"5.0"
    assert made.inputs["X"].data.tolist() == [1, 2]


def test_logger_and_prints_reach_the_log(model: ProcessInstance, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model.execute([request("speak")])
    model.execute([request()])
    expected = [
        (logging.WARNING, "m_0: two\nlines"),
        (logging.DEBUG, "m_0: plain"),
        (logging.INFO, "m_0: printed"),
    ]
    for _ in range(200):
        if len(caplog.records) >= len(expected):
            break
        model.execute([request()])
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == expected


@pytest.mark.parametrize("array_code", ["np.array(['a', 'ü'])", "np.array([b'a', 'ü'.encode()])"])
def test_text_in_any_numpy_form(start: Callable[..., ProcessInstance], array_code: str) -> None:
    source = f"""
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            async def execute(self, requests):
                tensor = pb_utils.Tensor("TEXT", {array_code})
                return [pb_utils.InferenceResponse([tensor]) for _ in requests]
    """
    (entry,) = start(source).execute([request()])
    (tensor,) = response(entry).outputs
    assert tensor.data.tolist() == [b"a", "ü".encode()]


def test_every_datatype_makes_the_round_trip(start: Callable[..., ProcessInstance]) -> None:
    names = [datatype.value for datatype in Datatype]
    config = "\n".join(
        f'input {{ name: "{name}" data_type: TYPE_{name} dims: -1 optional: true }}\n'
        f'output {{ name: "{name}" data_type: TYPE_{name} dims: -1 }}'.replace("TYPE_BYTES", "TYPE_STRING")
        for name in names
    )
    source = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([self.copy(tensor) for tensor in request.inputs()])
                        for request in requests]

            def copy(self, tensor):
                if tensor.name() == "BF16":
                    return pb_utils.Tensor.from_dlpack("BF16", tensor)
                return pb_utils.Tensor(tensor.name(), tensor.as_numpy())
    """
    inputs = {}
    for datatype in Datatype:
        raw: list[Any] = [b"", b"b\0"] if datatype is Datatype.BYTES else [0, 1]
        inputs[datatype.value] = Tensor(datatype.value, datatype, np.array(raw, datatype.numpy))
    (entry,) = start(source, config).execute([InFlightRequest(model_name="m", version=1, inputs=inputs)])
    answer = {tensor.name: tensor for tensor in response(entry).outputs}
    for name, sent in inputs.items():
        assert answer[name].datatype is sent.datatype
        assert answer[name].data.tolist() == sent.data.tolist()


def test_coroutines_of_a_model_share_one_event_loop(start: Callable[..., ProcessInstance]) -> None:
    source = """
        import asyncio
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            async def initialize(self, args):
                self.loop = asyncio.get_running_loop()

            async def execute(self, requests):
                is_same = asyncio.get_running_loop() is self.loop
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([is_same], np.float32))])]
    """
    (entry,) = start(source).execute([request()])
    assert response(entry).outputs[0].data.tolist() == [1]


def test_tasks_go_on_between_batches(start: Callable[..., ProcessInstance]) -> None:
    source = """
        import asyncio
        import sys
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def __init__(self):
                self.count = 0

            async def execute(self, requests):
                if not self.count:
                    self.tasks = [asyncio.create_task(self.tick()), asyncio.create_task(self.leave())]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([self.count], np.float32))])]

            async def tick(self):
                while True:
                    self.count += 1
                    await asyncio.sleep(0.001)

            async def leave(self):
                sys.exit(3)
    """
    instance = start(source)
    counts = [0.0]
    instance.execute([request()])

    def has_grown() -> bool:
        (entry,) = instance.execute([request()])
        counts.append(response(entry).outputs[0].data.tolist()[0])
        return counts[-1] > 20

    until_true(has_grown, "the task goes on, though another wanted to end the process")


def test_the_command_line_of_a_model_is_empty(start: Callable[..., ProcessInstance]) -> None:
    source = """
        import argparse
        import sys
        import numpy as np
        import triton_python_backend_utils as pb_utils

        options = argparse.ArgumentParser()
        options.add_argument("--size", type=int, default=7)
        SIZE = options.parse_args().size

        class TritonPythonModel:
            def execute(self, requests):
                assert sys.argv == [""], sys.argv
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([SIZE], np.float32))])]
    """
    (entry,) = start(source).execute([request()])
    assert response(entry).outputs[0].data.tolist() == [7]


def test_a_model_may_say_that_it_is_not_ready(start: Callable[..., ProcessInstance]) -> None:
    source = """
        class TritonPythonModel:
            def __init__(self):
                self.asked = 0

            def execute(self, requests):
                return []

            async def is_ready(self):
                self.asked += 1
                if self.asked % 3 == 0:
                    raise SystemExit("a library's way to say no")
                return self.asked % 3 == 1
    """
    instance = start(source)
    answers = {instance.is_ready() for _ in range(50)}
    assert answers == {True, False}


@pytest.mark.parametrize("body", ["return False", "return 'yes'", "raise ValueError", "time.sleep(30)"])
def test_a_model_is_not_ready_before_it_first_says_so(start: Callable[..., ProcessInstance], body: str) -> None:
    source = f"""
        import time

        class TritonPythonModel:
            def execute(self, requests):
                return []

            def is_ready(self):
                time.sleep(0.1)
                {body}
    """
    assert not start(source).is_ready()


# ---- what goes wrong


def test_an_error_response_fails_its_request_alone(model: ProcessInstance) -> None:
    entries = model.execute([request(), request("refuse"), request()])
    assert isinstance(entries[1], ServerError)
    assert (entries[1].code, entries[1].message) == (ErrorCode.NOT_FOUND, "not this one")
    assert response(entries[0]).outputs[0].data.tolist() == response(entries[2]).outputs[0].data.tolist() == [2, 4]


def test_an_output_of_another_datatype_is_sent_as_it_is(model: ProcessInstance) -> None:
    entries = model.execute([request("wrong_dtype"), request()])
    assert [response(entry).outputs[0].datatype for entry in entries] == [Datatype.FP64, Datatype.FP32]


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise_error", r"RuntimeError: out of luck\n\nAt:\n  .*/1/model\.py\(\d+\): raise_error\n  .*execute"),
        ("leave_by_exit", "SystemExit: out of here"),
        ("interrupt", "KeyboardInterrupt"),
        ("cancel", "CancelledError: a task"),
        ("raise_model_exception", r"TritonModelException: as the author wants\n\nAt:"),
        ("wrong_type", "object in the execute function return list, found type '<class 'dict'>'"),
        ("no_list", "Expected a list in the execute return, found type '<class 'NoneType'>'"),
        ("too_few", r"do not match .* InferenceRequest\(s\) size is:2, and InferenceResponse\(s\) size is:1"),
    ],
)
def test_an_exception_fails_every_request_of_the_batch(model: ProcessInstance, do: str, message: str) -> None:
    with pytest.raises(
        InternalError, match=rf"^Failed to process the request\(s\) for model 'm_0', message: (.|\n)*{message}"
    ):
        model.execute([request(), request(do)])
    assert model.is_ready()


@pytest.mark.parametrize(("leave", "status"), [("exit", 3), ("raise", 1), ("return", 1)])
def test_a_forked_copy_answers_nothing_and_takes_no_request(model: ProcessInstance, leave: str, status: int) -> None:
    assert told(model, "fork", parameters={"do": "fork", "leave": leave}) == status
    (entry,) = model.execute([request()])
    assert response(entry).outputs[0].data.tolist() == [2, 4]


def test_a_signal_ends_a_forked_copy_at_any_moment(start: Callable[..., ProcessInstance]) -> None:
    """A pool terminates its workers and waits for them; some have hardly begun."""
    source = """
        import os
        import signal
        import threading
        import time
        import numpy as np
        import triton_python_backend_utils as pb_utils

        NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

        def exit_code(number, wait_s=0.0):
            copy = os.fork()
            if copy == 0:
                time.sleep(60)  # far longer than the signal takes, whatever else the machine does
                os._exit(0)
            time.sleep(wait_s)
            os.kill(copy, signal.SIGUSR1)
            os.kill(copy, number)
            return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])

        def refuse(number, frame):
            if frame.f_code.co_filename != __file__:
                raise InterruptedError("this handler interrupts code that is not the model's")

        class TritonPythonModel:
            def initialize(self, args):
                signal.signal(signal.SIGUSR1, refuse)

            def execute(self, requests):
                codes = [exit_code(number, i * 1e-5) for number in NUMBERS for i in range(40)]
                thread = threading.Thread(target=lambda: codes.append(exit_code(signal.SIGTERM)))
                thread.start()
                thread.join()
                for number in NUMBERS:
                    os.kill(os.getpid(), number)  # the model's own process leaves them to the server
                codes += signal.pthread_sigmask(signal.SIG_BLOCK, ())
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(codes, np.float32))])]
    """
    # A shell lets what runs in the background ignore some of them, and the tests may run so.
    before = {number: signal.signal(number, _do_nothing) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        (entry,) = start(source).execute([request()])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    expected = [-number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for _ in range(40)]
    assert response(entry).outputs[0].data.tolist() == [*expected, -signal.SIGTERM]


def _do_nothing(_number: int, _frame: FrameType | None) -> None: ...


def test_a_crash_is_named_and_mended(model: ProcessInstance) -> None:
    with pytest.raises(InternalError, match="the process of m_0 exited with code 7"):
        model.execute([request("leave")])
    (entry,) = model.execute([request()])
    assert response(entry).outputs[0].data.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n        raise OSError('no weights')\n",
            r"OSError: no weights\n\nAt:\n  .*model\.py\(3\): initialize",
        ),
        ("class TritonPythonModel:\n    pass\n", r"class TritonPythonModel has no method execute\(self, requests\)"),
        ("class Model:\n    pass\n", "defines no class TritonPythonModel"),
    ],
)
def test_a_model_that_cannot_start_fails_its_load(
    start: Callable[..., ProcessInstance], source: str, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        start(source)


COMPANY_BASE = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class Base:
        def execute(self, requests):
            for request in requests:
                response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([7], np.float32))])
                getattr(request, self.how())().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return [None] * len(requests)

        def how(self):
            return "get_response_sender"
"""


def test_a_base_class_from_elsewhere_may_use_response_senders(
    start: Callable[..., ProcessInstance], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "site-packages"
    elsewhere.mkdir()
    (elsewhere / "company.py").write_text(textwrap.dedent(COMPANY_BASE))
    model = start(f"import sys; sys.path.append({str(elsewhere)!r})\nfrom company import Base as TritonPythonModel\n")
    assert model.answers_later


def test_senders_of_which_no_file_told_are_named(start: Callable[..., ProcessInstance]) -> None:
    source = textwrap.dedent(COMPANY_BASE).replace("get_response_sender", 'get_response_" + "sender')
    model = start(source.replace("class Base", "class TritonPythonModel"))
    with pytest.raises(InternalError, match="no file of it mentioned 'get_response_sender': mention it in model"):
        model.execute([request()])


def test_without_a_server_around_calls_of_other_models_are_answered_with_an_error(model: ProcessInstance) -> None:
    (entry,) = model.execute([request("call_another")])
    assert isinstance(entry, ServerError)
    assert entry.message.endswith("models can be called from within a server only")


@pytest.mark.parametrize(
    ("setting", "value", "unit"), [("stub-timeout-seconds", "soon", "seconds"), ("busy-wait-us", "-1", "microseconds")]
)
def test_a_setting_that_is_no_number_is_a_config_error(directory: Path, setting: str, value: str, unit: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}={value}: expected a number of {unit}"):
        instance_of("python", context_of(directory, options={setting: value}))
