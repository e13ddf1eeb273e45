"""Files whose reading does not return, as where the server of a file system is gone: pipes that nobody writes to."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.asking import ask, infer
from support.model_files import write_identity
from support.processes import serving_process


@pytest.mark.parametrize("file", ["config.pbtxt", pytest.param("1/model.py", marks=pytest.mark.slow)])
def test_other_models_load_while_one_hangs(tmp_path: Path, file: str) -> None:
    write_identity(tmp_path)
    hanging = write_identity(tmp_path, "hanging")
    if file != "config.pbtxt":
        (hanging / "config.pbtxt").write_text('backend: "python"')
    (hanging / file).unlink(missing_ok=True)
    os.mkfifo(hanging / file)
    with serving_process(tmp_path, "--model-control-mode=explicit", "--exit-timeout-secs=2") as server:
        server.wait_until_started()
        url = server.http_url
        with ThreadPoolExecutor() as pool:
            stuck = pool.submit(ask, url, "POST", "/v2/repository/models/hanging/load", b"{}")
            for _ in range(3):
                assert ask(url, "POST", "/v2/repository/models/identity/load", b"{}")[0] == 200
                assert infer(url, 1.0) == (200, 1.0)
                assert ask(url, "POST", "/v2/repository/models/identity/unload", json.dumps({}).encode())[0] == 200
            status, answer = ask(url, "GET", "/v2/health/live")
            assert status == 200, answer
            server.signal()
            server.wait(30)
            status, answer = stuck.result()
            assert status >= 400, answer
            assert answer["error"]
