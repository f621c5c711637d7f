"""Hosts on loopback, and a small world of public names and addresses that lead to them."""

import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohappyeyeballs
import pytest
from aiohappyeyeballs.types import AddrInfoType, SocketFactoryType
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from indexer.outbound import Outbound, Patience
from tests.outbound.host import Host

IMPATIENT = Patience(connect=2.0, silence=0.3, judged_after=0.1)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host() as serving:
        yield serving


@pytest.fixture
async def outbound() -> AsyncIterator[Outbound]:
    """As for local networks."""
    client = Outbound(user_agent="test (mailto:someone@example.com)", allow_private_hosts=True, patience=IMPATIENT)
    yield client
    await client.close()


class World:
    """Public names and addresses. What is connected to at the end is always `host`, on loopback.

    `names` has for each name its addresses at each look-up in turn, the last ones for ever.
    """

    def __init__(self, host: Host, trust: ssl.SSLContext) -> None:
        self.host = host
        self.trust = trust
        self.names: dict[str, list[Sequence[str]]] = {}
        self.asked: list[str] = []
        self.connected: list[tuple[str, int]] = []

    async def resolve(self, name: str, _port: int) -> Sequence[str]:
        self.asked.append(name)
        answers = self.names.get(name)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def client(self) -> Outbound:
        return Outbound(user_agent="test", patience=IMPATIENT, resolve=self.resolve, tls=self.trust)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for names under `example`, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("pds.example"), x509.DNSName("relay.example")])
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "test.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(private + built.public_bytes(pem))
    return file


@pytest.fixture
async def world(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    async with Host(serving) as host:
        world = World(host, ssl.create_default_context(cafile=str(certificate)))
        dial = aiohappyeyeballs.start_connection

        async def to_loopback(
            addr_infos: Sequence[AddrInfoType], *, socket_factory: SocketFactoryType, **_options: object
        ) -> socket.socket:
            socket_factory(addr_infos[0]).close()
            world.connected.append(addr_infos[0][4][:2])
            here = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", world.host.port))
            return await dial([here])

        monkeypatch.setattr(aiohappyeyeballs, "start_connection", to_loopback)
        yield world
