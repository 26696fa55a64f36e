"""Reading a run directory: report, comparison, and `gspo.Run`. Training never imports it."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.report.advice import advise, advise_on
    from gspo.report.card import CONFIG, Exported, model_card
    from gspo.report.cards import answers
    from gspo.report.comparison import compare
    from gspo.report.comparison_page import compare_view, write_page
    from gspo.report.page.page import BUDGET, write_report
    from gspo.report.page.watch import Watch
    from gspo.report.plot import COLORS, STYLE, plot_run
    from gspo.report.read import (
        best_step, choose_step, is_run, open_run, read_checkpoints, read_metrics, runs_below, status_of,
    )
    from gspo.report.run import Run
    from gspo.report.samples import parse_filter, read_block, sample_steps, training_rows
    from gspo.report.summary import summarise, summary_of, summary_rows
    from gspo.report.terminal import checkpoints_view, evaluation_view, models_view, probe_view, run_view, samples_view
    # fmt: on

__getattr__ = face(__name__)
