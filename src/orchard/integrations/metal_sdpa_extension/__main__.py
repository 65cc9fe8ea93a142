import sys

from orchard.integrations.metal_sdpa_extension.shim import main

sys.exit(main())
