"""What the system takes to wake a thread that sleeps on another core; nothing of ours is in it."""

from __future__ import annotations

import ctypes
import threading
import time

from bench.copy_engine.rig import NAP_S, another_core, compute

_SEM_BYTES = 64  # sem_t has 32 where it is largest


def wake_ups(calls: int) -> list[float]:
    """Microseconds of the caller per `sem_post` to a sleeper: a futex wake, as the engine's."""
    quick, blocking = ctypes.PyDLL(None), ctypes.CDLL(None)
    sem = ctypes.create_string_buffer(_SEM_BYTES)
    if quick.sem_init(sem, 0, 0) != 0:
        raise OSError("sem_init failed")

    def sleep() -> None:
        for _ in range(calls):
            blocking.sem_wait(sem)

    with another_core():
        sleeper = threading.Thread(target=sleep, name="sleeper", daemon=True)
        sleeper.start()
    samples = []
    for _ in range(calls):
        time.sleep(NAP_S)  # it has the GIL, and is in sem_wait again
        compute(NAP_S)
        began = time.perf_counter_ns()
        quick.sem_post(sem)
        samples.append((time.perf_counter_ns() - began) / 1e3)
    sleeper.join()
    return samples
