"""What a command can end with, besides success."""


class CliError(Exception):
    """Shown as one line on standard error; `exit_code` is the command's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


NOT_THE_COMMAND = 125
"""Exit code of `aenv exec` that is never the command's own (the convention of container tools)."""
