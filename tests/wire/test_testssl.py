"""testssl.sh looks for weak protocols, weak suites, and the holes that TLS has had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.certificates import Authority
from support.tools import run_tool
from support.wires import running_wire

from modelserver.wire.tls import TlsFiles

# Protocols, suites, forward secrecy, preferences, vulnerabilities.
CHECKS = ("-p", "-s", "-f", "-P", "-U")
REFUSED = ("SSLv2", "SSLv3", "TLS1", "TLS1_1", "cipherlist_NULL", "cipherlist_aNULL", "cipherlist_EXPORT")


@pytest.mark.tool("testssl")
@pytest.mark.slow
def test_testssl_finds_nothing_weak(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    found = tmp_path / "found.json"
    with running_wire(loop="uvloop", tls=TlsFiles(str(pair.certificate), str(pair.key))) as wire:
        arguments = ("--quiet", "--nodns", "none", "--add-ca", str(authority.certificate), "--jsonfile", str(found))
        run_tool("testssl", *CHECKS, *arguments, wire.url, input_=b"", timeout_s=110)
        wire.expect_idle()
    findings = {entry["id"]: (entry["severity"], entry["finding"]) for entry in json.loads(found.read_text())}
    assert {finding[0] for name, finding in findings.items() if name != "engine_problem"} == {"OK", "INFO"}, findings
    assert [findings[name][1] for name in REFUSED] == ["not offered"] * len(REFUSED)
    assert findings["TLS1_2"][1] == "offered"
    assert findings["TLS1_3"][1].startswith("offered")
    assert findings["ALPN_HTTP2"][1] == "h2"
    assert findings["secure_client_renego"][1] == "not vulnerable"
