import numpy as np
import pytest

from modelserver.core.datatype import Datatype


@pytest.mark.parametrize("datatype", list(Datatype))
def test_config_names_round_trip(datatype: Datatype) -> None:
    assert Datatype.from_config_name(datatype.config_name) is datatype


def test_bytes_is_type_string_in_a_config() -> None:
    assert Datatype.from_config_name("TYPE_STRING") is Datatype.BYTES
    assert Datatype.BYTES.itemsize is None


@pytest.mark.parametrize("datatype", [d for d in Datatype if d not in (Datatype.BF16, Datatype.BYTES)])
def test_numpy_dtypes_round_trip(datatype: Datatype) -> None:
    assert Datatype.from_numpy(datatype.numpy) is datatype
    assert Datatype.from_numpy(datatype.numpy.newbyteorder(">")) is datatype
    assert datatype.itemsize == datatype.numpy.itemsize


@pytest.mark.parametrize("dtype", ["object", "S4", "U4"])
def test_text_like_arrays_are_bytes(dtype: str) -> None:
    assert Datatype.from_numpy(np.dtype(dtype)) is Datatype.BYTES


def test_an_array_without_wire_form_is_refused() -> None:
    with pytest.raises(KeyError):
        Datatype.from_numpy(np.dtype("complex64"))
