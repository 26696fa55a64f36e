"""A study: arms × seeds from one file, run, recorded and compared."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.studies import command, page, plan, results
    from gspo.studies.contrasts import Interval, Verdict, contrast, interval, verdict
    from gspo.studies.control import coin
    from gspo.studies.measure import MEANING, crossing, curves, evaluation_points, measures
    from gspo.studies.page import markdown_table
    from gspo.studies.plan import Choice, Study
    from gspo.studies.results import Record
    # fmt: on

__getattr__ = face(__name__)
