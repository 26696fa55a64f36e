"""A model in the cache is whole or it is not there, whatever goes wrong while it is written."""

import pwd
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo.errors import ConfigError, DataError
from gspo.models import cache


def test_a_disk_that_fills_leaves_nothing_and_says_where(tmp_path):
    def write(to: Path) -> None:
        (to / "config.json").write_text("{}")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"weights")

    with pytest.raises(DataError, match=r"model could not be written: No space left.*GSPO_CACHE"):
        cache.publish_folder(tmp_path / "model", write)
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home_is_told_which_variable_to_set(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)  # as for a user id of a container

    for name in ("HOME", "GSPO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="set GSPO_CACHE"):
        cache.root()


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


def test_one_process_builds_a_model_and_the_others_wait_for_it(tmp_path):
    folder, built, first = tmp_path / "model", [], threading.Event()

    def write(to: Path) -> None:
        first.set()
        built.append(to)
        time.sleep(0.3)  # long enough for the other to ask
        (to / "weights").write_bytes(b"abc")

    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(cache.publish_folder, folder, write)]
        assert first.wait(10)
        jobs.append(pool.submit(cache.publish_folder, folder, write))
        for job in jobs:
            job.result(10)
    assert len(built) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_builder_that_stands_still_is_waited_for_only_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_WAIT_S", 0.3)
    folder, stands, resume = tmp_path / "model", threading.Event(), threading.Event()

    def stand_still(to: Path) -> None:
        stands.set()
        assert resume.wait(10)
        (to / "weights").write_bytes(b"late")

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(cache.publish_folder, folder, stand_still)
        assert stands.wait(10)
        cache.publish_folder(folder, lambda to: (to / "weights").write_bytes(b"abc") and None)
        resume.set()
        slow.result(10)
    assert (folder / "weights").read_bytes() == b"abc"
