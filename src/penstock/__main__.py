"""`python -m penstock`, which is also how torchrun starts it: `torchrun ... -m penstock train RUN.toml`."""

import sys

from penstock.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
