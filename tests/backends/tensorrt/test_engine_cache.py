"""The cache, with builds that write plans that hold nothing: what is built when, by whom, and what is thrown away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from modelserver_backends.tensorrt.build_options import BuildOptions, BuildRequest
from modelserver_backends.tensorrt.builder import BuildResult
from modelserver_backends.tensorrt.engine_cache import EngineCache, cache_key
from modelserver_backends.tensorrt.engine_info import Range
from modelserver_backends.tensorrt.plan import Flavour
from modelserver_backends.tensorrt.sidecar import read_sidecar, sidecar_path
from support.engines import batching_engine, plan_bytes

from modelserver.backend import InternalError, InvalidArgumentError, UnavailableError


class Builds:
    """Counts the plans that it writes."""

    def __init__(self, size: int = 256) -> None:
        self.count = 0
        self._size = size

    def __call__(self, plan: Path) -> BuildResult:
        self.count += 1
        plan.write_bytes(plan_bytes(size=self._size))
        return BuildResult(batching_engine(), "10.9.0", self._size, 1, 0.5)


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / "trt")


def test_an_engine_is_built_once(cache: EngineCache) -> None:
    builds = Builds()
    first = cache.obtain("k", builds, facts={"onnx": "m.onnx"})
    second = cache.obtain("k", builds, facts={})
    assert (first.is_hit, second.is_hit, builds.count) == (False, True, 1)
    assert first.plan == second.plan
    assert second.info == batching_engine()
    sidecar = read_sidecar(first.plan)
    assert sidecar is not None
    assert (sidecar.built["version"], sidecar.built["onnx"]) == ("10.9.0.34", "m.onnx")
    cache.obtain("other", builds, facts={})
    assert builds.count == 2


def damage_plan(plan: Path) -> None:
    plan.write_bytes(plan_bytes()[:-1] + b"x")


def damage_sidecar(plan: Path) -> None:
    sidecar_path(plan).write_text("{")


def remove_sidecar(plan: Path) -> None:
    sidecar_path(plan).unlink()


def cut_plan(plan: Path) -> None:
    plan.write_bytes(plan.read_bytes()[:100])


@pytest.mark.parametrize("damage", [damage_plan, damage_sidecar, remove_sidecar, cut_plan, Path.unlink])
def test_what_is_damaged_is_built_again(cache: EngineCache, damage) -> None:
    builds = Builds()
    plan = cache.obtain("k", builds, facts={}).plan
    damage(plan)
    assert not cache.obtain("k", builds, facts={}).is_hit
    assert cache.obtain("k", builds, facts={}).is_hit
    assert builds.count == 2


def test_what_does_not_load_is_forgotten(cache: EngineCache) -> None:
    builds = Builds()
    plan = cache.obtain("k", builds, facts={}).plan
    cache.kernels_path("k").write_bytes(b"kernels")
    cache.forget("k")
    assert not plan.exists()
    assert not cache.kernels_path("k").exists()
    cache.obtain("k", builds, facts={})
    assert builds.count == 2


def test_a_build_that_fails_leaves_nothing(cache: EngineCache, tmp_path: Path) -> None:
    def fail(plan: Path) -> BuildResult:
        plan.write_bytes(b"half")
        raise InternalError("no")

    def write_rubbish(plan: Path) -> BuildResult:
        plan.write_bytes(b"rubbish")
        return BuildResult(batching_engine(), "1", 7, 1, 0.1)

    with pytest.raises(InternalError):
        cache.obtain("k", fail, facts={})
    with pytest.raises(InvalidArgumentError):
        cache.obtain("k", write_rubbish, facts={})
    assert [path.name for path in (tmp_path / "trt").iterdir()] == [".k.lock"]


def test_threads_that_want_the_same_build_it_once(cache: EngineCache) -> None:
    builds = Builds()
    threads = [threading.Thread(target=lambda: cache.obtain("k", builds, facts={})) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds.count == 1


RACER = """
import sys
from pathlib import Path
from support.engines import batching_engine, plan_bytes
from modelserver_backends.tensorrt.builder import BuildResult
from modelserver_backends.tensorrt.engine_cache import EngineCache
def build(plan):
    print("built", flush=True)
    plan.write_bytes(plan_bytes())
    return BuildResult(batching_engine(), "1", 256, 1, 0.1)
sys.stdin.readline()
EngineCache(Path(sys.argv[1])).obtain("k", build, facts={})
"""


def test_processes_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "trt")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for _ in range(2)
    ]
    outputs = [racer.communicate(b"go\n", timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert b"".join(outputs) == b"built\n"


def test_whoever_waits_can_be_cancelled(cache: EngineCache) -> None:
    began, release, cancel = threading.Event(), threading.Event(), threading.Event()

    def build(plan: Path) -> BuildResult:
        began.set()
        release.wait(30)
        return Builds()(plan)

    builder = threading.Thread(target=lambda: cache.obtain("k", build, facts={}))
    builder.start()
    began.wait(30)
    cancel.set()
    with pytest.raises(UnavailableError, match="cancelled"):
        cache.obtain("k", build, facts={}, is_wanted=lambda: not cancel.is_set())
    release.set()
    builder.join()


def test_the_least_used_leave_when_there_is_too_much(tmp_path: Path) -> None:
    builds = Builds(size=300)
    cache = EngineCache(tmp_path / "trt", max_bytes=700)
    for age, key in enumerate(("a", "b")):
        os.utime(cache.obtain(key, builds, facts={}).plan, (1000 + age, 1000 + age))
    assert cache.obtain("a", builds, facts={}).is_hit  # used again: now b is the oldest
    cache.obtain("c", builds, facts={})
    assert sorted(path.name for path in (tmp_path / "trt").glob("*.plan")) == ["a.plan", "c.plan"]
    EngineCache(tmp_path / "trt", max_bytes=1).obtain("d", builds, facts={})
    assert [path.name for path in (tmp_path / "trt").glob("*.plan")] == ["d.plan"]


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    EngineCache(tmp_path / "trt")
    assert (tmp_path / "trt").stat().st_mode & 0o777 == 0o700
    (tmp_path / "trt").chmod(0o777)
    with pytest.raises(UnavailableError, match=r"expected a directory of user .* with mode 777"):
        EngineCache(tmp_path / "trt")
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"engines cannot be kept there: .*engine-cache-dir"):
        EngineCache(tmp_path / "file" / "trt")


def test_the_key_is_of_all_that_goes_in(tmp_path: Path) -> None:
    onnx, weights, plugin = (tmp_path / name for name in ("m.onnx", "w.bin", "p.so"))
    for path in (onnx, weights, plugin):
        path.write_bytes(b"1")
    options = BuildOptions(plugins=(str(plugin),))
    request = BuildRequest(str(onnx), "x", Flavour.RTX, ({"x": Range((1,), (2,), (3,))},), options)

    def key(request: BuildRequest = request, version: str = "1.7", **target: str) -> str:
        return cache_key(request, external=(weights,), library_version=version, target=target)

    keys = [
        key(),
        key(version="1.8"),
        key(gpu="H200"),
        key(replace(request, flavour=Flavour.TENSORRT)),
        key(replace(request, profiles=({"x": Range((1,), (2,), (4,))},))),
        key(replace(request, options=replace(options, precision="fp16"))),
    ]
    for path in (onnx, weights, plugin):
        path.write_bytes(b"2")
        keys.append(key())
    assert len(set(keys)) == len(keys)
    # Where the engine goes and what was measured before make no other engine.
    assert key(replace(request, plan="y")) == keys[-1]
    assert key(replace(request, options=replace(options, timing_cache="t"))) == keys[-1]
