"""A model in the cache is whole or it is not there, whatever goes wrong while it is written."""

from pathlib import Path

import pytest

from gspo.errors import DataError
from gspo.models import cache


def test_a_disk_that_fills_leaves_nothing_and_says_where(tmp_path):
    def write(to: Path) -> None:
        (to / "config.json").write_text("{}")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"weights")

    with pytest.raises(DataError, match=r"model could not be written: No space left.*GSPO_CACHE"):
        cache.publish_folder(tmp_path / "model", write)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_made_says_which_variable_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set GSPO_CACHE"):
        cache.publish_folder(tmp_path / "file" / "model", lambda to: None)


def test_what_is_published_is_whole_until_a_byte_changes(tmp_path):
    folder = tmp_path / "model"
    cache.publish_folder(folder, lambda to: (to / "weights").write_bytes(b"abc") and None)
    assert cache.is_whole(folder)
    (folder / "weights").write_bytes(b"abd")
    assert not cache.is_whole(folder)
