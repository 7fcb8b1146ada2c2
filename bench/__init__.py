"""Measurements: each folder holds one question, one script and the table it printed.

`python -m bench...` ends as `continuum` does (continuum_connector/tools/cli/ending.py).
"""

import sys

if sys.argv[:1] == ["-m"]:  # so it is while `python -m` looks for its module
    from continuum_connector.tools.cli.ending import guard_imports

    guard_imports()
