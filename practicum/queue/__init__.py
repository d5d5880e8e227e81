"""Durable queues between the services: one protocol, two implementations."""

from practicum.queue.base import Depth, Entry, Queue

__all__ = ["Depth", "Entry", "Queue"]
