"""TLS of a port: what is agreed on, whose certificates are taken, and files that are wrong or change."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.certificates import Authority, Pair, encrypted

from modelserver.errors import InvalidArgumentError
from modelserver.telemetry.file_reloads import FileReloads
from modelserver.wire.tls import TlsFiles, TlsReloader
from tests.support.metrics_pages import render_text

GRPC_FLAGS = ("--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.pair("server")


def files(pair: Pair, client_ca: str = "") -> TlsFiles:
    return TlsFiles(str(pair.certificate), str(pair.key), client_ca)


@contextmanager
def _answering(context: ssl.SSLContext) -> Iterator[int]:
    """A port that answers one handshake, successful or not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def answer() -> None:
            accepted, _ = listener.accept()
            accepted.settimeout(10)
            try:
                with context.wrap_socket(accepted, server_side=True) as secured:
                    secured.recv(1)
            except OSError:
                accepted.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


@contextmanager
def _connected(context: ssl.SSLContext, client: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        _answering(context) as port,
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        client.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        yield secured
        secured.sendall(b"x")


def _name_shown(context: ssl.SSLContext, authority: Authority) -> str:
    """The common name of the certificate that the server shows."""
    with _connected(context, authority.client_context()) as secured:
        return dict(pair[0] for pair in secured.getpeercert()["subject"])["commonName"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [(("h2", "http/1.1"), "h2"), (("http/1.1", "h2"), "h2"), (("http/1.1",), "http/1.1"), ((), None), (("x",), None)],
)
def test_what_is_spoken_is_agreed_on(
    authority: Authority, pair: Pair, offered: tuple[str, ...], agreed: str | None
) -> None:
    with _connected(files(pair).context(), authority.client_context(offered)) as secured:
        assert secured.selected_alpn_protocol() == agreed
        assert secured.compression() is None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_every_suite_has_forward_secrecy_and_authenticates(
    authority: Authority, pair: Pair, version: ssl.TLSVersion
) -> None:
    client = authority.client_context()
    client.minimum_version = client.maximum_version = version
    with _connected(files(pair).context(), client) as secured:
        suite = secured.cipher()
        assert suite is not None
        assert "GCM" in suite[0] or "CHACHA20" in suite[0]
    for offered in files(pair).context().get_ciphers():
        assert offered["aead"], offered["name"]
        assert offered["protocol"] == "TLSv1.3" or "Kx=ECDH" in offered["description"], offered["name"]


@pytest.mark.parametrize("suites", ["AES128-SHA", "ECDHE-ECDSA-AES128-SHA", "AES128-GCM-SHA256"])
def test_weaker_suites_are_refused(authority: Authority, pair: Pair, suites: str) -> None:
    client = authority.client_context()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers(suites)
    with pytest.raises(ssl.SSLError), _connected(files(pair).context(), client):
        pass


def test_older_versions_are_refused(pair: Pair) -> None:
    context = files(pair).context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.options & ssl.OP_NO_COMPRESSION


def test_clients_show_a_certificate_where_one_is_asked_for(authority: Authority, pair: Pair) -> None:
    context = files(pair, client_ca=str(authority.certificate)).context()
    with _connected(context, authority.client_context(pair=authority.pair("client"))):
        pass


def test_clients_without_a_certificate_are_refused_where_one_is_asked_for(authority: Authority, pair: Pair) -> None:
    context = files(pair, client_ca=str(authority.certificate)).context()
    client = authority.client_context()
    client.maximum_version = ssl.TLSVersion.TLSv1_2  # in 1.3 the client learns it with its first read
    with pytest.raises(ssl.SSLError), _connected(context, client):
        pass


def test_clients_of_another_authority_are_refused(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    context = files(pair, client_ca=str(authority.certificate)).context()
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").pair("stranger")
    client = authority.client_context(pair=stranger)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError), _connected(context, client):
        pass


# Files that are wrong.


def _refusal(tls: TlsFiles) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        tls.context()
    return caught.value.message


@pytest.mark.parametrize("flags", [("--tls-cert", "--tls-key", "--tls-client-ca"), GRPC_FLAGS])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_file_is_named_with_its_flag(
    authority: Authority, pair: Pair, flags: tuple[str, str, str], which: int
) -> None:
    paths = [str(pair.certificate), str(pair.key), str(authority.certificate)]
    paths[which] = "/nonexistent/file.pem"
    message = _refusal(TlsFiles(*paths, flags=flags))
    assert message == f"{flags[which]}: cannot read '/nonexistent/file.pem': No such file or directory"


def test_a_key_of_another_certificate(authority: Authority, pair: Pair) -> None:
    other = authority.pair("other")
    message = _refusal(TlsFiles(str(pair.certificate), str(other.key)))
    assert message == f"--tls-key: '{other.key}' is not the key of the certificate in '{pair.certificate}' (--tls-cert)"


@pytest.mark.parametrize("which", ["certificate", "key"])
def test_a_file_that_is_something_else(pair: Pair, which: str) -> None:
    getattr(pair, which).write_text("something else")
    message = _refusal(files(pair))
    assert message.startswith(f"--tls-cert, --tls-key: '{pair.certificate}' and '{pair.key}' must be a certificate")


def test_authorities_that_are_something_else(tmp_path: Path, pair: Pair) -> None:
    (tmp_path / "ca.pem").write_text("something else")
    message = _refusal(files(pair, client_ca=str(tmp_path / "ca.pem")))
    assert message.startswith(f"--tls-client-ca: '{tmp_path / 'ca.pem'}' holds no certificates in PEM form")


def test_a_key_with_a_passphrase_is_not_asked_for(pair: Pair) -> None:
    pair.key.write_bytes(encrypted(pair.key.read_bytes(), b"secret"))
    assert _refusal(files(pair)) == f"--tls-key: the key in '{pair.key}' has a passphrase; store it without one"


# Files that change.


def _replace(old: Pair, new: Pair) -> None:
    for target, source in ((old.certificate, new.certificate), (old.key, new.key)):
        shutil.copy(source, target)
        _touch(target)


def _touch(path: Path) -> None:
    """A time of last change that no file had before."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))


def test_new_files_are_taken(authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    reloader = TlsReloader(files(pair))
    first = reloader.context
    reloader.look()
    assert reloader.context is first
    _replace(pair, authority.pair("renewed"))
    with caplog.at_level(logging.INFO):
        reloader.look()
        assert reloader.context is first, "they may still be in the middle of being replaced"
        reloader.look()
    assert _name_shown(reloader.context, authority) == "renewed"
    assert f"took the new TLS files {pair.certificate} and {pair.key}" in caplog.text
    assert _name_shown(first, authority) == "server", "connections that began before keep what they began with"


def test_new_files_that_are_no_good_are_said_once_and_the_old_ones_stay(
    authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    reloads = FileReloads()
    reloader, of_another_port = (TlsReloader(files(pair), reloads) for _ in range(2))
    first = reloader.context
    renewed = authority.pair("renewed", not_after=datetime(2050, 1, 1, tzinfo=UTC))
    shutil.copy(renewed.certificate, pair.certificate)
    _touch(pair.certificate)
    for _ in range(4):
        reloader.look()
    assert reloader.context is first
    of_another_port.look()
    of_another_port.look()
    told = _told(reloads)
    assert told["modelserver_last_reload_successful"] == 0
    assert told["modelserver_reload_failures_total"] == 1
    assert time.time() < told["modelserver_certificate_not_after_timestamp_seconds"] < time.time() + 100_000
    assert caplog.text.count("the new TLS files are not used, the old ones stay: --tls-key: ") == 2, "each port says it"
    shutil.copy(renewed.key, pair.key)
    _touch(pair.key)
    reloader.look()
    reloader.look()
    assert _name_shown(reloader.context, authority) == "renewed"
    told = _told(reloads)
    assert told["modelserver_last_reload_successful"] == 1
    assert told["modelserver_reload_failures_total"] == 1
    assert told["modelserver_certificate_not_after_timestamp_seconds"] == datetime(2050, 1, 1, tzinfo=UTC).timestamp()


def _told(reloads: FileReloads) -> dict[str, float]:
    """The metrics of the server's own certificate."""
    lines = (line.split() for line in render_text(reloads.families()).decode().splitlines())
    return {name.partition("{")[0]: float(value) for name, value, *_ in lines if name.endswith('{flag="--tls-cert"}')}


def test_each_file_of_certificates_has_its_own_end(authority: Authority, pair: Pair) -> None:
    tls = TlsFiles(str(pair.certificate), str(pair.key), str(authority.certificate), GRPC_FLAGS)
    ends = tls.not_after_s()
    assert set(ends) == {"--grpc-server-cert", "--grpc-root-cert"}
    assert all(time.time() < seconds < time.time() + 100_000 for seconds in ends.values())


def test_an_end_that_cannot_be_told_is_left_out(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.certificate.write_text("-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n")
    assert files(pair).not_after_s() == {}
    assert f"--tls-cert: cannot tell when '{pair.certificate}' expires: " in caplog.text


def test_files_that_are_gone_change_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    reloader = TlsReloader(files(pair))
    first = reloader.context
    pair.key.unlink()
    for _ in range(3):
        reloader.look()
    assert reloader.context is first
    assert not caplog.records


def test_files_behind_a_link_that_moves(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    """As Kubernetes replaces a secret: a directory beside the old one, and a link that is moved."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made = authority.pair(name)
        shutil.copy(made.certificate, tmp_path / name / "tls.crt")
        shutil.copy(made.key, tmp_path / name / "tls.key")
    _touch(tmp_path / "second" / "tls.crt")
    link = tmp_path / "data"
    link.symlink_to("first")
    reloader = TlsReloader(TlsFiles(str(link / "tls.crt"), str(link / "tls.key")))
    assert _name_shown(reloader.context, authority) == "first"
    (tmp_path / "new").symlink_to("second")
    (tmp_path / "new").rename(link)
    reloader.look()
    reloader.look()
    assert _name_shown(reloader.context, authority) == "second"
