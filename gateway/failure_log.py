"""One line for a request that failed: its code, and words that were written for clients' eyes."""

import structlog

from core.errors import DeadlineExceeded, InvalidGrammar, TandemError, status_of, to_failure
from gateway.request_record import current

_SERVER_FAULT = 500


def log_failure(error: Exception) -> None:
    """Never quotes a prompt: what has no name is told by its class alone.

    What the client has to mend, or wanted so (its own deadline), is an info line; what we have to
    mend is an error.
    """
    failure = to_failure(error)
    logger = structlog.get_logger()
    clients_doing = isinstance(error, TandemError) and status_of(error).http < _SERVER_FAULT
    if isinstance(error, DeadlineExceeded) and current().own_deadline:
        clients_doing = True
    log = logger.info if clients_doing else logger.error
    reason = "" if isinstance(error, InvalidGrammar) else failure.message  # it may quote the client
    log("request_failed", code=failure.code, reason=reason)
