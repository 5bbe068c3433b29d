"""How far apart two cores are: how long data takes from one to the other and back.

Cores that share a cache exchange what they write in some tens of nanoseconds, others in some hundreds. A
virtual machine may be moved from the one kind to the other while it runs, and what is computed on two cores
slows down then, while each of them by itself does not. So it is looked at before and after a measurement.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rltemplate.run import machine

# Two threads, each on a core, hand a number to each other; for a fifth of a second at most, in case that
# others keep a core busy.
_SOURCE = r"""
#include <atomic>
#include <chrono>
#include <pthread.h>
#include <sched.h>
#include <thread>

static void stay_on(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

extern "C" double round_trip_ns(int here, int there, long count) {
    alignas(128) std::atomic<long> ball(0);
    std::atomic<bool> over(false);
    double ns = -1.0;
    std::thread other([&] {
        stay_on(there);
        for (long turn = 1; !over.load(); turn += 2) {
            while (ball.load() != turn && !over.load()) {}
            ball.store(turn + 1);
        }
    });
    std::thread first([&] {
        stay_on(here);
        using clock = std::chrono::steady_clock;
        auto passed = [](clock::time_point begun) {
            return std::chrono::duration<double, std::nano>(clock::now() - begun).count();
        };
        long warm = count / 4, made = 0;
        auto begun = clock::now();
        for (long trip = 0; trip < warm + count; ++trip) {
            if (trip == warm) begun = clock::now();
            ball.store(2 * trip + 1);
            while (ball.load() != 2 * trip + 2) {}
            made = trip + 1;
            if (made % 64 == 0 && passed(begun) > 2e8) break;
        }
        ns = passed(begun) / (made > warm ? made - warm : made);
        over.store(true);
    });
    first.join();
    other.join();
    return ns;
}
"""
_TRIPS = 20_000


class Distance:
    """Measures it, with a program that is compiled when the first one is asked for."""

    def __init__(self, cores: Sequence[int], scratch: Path) -> None:
        """`cores` are those that may be used, `scratch` is a folder for the program."""
        self._cores = cores
        self._scratch = scratch

    def __call__(self) -> float | None:
        """Nanoseconds from the first core to the second and back; None where that cannot be measured."""
        if len(self._cores) < 2 or sys.platform != "linux":
            return None
        if self._library is None:
            return None
        here, there = self._cores[:2]
        return float(self._library.round_trip_ns(here, there, _TRIPS))

    @functools.cached_property
    def _library(self) -> ctypes.CDLL | None:
        compiler = machine.cpp_compiler()
        if compiler is None:
            return None
        source, program = self._scratch / "distance.cpp", self._scratch / "distance.so"
        source.write_text(_SOURCE)
        words = ["-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", str(source), "-o", str(program)]
        try:
            subprocess.run([compiler, *words], check=True, capture_output=True)
            library = ctypes.CDLL(str(program))
        except (OSError, subprocess.CalledProcessError):
            return None  # a compiler that does not work is no reason to measure nothing
        library.round_trip_ns.restype = ctypes.c_double
        library.round_trip_ns.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long]
        return library
