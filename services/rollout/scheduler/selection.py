"""Which task a group gets. A function of the group's index alone, so that a restart goes on where it was."""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

from services.rollout.store.suites import SuiteStore
from services.rollout.tasks import Task


def task_of_group(task_ids: Sequence[str], group_index: int, seed: int) -> str:
    """The task of group `group_index`: each epoch is a shuffle of all tasks, given by (seed, epoch)."""
    epoch, position = divmod(group_index, len(task_ids))
    order = list(task_ids)
    Random(f"{seed}/{epoch}").shuffle(order)
    return order[position]


def draw(task_ids: Sequence[str], number: int, seed: int) -> list[str]:
    """`number` different tasks; the same for the same seed, and a larger draw begins with a smaller one."""
    order = list(task_ids)
    Random(f"{seed}/draw").shuffle(order)
    return order[:number]


class TaskShelf:
    """Tasks read lately: a group's episodes ask for the same one. What an episode needs never changes."""

    def __init__(self, store: SuiteStore, *, max_tasks: int = 512) -> None:
        self._store = store
        self._max_tasks = max_tasks
        self._tasks: OrderedDict[str, Task] = OrderedDict()

    async def get(self, task_id: str) -> Task:
        """The task; `NotFound`."""
        task = self._tasks.get(task_id)
        if task is None:
            task = await self._store.get_task(task_id)
            self._tasks[task_id] = task
            if len(self._tasks) > self._max_tasks:
                self._tasks.popitem(last=False)
        return task
