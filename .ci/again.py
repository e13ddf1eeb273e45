"""Tells a test that fails from one that failed once beside others, on a machine that others use too.

The few tests that failed in the suite run again three times, alone. What fails once more has failed; the others are
named, to be mended: a test that depends on the machine is a fault of its own.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
MOST = 5
TIMES = 3


def main() -> int:
    failed = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        return 1
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(failed))
        names.flush()
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"@{names.name}"]
        if any(subprocess.call(pytest) for _ in range(TIMES)):
            return 1
    print(f"FLAKY: failed in the suite and passed {TIMES} times alone, to be mended:", *failed, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
