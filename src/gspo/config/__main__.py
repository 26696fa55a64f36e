"""`python -m gspo.config > docs/config.md` writes the documentation of all keys."""

import sys

from gspo.config.document import document

sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
sys.stdout.write(document())
