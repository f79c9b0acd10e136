"""Local servers that speak the APIs of S3 and Google Cloud Storage, and what a user has in the environment for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec.config
import pytest


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


@contextmanager
def gcs_server(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run one with an empty bucket, which knows no credentials, and set the environment for it."""
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # goes over gRPC, which this server does not speak
    pytest.importorskip("gcsfs", reason="needs the extra gcs")
    servers = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with servers.create_server("localhost", port, in_memory=True, default_bucket=bucket):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        yield
