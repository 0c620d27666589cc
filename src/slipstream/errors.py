"""The exceptions that Slipstream raises on purpose.

::

    SlipstreamError            a user can mend it: one line, exit code 2
    ├── ConfigError            a recipe or an override
    ├── DataError              conversations, rendering, packing
    ├── TargetError            a target that cannot be loaded or read
    ├── DrafterError           a drafter's shape, or a drafter directory
    ├── TrainingError          a run that cannot start or go on
    │   └── CheckpointError    a checkpoint that cannot be written or resumed
    ├── DecodingError          prompts or settings that cannot be decoded
    ├── CompilationError       compiling under threads is not safe here, or something ran uncompiled
    ├── PreflightError         a named check failed
    └── ExportError            an export that would not be served as trained

Each message says what is wrong, the value, and the cure, in one line.
Anything else that escapes is a fault of ours and keeps its traceback.
"""


class SlipstreamError(Exception):
    """Base of every error that the user can mend. The command line prints it as one line and exits with 2."""


class ConfigError(SlipstreamError):
    """A recipe or a command-line override is wrong."""


class DataError(SlipstreamError):
    """Conversations cannot be read, rendered or packed."""


class TargetError(SlipstreamError):
    """The target model cannot be loaded, or its features cannot be read."""


class DrafterError(SlipstreamError):
    """The drafter's configuration or directory is wrong."""


class TrainingError(SlipstreamError):
    """A training run cannot start or cannot go on."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, found or resumed."""


class DecodingError(SlipstreamError):
    """Prompts or settings cannot be decoded."""


class CompilationError(SlipstreamError):
    """Compilation under threads cannot be made safe or is not, or something ran uncompiled that must not."""


class PreflightError(SlipstreamError):
    """A named preflight check failed. ``check`` is its name."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"preflight check {check} failed: {message}")
        self.check = check


class ExportError(SlipstreamError):
    """An export is incomplete or differs from what was trained."""
