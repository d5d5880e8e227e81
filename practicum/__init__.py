"""What every Practicum service shares: the trajectory, its wire form, queues and plumbing.

Importing this package never imports torch and has no effects.
"""

__version__ = "0.1.0"
