"""Each abuse that the benchmark knows, for a few seconds: well-behaved clients are answered, and memory comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.abuse.attacks import ATTACKS

ROOT = Path(__file__).parent.parent.parent
SECONDS = 6
# Far above what is measured, so that a busy machine passes and a server that stops does not.
MOST_MS = 15_000
MOST_MORE_MIB = 256


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_well_behaved_clients_are_served_beside_every_attack(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.abuse", "--seconds", str(SECONDS), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    rows, memory_mib = figures["rows"], figures["memory_mib"]
    assert list(rows) == ["alone", *ATTACKS, "alone again"]
    assert {name: row["failures"] for name, row in rows.items() if row["failures"]} == {}, done.stdout
    assert {name: row["worst_ms"] for name, row in rows.items() if row["worst_ms"] > MOST_MS} == {}, done.stdout
    assert memory_mib["60 s after"] <= memory_mib["before"] + MOST_MORE_MIB, done.stdout
    attacked = {name: row["attacker"] for name, row in rows.items() if name in ATTACKS}
    assert {name: said for name, said in attacked.items() if said in ("", "{}")} == {}, "an attack did nothing"
