"""Errors for users. Messages contain what was expected, what was found, why, and which key to set."""


class GspoError(Exception):
    """Base class of expected errors. The CLI prints the message without a traceback and exits with code 1."""


class ConfigError(GspoError):
    """Wrong usage or configuration, raised before any work starts. The CLI exits with code 2."""


class DataError(GspoError):
    """A data set, prompt or model folder that cannot be used."""


class RolloutError(GspoError):
    """The sampler failed, sent an invalid response, or timed out."""


class RewardError(GspoError):
    """More rewards failed than allowed. A failure is never turned into a reward."""


class SandboxError(RewardError):
    """The sandbox of program rewards could not be started or failed; it says nothing about the program."""


class WeightSyncError(GspoError):
    """A sampler could not load and verify new weights."""


class CheckpointError(GspoError):
    """A checkpoint is incomplete, corrupt, or of another run."""


class TrainingError(GspoError):
    """The update failed, for example because of too many non-finite gradients in a row."""
