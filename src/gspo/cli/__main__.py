"""`python -m gspo.cli [cli | config | migrating]` prints a page of the documentation; `make docs` writes them."""

import sys

from gspo.cli.document import document, migrating
from gspo.cli.main import command_page

sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
PAGES = {"cli": command_page, "config": document, "migrating": migrating}
sys.stdout.write(PAGES[(sys.argv[1:] or ["cli"])[0]]())
