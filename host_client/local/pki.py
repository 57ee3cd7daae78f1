"""The node's own certificate authority and the certificates of its parts, made once, kept for good."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from host_client.local.tools import write_private

VALIDITY: Final = timedelta(days=3650)
"""The node is thrown away long before; nothing here renews a certificate."""
CLOCK_SKEW: Final = timedelta(hours=1)
"""Backdating, for a machine whose clock is set back after a suspend."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate to issue: the file's name, the subject, and the names it serves under."""

    file: str
    common_name: str
    group: str | None = None
    serves: Sequence[str] = ()


def issue_missing(folder: Path, identities: Sequence[Identity]) -> None:
    """Make the authority, the service account key and every certificate not there yet."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / "ca.crt").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("podpipe-node-ca", None)
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        _store(folder, "ca", key, certificate)
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    authority_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    for identity in identities:
        if not (folder / f"{identity.file}.crt").exists():
            _issue(folder, identity, authority, authority_key)
    if not (folder / "sa.pub").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        write_private(folder / "sa.key", _private(key))
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        write_private(folder / "sa.pub", public)


def _issue(
    folder: Path,
    identity: Identity,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(identity.common_name, identity.group)
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = _builder(subject, authority.subject, key.public_key())
    if identity.serves:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = x509.SubjectAlternativeName([_general_name(name) for name in identity.serves])
        builder = builder.add_extension(names, critical=False)
    certificate = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False).sign(
        authority_key, hashes.SHA256()
    )
    _store(folder, identity.file, key, certificate)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _name(common_name: str, group: str | None) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if group is not None:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _store(
    folder: Path, file: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    # The certificate comes last: its presence says that both are there.
    write_private(folder / f"{file}.key", _private(key))
    write_private(folder / f"{file}.crt", certificate.public_bytes(serialization.Encoding.PEM))


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
