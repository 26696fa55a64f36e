"""Contradictions and advice about a resolved config. Torch-free."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.lint import data, objective
    from gspo.lint.facts import Facts, Finding, facts_of
    from gspo.lint.rules import check, lint
    from gspo.lint.unused import ineffective
    # fmt: on

__getattr__ = face(__name__)
