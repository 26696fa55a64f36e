import pytest
from native_library import forget_native


@pytest.fixture
def native_anew(monkeypatch, tmp_path):
    """A cache folder of the test's own, and a first use of the compiled library."""
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path))
    monkeypatch.delenv("GSPO_NATIVE", raising=False)
    forget_native()
    yield tmp_path
    forget_native()
