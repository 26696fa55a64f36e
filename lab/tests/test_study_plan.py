"""The catalog as data: every arm resolves, digests follow what an arm decides, tuning is equal and apart."""

import json
from dataclasses import replace

import pytest

from gspo.envs import find_environment
from gspo.errors import ConfigError
from gspo.lint import check
from gspo.studies import plan, results
from lab import ROOT

STUDIES = plan.studies()


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_of_the_catalog_resolves_to_a_config_that_would_train(name):
    study = STUDIES[name]
    for arm in study.arm_names() if not study.compute else ():
        loaded = plan.configured(study, study.overrides(arm), 1)
        check(loaded)
        env = loaded.config.env
        if env.path in ("tools", "self_correct"):  # others need packages that may be absent
            find_environment(env.path, env.options)


def test_an_arm_named_with_its_task_runs_on_that_task_only():
    study = STUDIES["rewards"]
    assert [arm for arm in study.arm_names() if arm.startswith("gspo, random")] == ["gspo, random reward @ tools"]
    assert study.overrides("gspo, random reward @ tools").keys() > {"env.path", "reward.weights"}


@pytest.mark.parametrize("name", STUDIES)
def test_checks_speak_of_arms_and_measures_that_exist(name):
    study = STUDIES[name]
    if study.compute:
        return  # its arms are named where they are measured; test_study_page looks at those
    from gspo.studies import MEANING

    for decision in study.checks:
        assert decision.measure in MEANING
        # The edge is a measure of an arm over all its tasks.
        named = list(study.arms) if decision.measure == "edge" else study.arm_names()
        assert decision.arm in named
        assert not isinstance(decision.against, str) or decision.against in named
    assert set(study.measures) <= MEANING.keys()


def test_training_studies_have_one_thread_a_run_and_more_than_one_seed():
    for study in STUDIES.values():
        assert plan.configured(study, {}, 1).config.threads == 1
        assert len(study.seeds) >= 2


def test_a_digest_follows_what_decides_a_run_and_nothing_else():
    study = STUDIES["clipping"]
    arm = dict(study.arms["gspo ε=2e-3"])
    first = plan.config_digest(plan.configured(study, arm, 1))
    assert plan.config_digest(plan.configured(study, {**arm, "cluster.fileroot": "elsewhere"}, 1)) == first
    second = plan.config_digest(plan.configured(study, arm, 2))
    assert second != first
    assert [job.digest for job in plan.jobs(study, plan.Choice(only="gspo ε=2e-3", num_seeds=2))] == [first, second]
    assert plan.config_digest(plan.configured(study, {**arm, "actor.eps_clip": 0.0021}, 1)) != first
    # What the algorithm brings is part of it, too.
    decided = plan.set_keys(plan.configured(study, {"algorithm": "cispo"}, 1))
    assert decided["actor.loss_aggregation"] == "token_mean"


def test_the_command_of_a_row_makes_the_config_of_the_row():
    import shlex

    from gspo.config import load

    study = STUDIES["presets"]
    overrides = study.overrides("ppo @ four digits")
    words = shlex.split(plan.train_command(study, overrides, 3))
    assert words[:2] == ["gspo", "train"]
    by_hand = load(ROOT / words[2], words[3:])
    assert plan.config_digest(by_hand) == plan.config_digest(plan.configured(study, overrides, 3))


def test_every_arm_of_a_tuned_study_tries_the_same_points_on_the_same_seeds_apart_from_the_test():
    study = STUDIES["efficiency"]
    assert study.tune is not None
    jobs = plan.jobs(study)
    tried = {
        arm: {(job.arm.removeprefix(arm), job.seed) for job in jobs if job.arm.startswith(arm)} for arm in study.arms
    }
    assert tried["gspo"] == tried["grpo"]
    assert len(tried["gspo"]) == 12 * len(study.tune.seeds)
    tested = plan.tuned_jobs(study, {arm: {"actor.eps_clip": 0.01} for arm in study.arms})
    assert {job.seed for job in tested}.isdisjoint({job.seed for job in jobs})


def test_choices_of_a_run_narrow_the_jobs():
    study = STUDIES["presets"]
    assert len(plan.jobs(study)) == len(study.arms) * len(study.tasks) * len(study.seeds)
    assert len(plan.jobs(study, plan.Choice(full=True))) > len(plan.jobs(study))
    assert {job.arm.partition(" @ ")[0] for job in plan.jobs(study, plan.Choice(only="grpo", num_seeds=1))} == {"grpo"}
    with pytest.raises(ConfigError, match="no arm 'nobody'"):
        plan.jobs(study, plan.Choice(only="nobody"))
    with pytest.raises(ConfigError, match="available: identity"):
        plan.find_study("nothing")


def test_an_arm_of_two_tasks_has_the_overrides_of_both():
    study = replace(STUDIES["presets"], tasks={"t": {"seed": 5, "threads": 2}}, arms={"a": {"threads": 1}})
    assert study.overrides("a @ t") == {"seed": 5, "threads": 1}


@pytest.mark.parametrize("name", ["clipping", "identity"])
def test_a_key_that_the_schema_lost_does_not_make_a_result_invalid(name):
    study = plan.find_study(name)
    job = plan.jobs(study)[0]
    config = plan.set_keys(plan.configured(study, job.overrides, job.seed))
    older = {**config, "actor.removed_key": 7}
    recorded = plan._digest(plan._computed(study, older) if study.compute else older)
    assert recorded != job.digest
    assert plan.digest_today(study, older, recorded) == job.digest
    assert plan.digest_today(study, config, job.digest) == job.digest
    assert plan.digest_today(study, {**older, "actor.optimizer.lr": 1.0}, "other") != job.digest


def test_a_reward_that_moved_to_another_module_is_still_the_recorded_experiment():
    study = plan.find_study("clipping")
    recorded = json.loads(results.results_file(ROOT / "docs", study).read_text())["configs"]
    jobs = [
        job for job in plan.jobs(study, plan.Choice(full=True)) if "gspo.studies.control:coin" in str(job.overrides)
    ]
    assert jobs
    for job in jobs:
        assert "gspo.lab.studies.control:coin" in str(recorded[job.digest])


def test_a_key_that_a_section_of_the_schema_lost_does_not_make_a_result_invalid():
    study = plan.find_study("presets")
    job = next(job for job in plan.jobs(study) if job.arm.startswith("ppo"))
    config = plan.set_keys(plan.configured(study, job.overrides, job.seed))
    older = {**config, "critic": {**config["critic"], "mb_spec": {"n_mbs": None}}}
    assert plan.digest_today(study, older, "other") == job.digest
