"""Checkpoints on the real APIs of S3 and Google Cloud Storage: local servers, spoken to through fsspec as by a user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.buckets import gcs_server, reach_s3, s3_server
from tests.unit.checkpoint.saves import Around, buffers_of, layout, own, restored_step, save_of, saved

from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.own_state import views_of
from zeroband.checkpoint.storage import Storage, open_storage
from zeroband.errors import ConfigError

BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    reach_s3(s3_endpoint, BUCKET, monkeypatch)
    return f"s3://{BUCKET}/of/us"


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with gcs_server(BUCKET, monkeypatch):
        yield f"gs://{BUCKET}/of/us"


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


@pytest.fixture
def storage(bucket: str) -> Storage:
    return open_storage(bucket, "run", "a")


@pytest.mark.slow
def test_bucket_holds_the_same_checkpoint_as_a_folder_and_the_old_one_until_the_next_manifest(storage: Storage) -> None:
    class Died(BaseException):
        pass

    def strike(reached: str) -> None:
        if reached == "before_manifest":
            raise Died

    assert restored_step(storage) is None
    saved(storage, 10, 20, 30, max_bytes=200)
    assert storage.names() == ["latest", "owner.json", "step_00000020", "step_00000030"]  # the first one was removed
    checkpoint = open_checkpoint(storage, 30)
    checkpoint.verify()
    moments = {name: torch.zeros(layout().numel) for name in ("exp_avg", "exp_avg_sq")}
    assert checkpoint.read_inner("a", views_of(layout().slots, moments))
    assert all(torch.equal(moments[name], saved) for name, saved in buffers_of(1030, tuple(moments)).items())
    with pytest.raises(ConfigError, match="belongs to another run"):
        own(storage, "s2")
    with pytest.raises(Died):
        save_of(storage, 40, Around(on_point=strike)).run()
    assert "step_00000040" in storage.names() and restored_step(storage) == 30


@pytest.mark.slow
def test_bucket_that_is_not_there_is_a_configuration_error(bucket: str) -> None:
    kind = bucket.partition(":")[0]
    why = {"s3": "bucket does not exist", "gs": "FileNotFoundError"}[kind]
    with pytest.raises(ConfigError, match=rf"cannot write to {kind}://missing/run: .*{why}"):
        own(open_storage(f"{kind}://missing", "run"))
