from pathlib import Path

import pytest

from modelserver.repository import devices


def test_gpus_are_found_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia1", "nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia1x", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    assert devices.gpu_ids() == (0, 1, 10)
