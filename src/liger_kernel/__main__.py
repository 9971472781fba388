"""`python -m liger_kernel`: the same as the `liger-kernel` command."""

import sys

from liger_kernel.cli import main

if __name__ == "__main__":
    sys.exit(main())
