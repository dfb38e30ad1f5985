"""The demo: six peers train through loss, a freeze and a death, beside the runs to compare them with."""

from ragtag.app.demo.plan import DemoError, Plan
from ragtag.app.demo.result import DemoResult, RoundTimes, Times
from ragtag.app.demo.run import run_demo

__all__ = ["DemoError", "DemoResult", "Plan", "RoundTimes", "Times", "run_demo"]
