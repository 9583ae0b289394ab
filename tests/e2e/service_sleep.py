"""A service for tests of ``dynamo serve``: runs until SIGTERM; flags make it misbehave.

usage: service_sleep.py [--exit STATUS] [--after S] [--stubborn] [--drain S] [--children N]
                        [--say TEXT] [--escape]
"""

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--exit", type=int, help="exit with this status after --after seconds")
parser.add_argument("--after", type=float, default=0.0)
parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
parser.add_argument("--drain", type=float, default=0.0, help="seconds to finish after SIGTERM")
parser.add_argument("--children", type=int, default=0, help="start N processes that only sleep")
parser.add_argument("--escape", action="store_true", help="put the children in own sessions")
parser.add_argument("--say", default="")
parser.add_argument("--no-escape", action="store_true")
parser.add_argument("--words", nargs="*", help="ignored")
given = parser.parse_args()


def stop(_signum: int, _frame: object) -> None:
    if given.stubborn:
        print("not now", flush=True)
        return
    time.sleep(given.drain)
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
print(given.say or "started", os.getpid(), flush=True)
for _ in range(given.children):
    subprocess.Popen(["sleep", "1000"], start_new_session=given.escape)
if given.exit is not None:
    time.sleep(given.after)
    print("about to fail", file=sys.stderr, flush=True)
    sys.exit(given.exit)
while True:
    signal.pause()
