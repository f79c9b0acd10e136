"""Certificates for servers on loopback, made anew for each test that needs them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """Signs certificates; itself signed by nobody else."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def write_authority(folder: Path, name: str = "ca") -> Authority:
    """Make an authority; `folder/NAME.pem` is what whoever trusts it needs."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    authority = Authority(builder.sign(key, hashes.SHA256()), key)
    _write(folder / f"{name}.pem", authority.certificate.public_bytes(serialization.Encoding.PEM))
    return authority


def write_certificate(folder: Path, name: str, authority: Authority | None = None) -> None:
    """Write NAME.pem and NAME.key of a server at 127.0.0.1; without an authority it is its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, name if authority is None else "ca", key).add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    if authority is None:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.sign(key if authority is None else authority.key, hashes.SHA256())
    _write(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM))
    kind, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(folder / f"{name}.key", key.private_bytes(serialization.Encoding.PEM, kind, secret))


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(subject))
        .issuer_name(_named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
