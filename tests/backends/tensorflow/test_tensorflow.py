"""SavedModels by TensorFlow, where it is installed, and a `.tflite` file that its converter wrote, by LiteRT."""

from __future__ import annotations

import base64
import gzip
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.clients import ProtocolClient
from support.contexts import context_of, instance_of, loaded
from support.serving import RunningServer, running_server

from modelserver.backend import InvalidArgumentError, ModelConfig, NotFoundError
from modelserver.backend.discovery import find_backend

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
CONFIG = ModelConfig(backend="tensorflow", max_batch_size=4)
# x [-1, 3] -> doubled [-1, 3] and sum [-1], by TFLiteConverter.from_saved_model; gzip.
FILE = """
H4sIAAAAAAACA3VUv2/TUBC+2qapihVCcUsFGSLEgBBKk8LERBSKaNVfai1gwoTaIEu2Izl2VTYGBgZGxg4dGBBiZGRg7sDEwNA/gIkJCRYw3z
2fXROVF33xe/fuvrv73rObRGTfWb1uUYuaNE8WNciEbYoMzAk2ogPgF/B1gugbkBhEOtaYwpvHtIrimGmsTInbBM4AIy/e9aOnjus9GaRBQprs
g4ZeZVmmy5yfozSkA9gMsdUAd5g+DjxX5WPb5z/5Pq/3AOa7IXtHiK3J/BzQ31i/t7S1vbyx7qwt2b3bPbuHOvNap7A/WfEN/ciJ0yjxQ8/Z9e
KRP4yUzxHwBfgEvAH2gddAIrEPpd5HpR6sX73MwbbLyjqpbEVOUloVmhtKt6vey+jS/Z/vJqQvQ2pcbC922x2iQ8nFnN12t8O2Ymz+zjIb+F7R
D+PWeN5Cu+fwfQHwGa2tLm+1+sMIfSee21b7lgqvlxUyR13sxb14C7wXznDgRyR1Pzgh/nQlHmO2IXPOZeJMi/PVpB9N4i3V73G8aHzRlPldid
UrsYV+eqVfHqf4nLAwgI9SJ+8fgoPdit6a4ntNeDK5px/gd5a1HsSJn+CGeG5/EAQ3O+JX1HEhO+abF3CeK+LDfPx3EldXfPKa55R+JCeQjxqs
eZsN0UAXLW1wct1hGiw8K2/GnHq3z/+Hw5JY0U7ju7oPnlk8t9NwIfbcdIfrc/zI9Xe80RgvlV8Nvvf/8rYE3EtnTEtD/fJ3b+wb4exB0aqemv
Cw/w/Ez+Q5Zkx1L0jtcAUruX3lL8wYa6vYBAAA
"""
SAVE = """
import sys, tensorflow as tf
class Model(tf.Module):
    @tf.function(
        input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x"), tf.TensorSpec([None], tf.string, name="t")]
    )
    def __call__(self, x, t):
        return {"doubled": x * 2.0, "upper": tf.strings.upper(t)}
model = Model()
tf.saved_model.save(model, sys.argv[1], signatures=model.__call__.get_concrete_function())
"""


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("models") / "lite"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.tflite").write_bytes(gzip.decompress(base64.b64decode(FILE)))
    (model / "config.pbtxt").write_text('backend: "tensorflow"\nmax_batch_size: 4\ndynamic_batching {}')
    return model


@pytest.fixture(scope="module")
def serving(lite: Path) -> Iterator[RunningServer]:
    with running_server(lite.parent) as server:
        yield server


def test_a_file_of_litert_is_served(serving: RunningServer, protocol: type[ProtocolClient]) -> None:
    with protocol(serving) as client:
        for rows in (ROWS, -ROWS[:1]):
            found = client.infer("lite", {"x": rows})
            assert found["doubled"].tolist() == (rows * 2).tolist()
            assert found["sum"].ravel().tolist() == rows.sum(axis=1).tolist()
        config = client.model_config("lite")
    assert [each["name"] for each in config["output"]] == ["doubled", "sum"]


def test_what_is_wrong_with_a_file_is_told(lite: Path, tmp_path: Path) -> None:
    backend = find_backend("tensorflow")
    whole = (lite / "1" / "model.tflite").read_bytes()
    (tmp_path / "1").mkdir()
    with pytest.raises(NotFoundError, match=r"none of model.savedmodel, saved_model.pb, model.tflite is in"):
        loaded(backend, context_of(tmp_path, config=CONFIG))
    for content in (b"", b"no model", whole[: len(whole) // 3]):
        (tmp_path / "1" / "model.tflite").write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=r"cannot read .*model.tflite: ."):
            loaded(backend, context_of(tmp_path, config=CONFIG))
    for parameters, message in (
        ({"TF_SIGNATURE_DEF": "other"}, "has no signature 'other', only serving_default: name one"),
        ({"TF_NUM_INTRA_THREADS": "many"}, "TF_NUM_INTRA_THREADS expects a number from 1 to 1024, got 'many'"),
    ):
        config = ModelConfig(backend="tensorflow", max_batch_size=4, parameters=parameters)
        with pytest.raises(InvalidArgumentError, match=message):
            loaded(backend, context_of(lite, config=config))


@pytest.mark.tool("tensorflow")
@pytest.mark.slow
def test_a_saved_model_is_served(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVE, str(tmp_path / "1" / "model.savedmodel")], check=True)
    instance = instance_of("tensorflow", context_of(tmp_path, config=CONFIG))
    found = instance.run({"x": ROWS, "t": np.array([b"a", b"b"], object)})
    assert found["doubled"].tolist() == (ROWS * 2).tolist()
    assert found["upper"].tolist() == [b"A", b"B"]
    (tmp_path / "1" / "model.savedmodel" / "saved_model.pb").write_bytes(b"no model")
    with pytest.raises(InvalidArgumentError, match=r"cannot read .*model.savedmodel: ."):
        loaded(find_backend("tensorflow"), context_of(tmp_path, config=CONFIG))
