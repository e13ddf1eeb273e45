import numpy as np
import pytest

from modelserver.config.schema import ModelConfig, ModelInput, ModelOutput, ModelTensorReshape
from modelserver.config.signature import ModelSignature
from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.tensor import Tensor
from modelserver.errors import InvalidArgumentError


def signature(max_batch_size: int = 8) -> ModelSignature:
    config = ModelConfig(
        name="simple",
        max_batch_size=max_batch_size,
        input=(
            ModelInput(name="A", data_type=Datatype.FP32, dims=(16,)),
            ModelInput(name="B", data_type=Datatype.INT32, dims=(-1, 2)),
            ModelInput(name="C", data_type=Datatype.BYTES, dims=(1,), optional=True),
        ),
        output=(
            ModelOutput(name="X", data_type=Datatype.FP32, dims=(16,)),
            ModelOutput(name="Y", data_type=Datatype.FP32, dims=(1,), reshape=ModelTensorReshape(shape=())),
        ),
    )
    return ModelSignature(config)


def request(outputs: tuple[str, ...] | None = None, **shapes: tuple[int, ...]) -> InFlightRequest:
    kinds = {"A": Datatype.FP32, "B": Datatype.INT32, "C": Datatype.BYTES}
    inputs = {
        name: Tensor(name, kinds.get(name, Datatype.FP32), np.zeros(shape, kinds.get(name, Datatype.FP32).numpy))
        for name, shape in shapes.items()
    }
    return InFlightRequest(model_name="simple", version=None, inputs=inputs, outputs=outputs)


def test_a_fitting_request_learns_its_rows() -> None:
    fitting = request(A=(3, 16), B=(3, 7, 2), outputs=("Y",))
    signature().check(fitting)
    assert fitting.rows == 3


def test_without_batching_there_is_one_row() -> None:
    fitting = request(A=(16,), B=(5, 2))
    signature(max_batch_size=0).check(fitting)
    assert fitting.rows == 1


def test_an_optional_input_may_come_or_stay_away() -> None:
    signature().check(request(A=(1, 16), B=(1, 1, 2), C=(1, 1)))


def test_a_scalar_for_the_backend_keeps_its_reshape() -> None:
    assert signature().outputs["Y"].reshape == ()


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (
            {"A": (1, 16)},
            r"expected number of inputs between 2 and 3 but got 1 inputs.*missing required input\(s\) \['B'\]",
        ),
        ({"A": (1, 16), "B": (1, 1, 2), "Z": (1,)}, "unexpected inference input 'Z' for model 'simple'"),
        ({"A": (1, 15), "B": (1, 1, 2)}, r"unexpected shape for input 'A'.*Expected \[-1,16\], got \[1,15\]"),
        ({"A": (16,), "B": (16, 1, 2)}, r"Expected \[-1,16\], got \[16\].*max_batch_size is 8"),
        ({"A": (), "B": (1, 1, 2)}, "input 'A' has no shape but model requires batch dimension for 'simple'"),
        ({"A": (1, 16), "B": (1, 2)}, r"unexpected shape for input 'B'"),
        (
            {"A": (2, 16), "B": (3, 1, 2)},
            r"input 'B' batch size does not match other inputs for 'simple': \{'A': 2, 'B': 3\}",
        ),
        ({"A": (9, 16), "B": (9, 1, 2)}, "batch-size must be <= 8 for 'simple', got 9"),
        ({"A": (0, 16), "B": (0, 1, 2)}, "batch-size must be at least 1"),
    ],
)
def test_what_does_not_fit_is_told_precisely(shapes: dict[str, tuple[int, ...]], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        signature().check(request(**shapes))


def test_a_wrong_datatype_names_both() -> None:
    wrong = request(A=(1, 16), B=(1, 1, 2))
    wrong.inputs["A"] = Tensor("A", Datatype.FP64, np.zeros((1, 16)))
    with pytest.raises(InvalidArgumentError, match="input 'A' data-type is 'FP64', but model 'simple' expects 'FP32'"):
        signature().check(wrong)


def test_wrong_outputs_are_refused() -> None:
    told = r"unexpected inference output 'Z' for model 'simple', expected one of \['X', 'Y'\]"
    with pytest.raises(InvalidArgumentError, match=told):
        signature().check(request(A=(1, 16), B=(1, 1, 2), outputs=("Z", "Z")))
    with pytest.raises(InvalidArgumentError, match="unexpected inference output 'Z'"):
        signature().check(request(C=(1,), outputs=("Z",)))


def test_an_output_that_is_asked_for_twice_comes_once() -> None:
    """As with Triton; in the place where it was asked for first."""
    asked = request(A=(1, 16), B=(1, 1, 2), outputs=("Y", "X", "Y"))
    signature().check(asked)
    assert asked.outputs == ("Y", "X")


def shaped_signature() -> ModelSignature:
    inputs = (
        ModelInput(name="A", data_type=Datatype.FP32, dims=(-1,)),
        ModelInput(name="S", data_type=Datatype.FP32, dims=(2,), is_shape_tensor=True),
    )
    output = (ModelOutput(name="X", data_type=Datatype.FP32, dims=(-1, -1)),)
    return ModelSignature(ModelConfig(name="simple", max_batch_size=8, input=inputs, output=output))


def test_a_shape_tensor_has_no_batch_dimension() -> None:
    fitting = request(A=(3, 16), S=(2,))
    shaped_signature().check(fitting)
    assert fitting.rows == 3
    with pytest.raises(InvalidArgumentError, match=r"input 'S' .* Expected \[2\], got \[3,2\]\.$"):
        shaped_signature().check(request(A=(3, 16), S=(3, 2)))
