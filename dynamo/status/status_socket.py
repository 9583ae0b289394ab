"""The state of a deployment over a UNIX socket: ``dynamo ps`` need not collect it itself.

The process of the arbiter answers. It has all modules loaded and the GPU driver open, which would
take ``dynamo ps`` a multiple of its 60 ms. A client sends its operator key as a JSON string, or
null, in a line; the answer is a BoxStatus as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from dynamo.runtime.process.paths import owner_only

_REQUEST_S = 1.0
_REQUEST_BYTES = 4096
_BACKLOG = 16
log = logging.getLogger(__name__)


class StatusSocket:
    """Answers with ``report(key)``, in a thread: it reads files, and a GPU driver may hang.

    Use it as a context manager. The thread does not delay the end of the process.
    """

    def __init__(self, path: str, report: Callable[[str | None], bytes]) -> None:
        self._path = Path(path)
        self._report = report
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closed = False

    def __enter__(self) -> StatusSocket:
        """Listen. Without it ``dynamo ps`` is slower, so a failure is logged only."""
        try:
            # A killed deployment leaves its socket, and bind() refuses a name that exists.
            self._path.unlink(missing_ok=True)
            with owner_only():
                self._socket.bind(str(self._path))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            log.warning("cannot listen on %s: %s", self._path, error)
            return self
        threading.Thread(target=self._serve, name="status", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(_REQUEST_S)
                    key = json.loads(_line(connection))
                    connection.sendall(self._report(key if isinstance(key, str) else None))
                except (OSError, ValueError) as error:
                    log.debug("status request failed: %s", error)
                except Exception:  # one request must not end the thread
                    log.exception("cannot report the status")


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _REQUEST_BYTES:
        piece = connection.recv(_REQUEST_BYTES)
        if not piece:
            break
        data += piece
    return data
