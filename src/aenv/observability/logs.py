"""Structured logs on standard error: for people on a console, JSON lines for machines."""

import logging
import sys

import structlog

from aenv.config import LogSettings


def configure(settings: LogSettings) -> None:
    """Set up structlog, and route the standard library's logging (uvicorn's) through the same renderer."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: structlog.typing.Processor
    if settings.format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    else:
        # The default prints every frame's variables: tokens and users' environments, and seconds of work.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    logging.basicConfig(handlers=[handler], level=max(level, logging.INFO), force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line for every call of a guest's daemon
