"""Every error a user can meet. Messages say what, got, why, and which key to set."""


class GspoError(Exception):
    """Base of all errors raised on purpose. The CLI prints it without a traceback and exits 1."""


class ConfigError(GspoError):
    """Bad usage or configuration; raised before any work starts. The CLI exits 2."""


class DataError(GspoError):
    """A data set, prompt or model folder that cannot be used as it is."""


class RolloutError(GspoError):
    """The sampler failed, answered nonsense, or missed its deadline."""


class RewardError(GspoError):
    """The reward machinery failed for more samples than allowed. Never turned into a reward."""


class WeightSyncError(GspoError):
    """New weights did not reach a sampler whole and verified."""


class CheckpointError(GspoError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class TrainingError(GspoError):
    """The update itself failed, for example too many non-finite gradients in a row."""
