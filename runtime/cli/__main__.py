"""python -m offramp.runtime.cli"""

from offramp.runtime.cli import main

raise SystemExit(main())
