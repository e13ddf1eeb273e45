"""Model classes that were written for KServe and MLServer, served unmodified by `modelserver serve`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from support.processes import ServerProcess

PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")

KSERVE = """
    import argparse
    from typing import Dict, Union

    import numpy as np
    from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model, ModelServer, logging, model_server
    from kserve.errors import InvalidInput
    from kserve.utils.utils import generate_uuid, get_predict_input, get_predict_response

    class Scaler(Model):
        def __init__(self, name: str, factor: float):
            super().__init__(name)
            self.factor = factor
            self.load()

        def load(self):
            self.model = lambda rows: rows * self.factor
            self.ready = True
            return self.ready

        async def preprocess(self, payload: Union[Dict, InferRequest], headers: Dict[str, str] = None):
            if isinstance(payload, InferRequest) and payload.inputs[0].datatype == "BYTES":
                raise InvalidInput("numbers are expected")
            return payload

        def predict(self, payload, headers=None, response_headers=None):
            rows = get_predict_input(payload)
            return get_predict_response(payload, self.model(np.asarray(rows)), self.name)

        def postprocess(self, result, headers=None, response_headers=None):
            if isinstance(result, dict):
                return {**result, "factor": self.factor}
            return result

    class Shouter(Model):
        async def predict(self, payload: InferRequest, headers=None) -> InferResponse:
            texts = [text.upper() for text in payload.get_input_by_name("text").as_string()]
            output = InferOutput(name="loud", shape=[len(texts)], datatype="BYTES", data=texts)
            return InferResponse(generate_uuid(), self.name, [output], parameters={"words": len(texts)})

    class Plain(Model):
        def predict(self, payload, headers):
            return {"outputs": [{"name": "y", "shape": [2], "datatype": "INT64", "data": [1, 2]}]}

    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--factor", type=float, default=1.0)
    args, _ = parser.parse_known_args()

    if __name__ == "__main__":
        if args.configure_logging:
            logging.configure_logging(args.log_config_file)
        ModelServer(workers=1).start([Scaler("scaler", args.factor), Shouter("shouter"), Plain("plain")])
"""

MLSERVER = """
    from typing import List

    import numpy as np
    import pandas as pd
    from mlserver import MLModel
    from mlserver.codecs import NumpyCodec, PandasCodec, StringCodec, decode_args
    from mlserver.errors import MLServerError
    from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
    from mlserver.utils import get_model_uri

    class Sums(MLModel):
        async def load(self) -> bool:
            with open(await get_model_uri(self._settings, wellknown_filenames=["bias.txt"])) as file:
                self.bias = float(file.read())
            return True

        async def predict(self, payload: InferenceRequest) -> InferenceResponse:
            if not payload.inputs:
                raise MLServerError("there are no inputs", status_code=422)
            total = sum(self.decode(each, default_codec=NumpyCodec).sum() for each in payload.inputs) + self.bias
            unit = self.settings.parameters.extra["unit"]
            sums = NumpyCodec.encode_output("total", np.array([[total]]))
            outputs = [sums, StringCodec.encode_output("unit", [unit])]
            return InferenceResponse(id=payload.id, model_name=self.name, model_version=self.version, outputs=outputs)

    class Answers(MLModel):
        @decode_args
        async def predict(self, questions: List[str], weights: np.ndarray) -> List[str]:
            return [f"{question}? {weight}" for question, weight in zip(questions, weights.ravel())]

    class Table(MLModel):
        async def predict(self, payload: InferenceRequest) -> InferenceResponse:
            frame = self.decode_request(payload, default_codec=PandasCodec)
            frame["both"] = frame["a"] * 2 + frame["name"].str.len()
            return self.encode_response(frame[["both", "name"]])
