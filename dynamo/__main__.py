"""``python -m dynamo`` and the script ``dynamo``: Ctrl-C ends them without a traceback.

Before a verb runs nothing needs clean-up, so the signal itself ends the process (a shell shows
130). Python's KeyboardInterrupt inside the import of a compiled module can crash the interpreter.
"""

# The core of the module signal, whose own import reads files, so that Ctrl-C can meet it.
import _signal  # type: ignore[import-not-found]
import sys

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not with nohup, or after &
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from dynamo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
