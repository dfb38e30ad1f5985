"""``python -m ragtag.app.demo``: the demo, and how long it took in all."""

import sys
import time

from ragtag.app.demo import run_demo

if __name__ == "__main__":
    began_s = time.monotonic()
    result = run_demo()
    print(f"{time.monotonic() - began_s:.0f} s in all")
    sys.exit(0 if result.ok else 1)