"""


@pytest.fixture(scope="module")
def kserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("kserve") / "model.py"
    path.write_text(textwrap.dedent(KSERVE))
    with closing(ServerProcess([str(path), *PORTS, "--", "--factor=3"])) as process:
        process.wait_until_started()
        yield process


def settings(directory: Path, **fields: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "model-settings.json").write_text(json.dumps(fields))


@pytest.fixture(scope="module")
def mlserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    import joblib
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    root = tmp_path_factory.mktemp("mlserver")
    (root / "settings.json").write_text(json.dumps({"debug": False, "http_port": 8080}))
    for name in ("Sums", "Answers", "Table"):
        directory = root / name.lower()
        settings(directory, name=name.lower(), implementation=f"runtime.{name}",
                 parameters={"uri": ".", "version": "2", "extra": {"unit": "kg"}})  # fmt: skip
        (directory / "runtime.py").write_text(textwrap.dedent(MLSERVER))
        (directory / "bias.txt").write_text("0.5")
    iris = root / "iris"
    settings(iris, name="iris", implementation="mlserver_sklearn.SKLearnModel", parameters={"uri": "./iris-lr.joblib"})
    joblib.dump(LogisticRegression(max_iter=500).fit(*load_iris(return_X_y=True)), iris / "iris-lr.joblib")
    with closing(ServerProcess([str(root), *PORTS, "--allow-pickle-models"])) as process:
        process.wait_until_started()
        yield process


def ask(url: str, model: str, inputs: list[dict[str, Any]], **rest: Any) -> httpx.Response:
    return httpx.post(f"http://{url}/v2/models/{model}/infer", json={"inputs": inputs, **rest})


ROWS = {"name": "anything", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4]]}


def test_a_kserve_model_answers_both_protocols(kserve: ServerProcess) -> None:
    url = kserve.http_url
    answer = httpx.post(f"http://{url}/v1/models/scaler:predict", json={"instances": [[1, 2], [3, 4]]}).json()
    assert answer == {"predictions": [[3.0, 6.0], [9.0, 12.0]], "factor": 3.0}
    (output,) = ask(url, "scaler", [ROWS]).json()["outputs"]
    assert output == {"name": "output-0", "datatype": "FP32", "shape": [2, 2], "data": [3.0, 6.0, 9.0, 12.0]}
    loud = ask(url, "shouter", [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]).json()
    assert (loud["outputs"][0]["data"], loud["parameters"]["words"]) == (["HELLO"], 1)
    assert ask(url, "plain", [ROWS]).json()["outputs"][0]["data"] == [1, 2]
    assert httpx.get(f"http://{url}/openapi.json").json()["paths"]["/v2/models/scaler/infer"]


def test_a_kserve_model_answers_grpc_and_binary_tensors(kserve: ServerProcess) -> None:
    rows = np.array([[1, 2]], np.float64)
    for module, url in ((grpcclient, kserve.grpc_url), (httpclient, kserve.http_url)):
        with closing(module.InferenceServerClient(url)) as client:
            given = module.InferInput("x", [1, 2], "FP64")
            given.set_data_from_numpy(rows)
            wanted = module.InferRequestedOutput("output-0")
            assert client.infer("scaler", [given], outputs=[wanted]).as_numpy("output-0").tolist() == [[3, 6]]


def test_errors_of_a_kserve_model_are_the_clients_answers(kserve: ServerProcess) -> None:
    texts = {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    refused = ask(kserve.http_url, "scaler", [texts])
    assert (refused.status_code, refused.json()["error"]) == (400, "numbers are expected")
    assert httpx.post(f"http://{kserve.http_url}/v1/models/scaler:predict", json={"rows": []}).status_code == 500


def test_mlserver_models_of_ones_own(mlserver: ServerProcess) -> None:
    url = mlserver.http_url
    total, unit = ask(url, "sums", [ROWS, {**ROWS, "name": "more"}]).json()["outputs"]
    assert (total["data"], unit["data"]) == ([20.5], ["kg"])
    assert httpx.get(f"http://{url}/v2/models/sums").json()["versions"] == ["2"]
    questions = {"name": "questions", "shape": [2, 1], "datatype": "BYTES", "data": ["who", "why"]}
    weights = {"name": "weights", "shape": [2], "datatype": "INT64", "data": [1, 2]}
    (output,) = ask(url, "answers", [questions, weights]).json()["outputs"]
    assert (output["name"], output["data"]) == ("output-0", ["who? 1", "why? 2"])
    lacking = ask(url, "answers", [questions])
    assert (lacking.status_code, lacking.json()["error"]) == (400, "the request has no input 'weights'")
    columns = [{"name": "a", "shape": [2], "datatype": "INT64", "data": [1, 2]}, {**questions, "name": "name"}]
    both, name = ask(url, "table", columns, parameters={"content_type": "pd"}).json()["outputs"]
    assert (both["shape"], both["data"], name["data"]) == ([2, 1], [5, 7], ["who", "why"])


def test_mlservers_runtimes_are_backends(mlserver: ServerProcess) -> None:
    rows = {"name": "predict", "shape": [1, 4], "datatype": "FP32", "data": [5.1, 3.5, 1.4, 0.2]}
    outputs = ask(mlserver.http_url, "iris", [rows], outputs=[{"name": "predict"}]).json()["outputs"]
    assert [(each["name"], each["data"]) for each in outputs] == [("predict", [0])]
    assert httpx.get(f"http://{mlserver.http_url}/v2/models/iris/config").json()["backend"] == "sklearn"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "m"}, "expected 'implementation' to be MODULE.CLASS"),
        ({"name": "m", "implementation": "mlserver_alibi_explain.A"}, "has no runtime 'mlserver_alibi_explain.A'"),
        ({"name": "m", "implementation": "json.Nothing"}, "there is no class Nothing in the module json"),
        ({"name": "m", "implementation": "mlserver_xgboost.XGBoostModel", "parameters": {"uri": "./no.ubj"}},
         "there is nothing at"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_served_say_why(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    settings(tmp_path, **fields)
    with closing(ServerProcess([str(tmp_path), *PORTS])) as process:
        process.process.wait(60)
        process.wait_for(message)
        assert process.process.returncode
