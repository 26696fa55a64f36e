"""`python -m gspo.cli` prints docs/cli.md; `make docs` writes it."""

import sys

from gspo.cli.main import command_page

sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
sys.stdout.write(command_page())
