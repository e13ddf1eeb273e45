"""Packed weights in files: what a load takes from an earlier one, and when it packs again."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.kernels import PACKED_KERNELS
from modelserver_backends.llm.quantization import kept
from safetensors.torch import load_file, save_file
from support.generations import generate, loaded_engine

pytestmark = pytest.mark.usefixtures("kept_however_small")
PROMPT = list(range(20, 60))
Texts = list[tuple[list[int], list[float]]]


@pytest.fixture
def kept_however_small(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kept, "_LEAST_SECONDS", -1.0)
    monkeypatch.setattr(kept, "_LEAST_BYTES", 0)
    caplog.set_level(logging.INFO)


@pytest.fixture
def llama(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "llama"))


def started(place: Path, directory: Path, quantization: str = "int4", **options: object) -> Texts:
    chosen = {"quantization": quantization, "kept_weights_directory": str(directory), **options}
    with loaded_engine(place, **chosen) as engine:
        return generate(engine, [PROMPT, PROMPT[7:19]], 8)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)


if PACKED_KERNELS is not None:

    @pytest.mark.parametrize(("family", "quantization"), [("llama", "int4"), ("gemma2", "fp8"), ("mixtral", "int8")])
    def test_a_second_start_reads_what_the_first_kept(
        family: str,
        quantization: str,
        checkpoint: Callable[[str], Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A tied head and experts among them. No matrix is read again but those that stay in floats."""
        first = started(checkpoint(family), tmp_path / "kept", quantization)
        (file,) = files(tmp_path / "kept")
        written = file.stat().st_mtime_ns
        for name in ("weight", "weight_rows"):
            monkeypatch.setattr(f"modelserver_backends.llm.models.linear_tensors.LinearTensors.{name}", read_again)
        assert started(checkpoint(family), tmp_path / "kept", quantization) == first
        assert file.stat().st_mtime_ns > written, "used last now"

    @pytest.mark.parametrize("place", [5, 20, 40, -100], ids=["magic", "length", "description", "weights"])
    def test_a_damaged_file_is_written_again(
        place: int, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = started(llama, tmp_path / "kept")
        (file,) = files(tmp_path / "kept")
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[place] ^= 4
        for content in (bytes(damaged), whole[:-1], whole[:30], b""):
            file.write_bytes(content)
            caplog.clear()
            assert started(llama, tmp_path / "kept") == first
            assert "cannot be used, so weights are packed again" in caplog.text
            assert file.read_bytes() == whole

    @pytest.mark.parametrize("what", ["a pipe", "of another user", "of another name"])
    def test_a_file_that_others_may_have_put_there_is_not_read(
        what: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What a file says is what kernels read: one that says it wrongly would have them read anywhere."""
        first = started(llama, tmp_path / "kept")
        (file,) = files(tmp_path / "kept")
        if what == "a pipe":
            file.unlink()
            os.mkfifo(file)
        elif what == "of another user":
            monkeypatch.setattr(kept.os, "geteuid", lambda: os.getuid() + 1)
        else:
            started(llama, tmp_path / "kept", "int8")
            files(tmp_path / "kept")[-1].replace(file)
        assert started(llama, tmp_path / "kept") == first
        assert "cannot be used, so weights are packed again" in caplog.text

    def test_a_user_without_a_home_keeps_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As containers with a user of any number have them."""
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
        with loaded_engine(llama, quantization="int4") as engine:
            assert generate(engine, [PROMPT], 2)

    def test_another_checkpoint_or_option_has_another_file(llama: Path, tmp_path: Path) -> None:
        """Also where a file has the size and the time of modification that it had."""
        first = started(llama, tmp_path / "kept")
        started(llama, tmp_path / "kept", "int8")
        assert len(files(tmp_path / "kept")) == 2
        path = llama / "model.safetensors"
        before, tensors = path.stat(), load_file(path)
        changed = {name: -tensor if "v_proj" in name else tensor for name, tensor in tensors.items()}
        save_file(changed, path, metadata={"format": "pt"})
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        second = started(llama, tmp_path / "kept")
        assert second != first
        assert second == started(llama, tmp_path / "none", kept_weights_gb=0.0)
        assert not (tmp_path / "none").exists()

    def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_kept(
        llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = kept.KeptScheme.make_linear

        def change(scheme: kept.KeptScheme, tensors: object) -> object:
            (llama / "model.safetensors").touch()
            return made(scheme, tensors)  # type: ignore[arg-type]

        monkeypatch.setattr(kept.KeptScheme, "make_linear", change)
        started(llama, tmp_path / "kept")
        assert "has changed while it was loaded" in caplog.text
        assert not (tmp_path / "kept").exists()

    def test_files_that_were_not_used_for_longest_make_room(llama: Path, tmp_path: Path) -> None:
        directory = tmp_path / "kept"
        started(llama, directory, "int8")
        started(llama, directory, "int4")
        size = sum(file.stat().st_size for file in files(directory))
        started(llama, directory, "int8")  # used again
        eight = files(directory)[-1]
        foreign = directory / "yolov3.weights"
        foreign.write_text("stays")
        os.utime(foreign, (0, 0))
        started(llama, directory, "fp8", kept_weights_gb=1.2 * size / (1 << 30))
        left = [file for file in files(directory) if file != foreign]
        assert eight in left
        assert len(left) == 2
        assert foreign.exists()

    @pytest.mark.parametrize("fault", ["no directory", "full", "fails"])
    def test_a_disk_that_cannot_take_a_file_is_only_logged(
        fault: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = tmp_path / "kept"
        if fault == "no directory":
            directory.write_text("a file")
        elif fault == "full":
            monkeypatch.setattr(kept.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
        else:
            monkeypatch.setattr(kept.os, "fsync", fail)
        assert started(llama, directory) == started(llama, directory, kept_weights_gb=0.0)
        (record,) = [record for record in caplog.records if "are not kept" in record.message]
        assert record.levelname == "WARNING"
        assert fault == "no directory" or not files(directory)

    def test_servers_that_start_at_once_do_not_hurt_each_other(llama: Path, tmp_path: Path) -> None:
        with ThreadPoolExecutor(3) as threads:
            texts = list(threads.map(lambda _: started(llama, tmp_path / "kept"), range(3)))
        assert texts[0] == texts[1] == texts[2] == started(llama, tmp_path / "kept")
        assert len(files(tmp_path / "kept")) == 1


def read_again(*_: object) -> torch.Tensor:
    raise AssertionError("a matrix was read from the checkpoint")


def fail(_: int) -> None:
    raise OSError(28, "No space left on device")
