"""Prepared ids in buckets: the real APIs of S3 and Google Cloud Storage, from local servers, through fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import fsspec.config
import numpy as np
import pytest
from tests.buckets import gcs_server, reach_s3, s3_keys, s3_server
from tests.servers import until
from tests.unit.data.prepared import config_of, drawn_ids, fetched_blocks, opened, spans_of, stored, write_set

from zeroband.errors import ConfigError, StorageLost

BUCKET = "ids"
WHOLE = drawn_ids(1000)


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    reach_s3(s3_endpoint, BUCKET, monkeypatch)
    return f"s3://{BUCKET}"


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with gcs_server(BUCKET, monkeypatch):
        yield f"gs://{BUCKET}"


def upload(folder: Path, url: str) -> tuple[Any, str]:
    """Write a set to a folder and from there to a bucket; the bucket's file system, and where the set lies in it."""
    write_set(folder, [WHOLE[:600], WHOLE[600:]])
    system, root = fsspec.url_to_fs(url, skip_instance_cache=True)
    for path in folder.iterdir():
        system.pipe_file(f"{root}/{path.name}", path.read_bytes())
    return system, root


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_set_in_a_bucket_is_read_and_what_it_lacks_is_named(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bucket = request.getfixturevalue(kind)
    system, root = upload(tmp_path / "set", f"{bucket}/sets/a")
    with stored(config_of(f"{bucket}/sets/a", tmp_path / "cache")) as store:
        store.prefetch(spans_of(600))
        for start, stop in spans_of(600):
            np.testing.assert_array_equal(store.read(start, stop), WHOLE[start:stop])
        assert len(fetched_blocks(tmp_path / "cache")) == 10
        system.rm_file(f"{root}/part-1.npy")
        with pytest.raises(StorageLost, match=f"^{kind}://ids/sets/a/part-1.npy does not exist"):
            store.read(600, 601)
    with pytest.raises(ConfigError, match=f"is not a prepared set: {kind}://ids/sets/b/manifest.json does not exist"):
        opened(config_of(f"{bucket}/sets/b", tmp_path / "cache"))


@pytest.mark.slow
def test_credentials_that_expire_in_mid_run_are_waited_for_and_the_new_ones_used(
    s3: str, s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    upload(tmp_path / "set", f"{s3}/sets/a")
    with (
        s3_keys(s3_endpoint, tmp_path / "credentials", monkeypatch) as keys,
        stored(config_of(f"{s3}/sets/a", tmp_path / "cache")) as store,
        ThreadPoolExecutor(1) as reader,
    ):
        np.testing.assert_array_equal(store.read(0, 1), WHOLE[:1])
        keys.expire()
        (tmp_path / "credentials").write_text("")
        read = reader.submit(store.read, 64, 600)
        until(lambda: any("reloading its credentials" in one.message for one in caplog.records), "word of it")
        assert not read.done()
        keys.write()
        np.testing.assert_array_equal(read.result(60), WHOLE[64:600])


@pytest.mark.slow
def test_bucket_without_credentials_is_refused_at_the_start(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ConfigError, match="refuses this node's credentials"):
        opened(config_of(f"{s3}/sets/a", tmp_path / "cache"))
