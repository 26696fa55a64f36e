"""Keys of AReaL, TRL and verl, translated to ours. Torch-free."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.migrate import areal, other_systems
    from gspo.migrate.other_systems import foreign_keys
    from gspo.migrate.rule import Rule
    from gspo.migrate.table import rules
    # fmt: on

__getattr__ = face(__name__)
