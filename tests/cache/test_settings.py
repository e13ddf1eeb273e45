from __future__ import annotations

import pytest

from modelserver.cache.settings import LocalSettings, RedisSettings, parse_cache_config
from modelserver.errors import InvalidArgumentError


def test_no_flag_no_cache() -> None:
    assert parse_cache_config(()) is None


@pytest.mark.parametrize(
    ("texts", "settings"),
    [
        (("local,size=10",), LocalSettings(10)),
        (("local,size=10,ttl=1.5",), LocalSettings(10, 1.5)),
        (("local,size=10", "local,ttl=3"), LocalSettings(10, 3.0)),
        (("redis,host=h",), RedisSettings("h")),
        (
            ("redis,host=h,port=1,user=u,password=a,b", "redis,db=2,tls_enabled=true,cacert=f,ttl=9"),
            RedisSettings("h", 1, "u", "a,b", 2, is_tls=True, ca_file="f", ttl_s=9.0),
        ),
        (
            ("redis,host=h,connect_timeout=100,socket_timeout=200,wait_timeout=0,pool_size=3",),
            RedisSettings("h", connect_timeout_s=0.1, socket_timeout_s=0.2, pool_size=3),
        ),
    ],
)
def test_flags_describe_a_cache(texts: tuple[str, ...], settings: LocalSettings | RedisSettings) -> None:
    assert parse_cache_config(texts) == settings


def test_the_deprecated_flag_is_a_local_cache() -> None:
    assert parse_cache_config((), 1000) == LocalSettings(1000)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("locla,size=1",), "expects one of local, redis, got 'locla'; did you mean 'local'?"),
        (("local",), "option format is '<cache name>,<setting>=<value>', got 'local'"),
        (("local,size",), "option format is '<cache name>,<setting>=<value>', got 'local,size'"),
        (("local,ttl=1",), "needs size"),
        (("local,size=0",), "expects an integer of at least 1, got '0'"),
        (("local,size=much",), "expects an integer of at least 1, got 'much'"),
        (("local,size=1,ttl=0",), "expects seconds, more than 0, got '0'"),
        (("local,size=1,ttl=x",), "expects seconds, more than 0, got 'x'"),
        (("local,sise=1",), "got 'sise'; did you mean 'size'?"),
        (("redis,port=1",), "needs host"),
        (("redis,host=h,tls_enabled=perhaps",), "expects true or false"),
        (("local,size=1", "redis,host=h"), "describes several caches"),
    ],
)
def test_what_is_wrong_is_named(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_cache_config(texts)
    assert message in caught.value.message


def test_two_ways_to_say_it_are_one_too_many() -> None:
    with pytest.raises(InvalidArgumentError, match="leave out the first"):
        parse_cache_config(("local,size=1",), 1)
