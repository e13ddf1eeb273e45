"""Model files with damage: each load ends in a clear error or in a model that answers, and nothing else happens.

They are loaded in a child process, so that a library that crashes fails the test and not the run. In the default suite
some 30 of each kind, in `make nightly` a thousand.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

FILES = {
    "onnxruntime": "digits_onnx/1/model.onnx",
    "torchscript": "digits_torchscript/1/model.pt",
    "exported": "digits_export/1/model.pt2",
}
# Enough of each to see the kinds of damage below a few times.
NUM_QUICK = 17
NUM_NIGHTLY = 1000
_MOST_BYTES = 200
# A message that is longer shows pages of a library's own.
_MOST_TEXT = 1200


@pytest.mark.parametrize("kind", FILES)
def test_damage_is_an_error(kind: str, model_repository: Path, tmp_path: Path) -> None:
    check(kind, NUM_QUICK, model_repository, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", FILES)
def test_much_damage_is_an_error(kind: str, model_repository: Path, tmp_path: Path) -> None:
    check(kind, NUM_NIGHTLY, model_repository, tmp_path)


def check(kind: str, count: int, model_repository: Path, tmp_path: Path) -> None:
    source = model_repository / FILES[kind]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, __file__, str(source), str(tmp_path / "m"), str(count)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"the process died with {result.returncode}: {result.stdout[-300:]}{result.stderr}"
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert outcome["unclear"] == []
    assert outcome["num_refused"] > count // 4
    assert not result.stderr, "something was printed beside the errors"


def damaged(content: bytes, number: int) -> bytes:
    """The content with some damage; the same for the same number."""
    rng = random.Random(number)
    if zipfile.is_zipfile(io.BytesIO(content)) and number % 2:
        return _damaged_record(content, rng)
    data = bytearray(content)
    match number // 2 % 4:
        case 0:
            for _ in range(rng.randint(1, 10)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:  # where the structure is, rather than the weights
            data[rng.randrange(min(len(data), 4000))] = rng.randrange(256)
        case 2:
            del data[rng.randrange(len(data)) :]
        case _:
            begin, at = rng.randrange(len(data)), rng.randrange(len(data))
            data[at:at] = data[begin : begin + rng.randint(1, _MOST_BYTES)]
    return bytes(data)


def _damaged_record(content: bytes, rng: random.Random) -> bytes:
    """An archive that is whole, with damage in one of its records."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as given, zipfile.ZipFile(file, "w") as made:
        names = given.namelist()
        chosen = rng.choice(names)
        for name in names:
            record = bytearray(given.read(name))
            if name == chosen and record:
                for _ in range(rng.randint(1, 8)):
                    record[rng.randrange(len(record))] = rng.randrange(256)
            made.writestr(name, bytes(record))
    return file.getvalue()


def load_all(source: Path, directory: Path, count: int) -> dict[str, object]:
    """Runs in a process of its own: load and run each damaged file, and tell what came of them."""
    from support.contexts import context_of

    from modelserver.backend import Placement, ServerError
    from modelserver.backend.discovery import find_backend
    from modelserver.config.pbtxt import parse_pbtxt

    content = source.read_bytes()
    config = parse_pbtxt((source.parent.parent / "config.pbtxt").read_text(), "config.pbtxt").config
    backend_class = find_backend(config.backend or ("onnxruntime" if source.suffix == ".onnx" else "pytorch"))
    path = directory / "1" / source.name
    path.parent.mkdir(parents=True)
    num_refused, unclear = 0, []
    for number in range(count):
        path.write_bytes(damaged(content, number))
        print(number, flush=True)  # the last one that is seen has killed the process
        try:
            context = context_of(directory, config=config)
            backend = backend_class(replace(context, config=backend_class.complete_config(context)))
            backend.load()
            instance = backend.create_instance(Placement("m_0"))
            instance.run({"image": np.zeros((1, 8, 8), np.float32)})  # type: ignore[union-attr]
        except ServerError as error:
            num_refused += 1
            if len(error.message) > _MOST_TEXT:
                unclear.append([number, error.message[:300]])
        except Exception as error:  # what the server would report as its own failure
            unclear.append([number, f"{type(error).__name__}: {error}"[:300]])
    return {"num_refused": num_refused, "unclear": unclear}


if __name__ == "__main__":
    print(json.dumps(load_all(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
