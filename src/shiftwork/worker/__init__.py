"""The process that runs jobs.

Read `Worker.run` first: fill the slots, reap what others left behind, wait. Everything else has a part of its own and a
connection of its own: leases hold on to the jobs, slots run them, settling writes how they ended, a listener hears
of new ones. The number of connections does not grow with the number of jobs.
"""

from shiftwork.worker.attempt import Middleware
from shiftwork.worker.worker import Worker

__all__ = ["Middleware", "Worker"]
