"""The backend `remote`: models that other servers execute."""

from modelserver.remote.backend import RemoteBackend

BACKEND = RemoteBackend
