"""Who may make a call, by what its route needs and what its head has."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.keys import KeyFile

from modelserver.auth.access import EVERYBODY, WITHOUT_KEY, Access, Admitted, ApiGroup, Restriction
from modelserver.auth.api_keys import CALLER, KeyRing, Scope
from modelserver.auth.guard import Guard, KeyUse, Needs, RestrictedError
from modelserver.errors import PermissionDeniedError, UnauthenticatedError

INFER = Needs.of(ApiGroup.INFERENCE)
OWN = Scope("rerank:report")


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys.yaml")
    file.add("user", Scope.INFER)
    file.add("watcher", OWN)
    return file


@pytest.fixture
def guard(keys: KeyFile) -> Guard:
    return Guard(Access(), KeyRing(str(keys.path)))


def of(keys: KeyFile, name: str) -> dict[str, str]:
    return {"x-api-key": keys.texts[name]}


def test_without_keys_and_restrictions_everybody_is_admitted() -> None:
    guard = Guard(Access())
    assert guard.is_idle
    assert guard.admit(INFER, {}) is None
    assert guard.identify({}) is None
    assert guard.admission(None) == EVERYBODY


def test_a_key_needs_the_scope_of_the_route(guard: Guard, keys: KeyFile) -> None:
    caller = guard.admit(INFER, of(keys, "user"))
    assert caller is not None
    assert guard.admission(caller) == Admitted("user")
    with pytest.raises(PermissionDeniedError, match="no scope 'infer'"):
        guard.admit(INFER, of(keys, "watcher"))
    with pytest.raises(UnauthenticatedError):
        guard.admit(INFER, {})


def test_an_api_may_have_a_scope_of_its_own(guard: Guard, keys: KeyFile) -> None:
    needs = Needs.of(ApiGroup.STATISTICS, OWN)
    assert guard.admit(needs, of(keys, "watcher")) is not None
    with pytest.raises(PermissionDeniedError, match="no scope 'rerank:report'"):
        guard.admit(needs, of(keys, "user"))


def test_probes_need_no_key(guard: Guard) -> None:
    needs = Needs.of(ApiGroup.HEALTH, key=KeyUse.UNUSED)
    assert guard.admission(guard.admit(needs, {"x-api-key": "wrong"})) == WITHOUT_KEY


def test_an_optional_key_must_be_right_if_it_is_sent(guard: Guard, keys: KeyFile) -> None:
    needs = Needs.of(ApiGroup.HEALTH, key=KeyUse.OPTIONAL)
    assert guard.admit(needs, {}) is None
    assert guard.admit(needs, of(keys, "user")) is not None
    with pytest.raises(UnauthenticatedError):
        guard.admit(needs, {"authorization": "Bearer wrong"})


def test_what_does_not_exist_needs_a_key(guard: Guard, keys: KeyFile) -> None:
    with pytest.raises(UnauthenticatedError):
        guard.identify({})
    assert guard.identify(of(keys, "watcher")) is not None


def test_a_restricted_group_needs_its_header(keys: KeyFile) -> None:
    access = Access(restrictions=(Restriction((ApiGroup.INFERENCE,), "secret-key", "s"),))
    guard = Guard(access)
    assert not guard.is_idle
    assert guard.admit(INFER, {"secret-key": "s"}) is None
    assert guard.admit(Needs.of(ApiGroup.METADATA), {}) is None
    with pytest.raises(RestrictedError) as caught:
        guard.admit(INFER, {"secret-key": "t"})
    assert caught.value.header == "secret-key"


def test_refused_control_is_recorded(guard: Guard, keys: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "modelserver.audit")
    with pytest.raises(PermissionDeniedError):
        guard.admit(Needs.of(ApiGroup.MODEL_REPOSITORY), of(keys, "user"), "POST", "/v2/repository/index")
    assert 'key="user"' in caplog.text
    assert 'action="POST /v2/repository/index"' in caplog.text


def test_a_call_that_stands_for_an_admitted_one_needs_only_what_is_beyond(keys: KeyFile) -> None:
    inference, statistics = (Restriction((group,), group.value, "s") for group in (INFER.group, ApiGroup.STATISTICS))
    guard = Guard(Access(restrictions=(inference, statistics)), KeyRing(str(keys.path)))
    caller = guard.admit(INFER, {**of(keys, "user"), "inference": "s"})
    further = guard.beyond(INFER)
    token = CALLER.set(caller)
    try:
        # The key and the header of the group are not looked at again.
        assert further.admit(INFER, {}) is further.identify({}) is caller
        assert further.admit(Needs.of(ApiGroup.METADATA), {}) is caller
        with pytest.raises(PermissionDeniedError, match="no scope 'metrics'"):
            further.admit(Needs.of(ApiGroup.STATISTICS), {})
        with pytest.raises(RestrictedError):
            further.admit(Needs.of(ApiGroup.STATISTICS, Scope.INFER), {})
    finally:
        CALLER.reset(token)
    with pytest.raises(UnauthenticatedError):
        further.admit(INFER, {})
