"""`python -m gspo.cli [cli | config | migrating]` prints a page of the documentation; `make docs` writes them."""

import sys

from gspo.system import in_lab

sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
sys.stdout.write(in_lab("lab.pages:PAGES")[(sys.argv[1:] or ["cli"])[0]]())
