"""TLS on this machine: a certificate of 127.0.0.1 and localhost, which signs itself, and a client that trusts it.

Made by `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj /CN=localhost
-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext keyUsage=digitalSignature,keyCertSign`, key and certificate.
"""

import ssl
from pathlib import Path

import pytest

CERTIFICATE = Path(__file__).with_name("tls.pem")


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the certificate, and no other."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
