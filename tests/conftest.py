import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Test helpers beside the tests that use them are imported by name.
for folder in ("objectives", "envs"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# A suite started by nohup or in a script's background is deaf to these, and so would be every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples on every machine: a property that fails in CI fails at home.
settings.register_profile(
    "gspo", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gspo")


@pytest.fixture(autouse=True)
def _one_seed():
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
