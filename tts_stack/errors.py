"""The errors a user can cause; the command line turns each into one line and exit code 1."""


class TTSStackError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(TTSStackError):
    """A configuration value is unknown, of the wrong type, or breaks a law between values."""


class DataError(TTSStackError):
    """A recording, transcript, manifest or shard is missing, unreadable or inconsistent."""


class CheckpointError(TTSStackError):
    """A checkpoint or voice folder is missing a file, damaged, or made for something else."""


class MissingDependencyError(TTSStackError):
    """An optional package is needed; the message says which and how to install it."""
