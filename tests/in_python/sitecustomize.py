"""For `make test-in-python`, and the processes that its tests start: as where nothing was built."""

import sys

sys.modules["orchard.serving._express"] = None  # type: ignore[assignment]
