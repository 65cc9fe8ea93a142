import sys

from orchard.cli import main

sys.exit(main())
