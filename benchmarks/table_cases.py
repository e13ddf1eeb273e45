"""Models of tables beside other Python servers, and beside the loop of their own library."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import requests
from benchmarks.cases import Settings
from benchmarks.load import Load
from benchmarks.report import Report, measure
from benchmarks.servers.ours import modelserver
from benchmarks.servers.tables import bentoml_table, litserve_table, mlserver_table

_FEATURES, _ROWS = 32, 32
_JSON = {"Content-Type": "application/json"}


def tables(settings: Settings, report: Report) -> None:
    """A scikit-learn classifier of one row against MLServer, LitServe and BentoML; of 32 rows against its library."""
    import joblib
    from sklearn.linear_model import LogisticRegression

    folder = settings.repository("table")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(512, _FEATURES))
    model = LogisticRegression(max_iter=500).fit(rows, rows[:, 0] > 0)
    file = folder / "table.joblib"
    joblib.dump(LogisticRegression(max_iter=500).fit(rows, (rows[:, 0] > 0).astype(int)), file)
    instances = json.dumps({"instances": rows[:1].tolist()}).encode()
    v2 = requests.http_json("table", "input-0", rows[:1])
    outputs = {**json.loads(v2.body), "outputs": [{"name": "predict"}]}
    v2 = replace(v2, body=json.dumps(outputs).encode())
    predict = Load("http", "/predict", instances, _JSON)
    with ExitStack() as stack:
        ours = stack.enter_context(modelserver(file, "--allow-pickle-models"))
        peers = {
            "MLServer": (stack.enter_context(mlserver_table(file)), v2),
            "LitServe": (stack.enter_context(litserve_table(file)), predict),
            "BentoML": (stack.enter_context(bentoml_table(file)), predict),
        }
        servers = [(server, load.at(32, seconds=settings.seconds)) for server, load in ((ours, v2), *peers.values())]
        measured = measure("q JSON", servers, rounds=settings.rounds, port="http")
        report.add(measured)
        for name, row in zip(peers, measured[1:], strict=True):
            what = f"scikit-learn, one row over HTTP JSON, c32: {name}'s CPU per request / ours"
            report.at_least("q", what, row.cpu_us / measured[0].cpu_us, 5.0)
        whole = requests.http_binary("table", "input-0", rows[:_ROWS])
        batch = measure(
            "q 32 rows",
            [(ours, whole.at(1, seconds=settings.seconds))],
            rounds=settings.rounds,
            port="http",
        )
    report.add(batch)
    ratio = batch[0].cpu_us / _loop_us(model, rows[:_ROWS])
    report.at_most(
        "q", "scikit-learn, 32 rows over HTTP binary, c1: CPU per request / the library's own loop", ratio, 1.1
    )


def _loop_us(model: Any, rows: Any) -> float:
    """CPU of the library's own answer to the same request, both outputs, in microseconds: the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(200):
            model.predict(rows)
            model.predict_proba(rows)
        best = min(best, (time.process_time() - start) / 200 * 1e6)
    return best
