"""For pytest: `pytest_plugins = ["gspo.conformance.plugin"]` in a conftest gives the fixture `gspo_case`.

    def test_my_loss(gspo_case):  # once per case
        gspo_case(my_loss)        # or my_loss, objective="grpo", …: see `adapters.adapted`

A case fails where the paper decides and the loss differs; it is skipped where the function has no parameter for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gspo_case" in metafunc.fixturenames:
        from gspo.conformance import load

        metafunc.parametrize("gspo_case", load(), ids=lambda case: case.name, indirect=True)


@pytest.fixture
def gspo_case(request: pytest.FixtureRequest) -> Callable[..., None]:
    from gspo.conformance import adapted, check_case, show

    def run(function: Callable[..., Any], **options: Any) -> None:
        outcome = check_case(adapted(function, **options), request.param)
        if outcome.status == "not offered":
            pytest.skip("; ".join(outcome.details))
        if outcome.status == "open":
            request.node.user_properties.append(("gspo_open", outcome.answer))
        if outcome.is_wrong:
            pytest.fail("\n".join([*show.sentences([outcome])][:-1]), pytrace=False)

    return run
