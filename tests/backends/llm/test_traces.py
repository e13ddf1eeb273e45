"""What an OpenTelemetry trace tells of a language model's phases, wherever its engine lives."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clients import HttpClient
from support.llm_models import arrays, write_llm
from support.otlp_receiver import otlp_receiver
from support.serving import running_server
from support.tiny_checkpoints import write_checkpoint


@pytest.mark.parametrize("has_process", [False, True], ids=["thread", "process"])
def test_phases_of_a_language_model_have_spans(has_process: bool, tmp_path: Path) -> None:
    parameters = {"instance_in_process": str(has_process).lower(), "kv_cache_memory_bytes": 8 << 20, "num_threads": 1}
    write_llm(tmp_path / "models", "llm", write_checkpoint(tmp_path / "checkpoint", seed=0), **parameters)
    inputs = arrays(
        text_input="the model", sampling_parameters={"temperature": 0, "max_tokens": 6, "n": 2, "ignore_eos": True}
    )
    with otlp_receiver() as receiver:
        flags = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={receiver.url}")
        with running_server(tmp_path / "models", trace_config=flags) as running, HttpClient(running) as client:
            client.infer("llm", inputs)
    spans = {span["name"]: span for span in receiver.spans}
    assert set(spans) == {"InferRequest", "llm", "queue", "prefill", "decode", "compute"}
    assert {spans[name]["parentSpanId"] for name in ("queue", "prefill", "decode")} == {spans["llm"]["spanId"]}
    times = [int(spans[name][f"{end}TimeUnixNano"]) for name in ("prefill", "decode") for end in ("start", "end")]
    assert times == sorted(times)
    assert times[1] == times[2]
    assert int(spans["queue"]["endTimeUnixNano"]) <= times[0]
    assert times[-1] <= int(spans["compute"]["endTimeUnixNano"])
