"""Makes the store that the settings of `--cache-config` describe."""

from __future__ import annotations

from modelserver.cache.local import LocalStore
from modelserver.cache.settings import CacheSettings, LocalSettings
from modelserver.cache.store import AnswerStore
from modelserver.errors import UnsupportedError


def open_store(settings: CacheSettings | None) -> AnswerStore | None:
    """The server's response store; None without settings.

    Raises UnsupportedError for a cache whose library is not installed.
    """
    if settings is None:
        return None
    if isinstance(settings, LocalSettings):
        return LocalStore(settings.max_bytes, ttl_s=settings.ttl_s)
    try:
        from modelserver.cache.redis_store import RedisStore  # its library is an extra
    except ImportError as error:
        raise UnsupportedError(
            f"--cache-config=redis needs the extra 'redis': pip install 'modelserver-py[redis]' ({error})"
        ) from error
    return RedisStore(settings)
