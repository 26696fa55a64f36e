"""`python -m gspo.config [config | migrating]` prints a page of the documentation; `make docs` writes both."""

import sys

from gspo.config.document import document, migrating

sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
sys.stdout.write(migrating() if sys.argv[1:] == ["migrating"] else document())
