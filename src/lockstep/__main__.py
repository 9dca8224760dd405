"""`python -m lockstep`, so that torchrun and its kin can start it."""

import sys

from lockstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
