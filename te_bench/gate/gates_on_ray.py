"""Run a self-test's gates on the hosts of a Ray cluster: one at a time on each GPU, or on each host's CPU."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from te_bench.experiments import on_ray, ray_host
from te_bench.experiments.on_ray import Cluster
from te_bench.gate.places import Answer, Place, Task


def run_each(
    cluster: Cluster, function: Callable[[Task, Place], Answer], tasks: Iterable[Task], places: Sequence[on_ray.Place]
) -> Iterator[Answer]:
    """Yield function(task, place) of each task as it completes, like places.run_each; places: the cluster's.

    Raise ValueError if a host is lost. A caller that keeps the answers can continue with the same command.
    """
    import ray

    there = cluster.head()
    waiting, free = list(tasks)[::-1], list(places)
    running: dict[Any, on_ray.Place] = {}
    while waiting or running:
        while waiting and free:
            place = free.pop(0)
            host = cluster.of(place.node)
            assert host is not None
            of_each: dict[str, Any] = cluster.wanted.of_each(host.resources)
            task = ray.remote(max_retries=0, max_calls=1, **of_each)(_run_there)  # a fresh process each
            on_host = task.options(scheduling_strategy=on_ray.on(place.node))
            running[on_host.remote(function, waiting.pop(), cluster.wanted.device, there)] = place
        [done], _ = ray.wait(list(running), num_returns=1)
        place = running.pop(done)
        free.append(place)
        yield _answer(done, place)


def _answer(done: Any, place: on_ray.Place) -> Any:
    import ray

    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # Ray's own error holds a whole traceback
    except ray.exceptions.RayError as error:
        lost = f"--on ray: a gate on the host {place.host} was lost ({type(error).__name__})"
        raise ValueError(f"{lost}; the same command continues with the remaining gates") from None


def _run_there(function: Callable[[Task, Place], Answer], task: Task, device: str, head: ray_host.Head) -> Answer:
    """Run the function in a worker of Ray, which holds a GPU or the host's cores."""
    ray_host.as_on_the_head(head.threads)
    if (differs := ray_host.other_code(head)) is not None:
        raise ValueError(differs)
    with contextlib.suppress(OSError):
        os.chdir(head.folder)
    return function(task, Place(gpu=ray_host.held_gpus() if device == "cuda" else None))
