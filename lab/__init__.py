"""The laboratory of the repository: the shipped studies, benchmarks, the planner, acceptance, tiny models.

`src/gspo` imports nothing of it, and no wheel contains it. Its verbs (`gspo study`, `gspo bench`, `gspo models check`)
find it in a clone; everything else is `python -m lab.…` in the root of the repository.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The processes that the laboratory starts import it, too, in any working directory.
_FOLDERS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(ROOT) not in _FOLDERS:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*_FOLDERS, str(ROOT))))
