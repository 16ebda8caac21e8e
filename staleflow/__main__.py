"""``python -m staleflow`` is ``staleflow``."""

from staleflow.cli import main

raise SystemExit(main())
