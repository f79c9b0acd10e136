"""Local servers that speak the APIs of S3 and Google Cloud Storage, and what a user has in the environment for them."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec.config
import pytest

_USER = "node"


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield its URL."""
    pytest.importorskip("s3fs", reason="needs the extra s3")
    pytest.importorskip("boto3", reason="needs moto's server")
    server = pytest.importorskip("moto.server", reason="needs moto's server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def reach_s3(endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment for a server, and have an empty bucket there."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    client = boto3.client("s3")
    if bucket not in [found["Name"] for found in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)
    for found in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        client.delete_object(Bucket=bucket, Key=found["Key"])


class S3Keys:
    """The keys of one user of a server that lets nobody else in; the newest one lies where clients look for it."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import boto3

        self._file, self._iam = file, boto3.client("iam")
        self._iam.create_user(UserName=_USER)
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        self._iam.put_user_policy(UserName=_USER, PolicyName="all", PolicyDocument=json.dumps(policy))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        self._key = self._made()
        self.write()

    def expire(self) -> None:
        """End the key that is written; another one is valid, and not written yet."""
        old, self._key = self._key, self._made()
        self._iam.delete_access_key(UserName=_USER, AccessKeyId=old["AccessKeyId"])

    def write(self) -> None:
        key, secret = self._key["AccessKeyId"], self._key["SecretAccessKey"]
        self._file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    def _made(self) -> dict[str, str]:
        import boto3

        key = self._iam.create_access_key(UserName=_USER)["AccessKey"]
        given = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
        self._iam = boto3.client("iam", **given)
        return key


@contextmanager
def s3_keys(endpoint: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Keys]:
    """Have an S3 server that is set in the environment check who asks, until the end of the `with`."""

    def check_after(requests: bytes) -> None:
        as_it_is = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset-auth", requests, as_it_is)).close()

    keys = S3Keys(file, monkeypatch)
    check_after(b"0")
    try:
        yield keys
    finally:
        check_after(b"inf")


@contextmanager
def gcs_server(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run one with an empty bucket, which knows no credentials, and set the environment for it."""
    pytest.importorskip("gcsfs", reason="needs the extra gcs")
    servers = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with servers.create_server("localhost", port, in_memory=True, default_bucket=bucket):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        yield
