"""An input or output as the documents of KServe's protocol have it, for the classes of other servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelserver.backend import Array, Datatype, InternalError, Tensor
from modelserver.embed.values import texts


class WireTensor:
    """A name, a shape, a datatype, elements and parameters. Elements are an array or a list, made when it is needed."""

    def __init__(
        self, name: str, shape: Sequence[int], datatype: str, data: Any = None, parameters: Any = None
    ) -> None:
        self.name = name
        self.shape = list(shape)
        self.datatype = datatype
        self.parameters = parameters
        self._data = data

    def take(self, tensor: Tensor) -> None:
        """Have the elements of a tensor of the server."""
        self._data = tensor.data

    @property
    def array(self) -> Array:
        """The elements in their shape; BYTES as they were given. Raises InternalError for elements that do not fit."""
        datatype = self._datatype()
        try:
            if isinstance(self._data, np.ndarray):
                array = self._data if datatype is Datatype.BYTES else self._data.astype(datatype.numpy, copy=False)
            elif datatype is Datatype.BYTES:
                array = _objects(_flat(self._data))
            else:
                array = np.asarray(self._data, datatype.numpy)
            return array.reshape(self.shape)
        except (TypeError, ValueError) as error:
            raise InternalError(f"'{self.name}': no {self.datatype} of {list(self.shape)}: {error}") from error

    def elements(self) -> list[Any]:
        """The elements in one list; BYTES as texts, where they are UTF-8."""
        if not isinstance(self._data, np.ndarray):
            return _flat(self._data)
        flat: list[Any] = self._data.reshape(-1).tolist()
        return [text_of(each) for each in flat] if self.datatype == "BYTES" else flat

    def tensor(self) -> Tensor:
        """As a tensor of the server."""
        array = self.array
        return Tensor(self.name, self._datatype(), texts(array) if self.datatype == "BYTES" else array)

    def document(self) -> dict[str, Any]:
        """As in JSON."""
        written: dict[str, Any] = {
            "name": self.name,
            "shape": self.shape,
            "datatype": self.datatype,
            "data": self.elements(),
        }
        return written if not self.parameters else {**written, "parameters": self.parameters}

    def _datatype(self) -> Datatype:
        try:
            return Datatype(self.datatype)
        except ValueError:
            raise InternalError(f"'{self.name}': there is no datatype '{self.datatype}'") from None


def datatype_of(array: Array) -> str:
    """The datatype that carries arrays of this kind. Raises InternalError if none does."""
    try:
        name: str = Datatype.from_numpy(array.dtype).value
    except KeyError:
        raise InternalError(f"no datatype carries arrays of {array.dtype}") from None
    return name


def text_of(element: Any) -> Any:
    """Bytes as a text, if they are UTF-8."""
    try:
        return element.decode() if isinstance(element, bytes) else element
    except UnicodeDecodeError:
        return element


def tensors_of_document(document: Mapping[str, Any]) -> list[Tensor]:
    """The outputs of a response in JSON. Raises InternalError."""
    try:
        return [
            WireTensor(each["name"], each["shape"], each["datatype"], each["data"]).tensor()
            for each in document["outputs"]
        ]
    except (KeyError, TypeError) as error:
        raise InternalError(f"the model's response is not one of KServe's protocol: {error!r}") from error


def _flat(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1).tolist())
    if not isinstance(value, list | tuple):
        return [value]
    return [element for each in value for element in (_flat(each) if isinstance(each, list | tuple) else [each])]


def _objects(elements: list[Any]) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array
