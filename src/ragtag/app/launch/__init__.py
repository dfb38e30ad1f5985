"""Start N peers of one script on this machine, and see them through to their end."""

from ragtag.app.launch.setup import LaunchError, OnError, check_launch, cores
from ragtag.app.launch.start import launch

__all__ = ["LaunchError", "OnError", "check_launch", "cores", "launch"]
