import json
import os

import pytest

from gspo.sampling.remote.discovery import given_up, register, registered, sampler_file


def test_a_server_that_registers_is_found(tmp_path):
    register(tmp_path, 0, "http://127.0.0.1:80")
    address = registered(tmp_path, 0)
    assert address is not None
    assert address.url == "http://127.0.0.1:80"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"[" * 100_000, b"\0" * 9, b'{"url": "file:///etc/passwd"}']
)
def test_a_registration_that_cannot_be_read_is_none(tmp_path, content):
    sampler_file(tmp_path, 0).write_bytes(content)
    assert registered(tmp_path, 0) is None


def test_a_fifo_a_device_or_a_directory_in_place_of_a_registration_is_not_waited_for(tmp_path):
    file, gone = sampler_file(tmp_path, 0), sampler_file(tmp_path, 0).with_suffix(".gone")
    for make in (os.mkfifo, os.mkdir, lambda place: os.symlink("/dev/zero", place)):
        for place in (file, gone):
            make(place)
        assert registered(tmp_path, 0) is None
        assert given_up(tmp_path, 0) is None
        for place in (file, gone):
            os.rmdir(place) if place.is_dir() else place.unlink()


def test_a_registration_of_another_user_is_none(tmp_path, monkeypatch):
    register(tmp_path, 0, "http://127.0.0.1:80")
    assert json.loads(sampler_file(tmp_path, 0).read_text())["pid"] == os.getpid()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert registered(tmp_path, 0) is None
