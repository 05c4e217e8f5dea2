"""python -m offramp.runtime.cli"""

from offramp.runtime.cli import main

if __name__ == "__main__":  # not when a process of ours is started from it
    raise SystemExit(main())
