"""Keys that earlier versions of gspo had, as migration rules. Old run directories hold them."""

from __future__ import annotations

from collections.abc import Iterable

from gspo.config.migrate import merged, translate
from gspo.config.migrate.rule import Rule, drops, only, translates

_COLUMNS = "{prompt_column,answer_column,completion_column}"
_DATA_KEYS = "{prompt_column,answer_column,columns,system_prompt,chat_template,chat_template_kwargs,options}"


def removed_rules() -> Iterable[Rule]:
    """The table, in the order of application."""
    return (rule for group in (*_moved(), *_constants()) for rule in group)


def _moved() -> Iterable[list[Rule]]:
    options = {"partition": "partition", "account": "account", "time": "time", "cpus_per_node": "cpus-per-task"}
    return (
        *(
            translates(
                f"scheduler.slurm.{name}",
                f"`scheduler.slurm.sbatch: [--{option}=…]`",
                translate.sbatch_option(option),
            )
            for name, option in options.items()
        ),
        translates(
            "reward.format_regex",
            "`reward.functions: [{name: regex, pattern: …, label: format}]`",
            translate.format_regex,
        ),
        only(
            "valid_dataset." + _DATA_KEYS,
            translate.is_as_in_training,
            "set it in train_dataset, for both; for another value write valid_dataset.mixture: [{path: …, …}]",
        ),
        translates("train_dataset." + _COLUMNS, "`train_dataset.columns: {prompt: …, answer: …}`", merged.column_name),
        translates("env.command", "`env.agent`", merged.env_command),
        translates("stats_logger.keep_sample_steps", "`rollout.dump_to_file`", merged.keep_sample_steps),
        translates(
            "actor.prox_logp_recenter", "`actor.prox_logp_method: rollout_recentered`", merged.prox_logp_recenter
        ),
        translates("train_dataset.curriculum", "`train_dataset.shuffle: pass_rate`", merged.curriculum),
        drops("sglang", "gspo has no SGLang; flags of vLLM are keys below vllm"),
        translates("actor.backend", "local: one process trains", translate.values_of({"local": "fsdp:d1"})),
        translates("valid_dataset.size", "`evaluator.size`, the smaller value", translate.smaller_of("evaluator.size")),
        only(
            "actor.rejection_sampling.only_negative",
            translate.is_preset,
            "the preset sequence_mask, and no other, is for negative advantages; choose a preset and remove it",
        ),
        only(
            "stats_logger.keep_token_samples",
            lambda move: move.node.value in (None, 16) or move.value_of("rollout.dump_to_file") is False,
            "it is 16, or 0 with rollout.dump_to_file: false; remove it",
        ),
    )


def _constants() -> Iterable[list[Rule]]:
    """Keys whose default is now a constant."""
    auto = "eps_clip: auto has no settings; remove it, or set actor.eps_clip and actor.eps_clip_higher to numbers"
    fixed = "this is a constant of the algorithm; remove it, or compute the loss with gspo.objectives.loss"
    return (
        only("critic.value_loss_coef", (None, 1.0), "it scales the critic's gradient; set critic.optimizer.lr instead"),
        only(
            "actor.eps_clip_auto.target_fraction",
            # 0.15 was the default of versions that wrote it into every run directory.
            lambda move: move.node.value in (None, 0.05) or move.value_of("actor.eps_clip") != "auto",
            "eps_clip: auto clips 5 % of the sequences; remove it, or set actor.eps_clip and actor.eps_clip_higher to "
            "numbers",
        ),
        only("actor.eps_clip_auto.high_over_low", (None, 4 / 3), auto),
        only("actor.eps_clip_auto.decay", (None, 0.8), auto),
        only("actor.eps_clip_auto.eps_max", (None, 0.2), auto),
        only("actor.cispo_weight_max", (None, 5.0), fixed),
        only("actor.gmpo_log_clip", (None, 0.4), fixed),
        only("actor.max_nonfinite_updates", (None, 3), "a run ends after 3 non-finite updates in a row; remove it"),
        only("scheduler.start_timeout", (None, 300), "a run waits 300 s for a Ray cluster; remove it"),
        only("scheduler.slurm.save_before", (None, 120), "a run saves 120 s before its time limit; remove it"),
        only("env.model", (None, "policy"), "let agents ask for the model policy ($OPENAI_MODEL) and remove it"),
    )
