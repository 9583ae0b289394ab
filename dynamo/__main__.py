"""``python -m dynamo`` is the ``dynamo`` command."""

import sys

from dynamo.cli.main import main

sys.exit(main())
