"""Files that are read again when they change, as families of the metrics."""

from __future__ import annotations

from modelserver.telemetry.file_reloads import FileReloads
from tests.support.metrics_pages import render_text


def lines_of(reloads: FileReloads) -> list[str]:
    lines = render_text(reloads.families()).decode().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_files_are_in_use_until_new_ones_are_no_good() -> None:
    reloads = FileReloads()
    assert lines_of(reloads) == []
    reloads.took("--tls-cert", {"--tls-cert": 100.0, "--tls-client-ca": 200.0})
    reloads.took("--api-keys-file")
    assert lines_of(reloads) == [
        'modelserver_reload_failures_total{flag="--api-keys-file"} 0',
        'modelserver_reload_failures_total{flag="--tls-cert"} 0',
        'modelserver_last_reload_successful{flag="--api-keys-file"} 1',
        'modelserver_last_reload_successful{flag="--tls-cert"} 1',
        'modelserver_certificate_not_after_timestamp_seconds{flag="--tls-cert"} 100.0',
        'modelserver_certificate_not_after_timestamp_seconds{flag="--tls-client-ca"} 200.0',
    ]
    reloads.failed("--tls-cert", "bad")
    assert 'modelserver_last_reload_successful{flag="--tls-cert"} 0' in lines_of(reloads)
    assert 'modelserver_last_reload_successful{flag="--api-keys-file"} 1' in lines_of(reloads)
    assert 'modelserver_certificate_not_after_timestamp_seconds{flag="--tls-cert"} 100.0' in lines_of(reloads), (
        "it stays"
    )
    reloads.took("--tls-cert", {"--tls-cert": 300.0})
    assert 'modelserver_last_reload_successful{flag="--tls-cert"} 1' in lines_of(reloads)
    assert 'modelserver_certificate_not_after_timestamp_seconds{flag="--tls-cert"} 300.0' in lines_of(reloads)
    assert 'modelserver_reload_failures_total{flag="--tls-cert"} 1' in lines_of(reloads)


def test_ports_that_share_files_count_a_failure_once() -> None:
    reloads = FileReloads()
    for version in ("first", "first", "first", "second", "second"):
        reloads.failed("--tls-cert", version)
    reloads.took("--tls-cert")
    reloads.failed("--tls-cert", "second")  # it came back
    assert 'modelserver_reload_failures_total{flag="--tls-cert"} 3' in lines_of(reloads)
