"""Answers of a served model over both protocols: in the order of the samples, whatever is in flight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.client.endpoint import Endpoint, endpoint_at
from modelserver.config.message import config_from_json
from modelserver.config.schema import ModelConfig
from modelserver.core.datatype import Datatype
from modelserver.errors import ServerError, UnavailableError
from modelserver.toolkit.samples import Samples
from modelserver.toolkit.tuning.served_answers import served_answers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    own = tmp_path_factory.mktemp("answers")
    write_identity(own, "numbers")
    write_identity(own, "texts", data_type="TYPE_STRING")
    with running_server(own) as running:
        yield running


def asked(server: RunningServer, model: str, *, is_grpc: bool) -> tuple[Endpoint, ModelConfig]:
    tuned = endpoint_at(server.grpc_url if is_grpc else f"http://{server.http_url}", is_grpc=is_grpc)
    return tuned, config_from_json(tuned.control().model_config(model), source=model)


@pytest.mark.parametrize("is_grpc", [False, True])
@pytest.mark.parametrize(("rows", "num_inflight"), [(1, 5), (3, 2), (0, 64)])
def test_answers_come_in_the_order_of_the_samples(
    server: RunningServer, is_grpc: bool, rows: int, num_inflight: int
) -> None:
    tuned, config = asked(server, "numbers", is_grpc=is_grpc)
    array = np.arange(40, dtype=config.input[0].data_type.numpy).reshape(20, 2)
    found = served_answers(tuned, config, Samples({"INPUT0": array}), rows=rows, num_inflight=num_inflight)
    assert found.keys() == {"OUTPUT0"}
    np.testing.assert_array_equal(found["OUTPUT0"], array)
    assert found["OUTPUT0"].dtype == array.dtype


@pytest.mark.parametrize("is_grpc", [False, True])
def test_texts_come_back_and_errors_are_the_servers(server: RunningServer, is_grpc: bool) -> None:
    tuned, config = asked(server, "texts", is_grpc=is_grpc)
    assert config.input[0].data_type is Datatype.BYTES
    array = np.array([[b"one"], [b"two"], ["drei ü".encode()]], object)
    found = served_answers(tuned, config, Samples({"INPUT0": array}), rows=1, num_inflight=2)
    assert found["OUTPUT0"].tolist() == array.tolist()

    tuned, config = asked(server, "numbers", is_grpc=is_grpc)
    wrong = Samples({"INPUT0": np.zeros((4, 1, 1), config.input[0].data_type.numpy)})
    with pytest.raises(ServerError, match="INPUT0"):
        served_answers(tuned, config, wrong, rows=1, num_inflight=2)
    nobody = endpoint_at("localhost:1", is_grpc=is_grpc)
    with pytest.raises(UnavailableError):
        served_answers(nobody, config, wrong, rows=1, num_inflight=2)
