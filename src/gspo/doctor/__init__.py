"""`gspo doctor`: what a config will do, and whether this machine can run it."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.doctor import memory, models
    from gspo.doctor.checks import measure_noise, run_beside_sampler, sample_all, selftest, trainer_logp
    from gspo.doctor.explanation import (
        batch_section, explain, objective_section, policy_section, report_json, reward_words,
    )
    from gspo.doctor.memory import ModelFields, Unknown, find_source, shape_of
    from gspo.doctor.models import COLUMNS, Checked, check_model, is_exact
    from gspo.doctor.ready import examine
    from gspo.doctor.render import algorithm_card, algorithm_table, machine_text, to_text
    from gspo.doctor.reward import examine_reward, reward_view
    # fmt: on

__getattr__ = face(__name__)
