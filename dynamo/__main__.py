"""``python -m dynamo`` and the script ``dynamo``: Ctrl-C ends them without a traceback.

Before a verb runs nothing needs clean-up, so the signal itself ends the process (a shell shows
130). Python's KeyboardInterrupt inside the import of a compiled module can crash the interpreter.
"""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not with nohup, or after &
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from dynamo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
