"""Triton's real tuner over a kernel that launches nothing: who tunes, how often, and what an error costs."""

from __future__ import annotations

PRELUDE = """
    import threading, triton
    from triton.runtime.autotuner import Autotuner
    from slipstream.compilation import install
    from slipstream.compilation.autotune import _Kernel, _Number
    install()

    def many(work, count=4):
        failures = []
        def run(i):
            try:
                work(i)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        [t.start() for t in threads], [t.join() for t in threads]
        return failures

    configs = [triton.Config({}, num_warps=w) for w in (1, 2, 4)]
"""


def test_each_configuration_of_a_key_is_timed_once_and_all_threads_choose_the_same(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    benches = []
    def bench(call, quantiles=None):
        call()
        benches.append(threading.get_ident())
        return [float(len(benches) % 3)] * 3
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
    barrier = threading.Barrier(4)
    def work(i):
        barrier.wait()
        for call in range(50):
            tuner.run(call // 10)
    failures = many(work)
    left = tuner.__dict__["_slipstream_shared"]
    print(failures, len(benches) == 5 * len(configs), len(tuner.cache), left.timings, left.threads)
    """
        )
        == "[] True 5 {} {}"
    )


def test_other_keys_and_restored_tensors_do_not_mix(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    def bench(call, quantiles=None):
        call()
        return [1.0] * 3
    class Adds(_Kernel):
        def run(self, x, n, **meta):
            x.value += 1
    def named(x, n): pass
    wrong = []
    for _ in range(30):
        kernel = Adds()
        kernel.fn = named
        tuner = Autotuner(kernel, ["x", "n"], configs, ["n"], None, ["x"], do_bench=bench)
        barrier = threading.Barrier(4)
        def work(i):
            x = _Number(1000 * i)
            barrier.wait()
            for call in range(4):
                tuner.run(x, i + 10 * (call // 2))
            if x.value != 1000 * i + 4:
                wrong.append(x.value)
        wrong += many(work)
    print(wrong)
    """
        )
        == "[]"
    )


def test_an_error_while_tuning_reaches_one_thread_and_the_others_go_on(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    calls = []
    def bench(call, quantiles=None):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("device lost")
        return [1.0] * 3
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
    barrier = threading.Barrier(4)
    def work(i):
        barrier.wait()
        tuner.run(7)
    failures = many(work)
    left = tuner.__dict__["_slipstream_shared"]
    print(failures, len(tuner.cache), left.threads, tuner.nargs)
    """
        )
        == "['RuntimeError: device lost'] 1 {} None"
    )


def test_a_thread_that_is_ended_from_outside_while_tuning_leaves_nothing_and_the_other_tunes_to_the_end(fresh):
    """SystemExit, as it is raised in a thread that is told to end, is no Exception."""
    assert (
        fresh(
            PRELUDE
            + """
    import ctypes, time
    benches, ends, inside = [], {}, threading.Event()
    def bench(call, quantiles=None):
        me = threading.current_thread().name
        benches.append(me)
        if me == "ended" and benches.count(me) == 2:  # one configuration is timed, the next one is being timed
            inside.set()
            for _ in range(60_000):  # in steps: the exception comes between two of them
                time.sleep(0.001)
        call()
        return [1.0] * 3
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
    def work():
        try:
            tuner.run(7)
            ends[threading.current_thread().name] = "tuned"
        except BaseException as error:
            ends[threading.current_thread().name] = type(error).__name__
    ended, other = (threading.Thread(target=work, name=name) for name in ("ended", "other"))
    ended.start()
    inside.wait(60)
    shared = tuner.__dict__["_slipstream_shared"]
    other.start()
    while len(shared.threads[(-1, (7,))]) < 2:  # the other one has come to the same key
        time.sleep(0.001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ended.ident), ctypes.py_object(SystemExit))
    ended.join(60), other.join(60)
    print(ends, benches, len(tuner.cache), shared.timings, shared.threads)
    """
        )
        == "{'ended': 'SystemExit', 'other': 'tuned'} ['ended', 'ended', 'other', 'other'] 1 {} {}"
    )


LATE = """
    benches, looked, tuned = [], threading.Event(), threading.Event()
    def bench(call, quantiles=None):
        call()
        benches.append(threading.current_thread().name)
        return [float(9 - len(benches))] * 3  # the last one that is timed is the fastest
    def prune(configs, nargs, **kwargs):  # between the look in the cache and the first timing
        if threading.current_thread().name == "late":
            looked.set()
            tuned.wait(60)
            return configs[::-1]
        return configs
    failures = []
    def work():
        try:
            tuner.run(7)
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {error}")
    pruned = {"early_config_prune": prune}
    late = threading.Thread(target=work, name="late")
"""


def test_a_thread_that_looked_before_another_had_tuned_takes_its_choice(fresh):
    assert (
        fresh(
            PRELUDE
            + LATE
            + """
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, prune_configs_by=pruned, do_bench=bench)
    late.start()
    looked.wait(60)
    tuner.run(7)
    chosen, timings = tuner.cache[(7,)], tuner.configs_timings
    tuned.set()
    late.join()
    left = tuner.__dict__["_slipstream_shared"]
    same = tuner.cache[(7,)] is chosen is tuner.best_config and tuner.configs_timings is timings
    print(failures, benches.count("late"), len(benches), same, left.timings, left.threads, tuner.nargs)
    """
        )
        == "[] 0 3 True {} {} None"
    )


def test_timing_by_hand_is_not_disturbed_by_a_choice_that_is_there(fresh):
    assert (
        fresh(
            PRELUDE
            + LATE
            + """
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
    tuner.run(7)
    tuner.nargs = {"x": 7}
    print(tuner._bench(7, config=configs[0]), len(benches))
    """
        )
        == "[5.0, 5.0, 5.0] 4"
    )


def test_a_child_that_is_forked_while_a_key_is_tuned_tunes_it_itself(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    import os, time
    inside, leave = threading.Event(), threading.Event()
    def bench(call, quantiles=None):
        inside.set()
        leave.wait(60)
        return [1.0] * 3
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
    def tune():
        tuner.run(7)
        left = tuner.__dict__["_slipstream_shared"]
        return (7,) in tuner.cache and (left.timings, left.threads) == ({}, {})
    found = []
    thread = threading.Thread(target=lambda: found.append(tune()))
    thread.start()
    inside.wait(60)
    child = os.fork()
    if not child:
        leave.set()
        os._exit(0 if tune() else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    leave.set()
    thread.join()
    print(code, found)
    """
        )
        == "0 [True]"
    )


def test_a_child_that_the_tuning_thread_forks_goes_on_tuning(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    import os
    forked = []
    def bench(call, quantiles=None):
        if not forked:
            forked.append(os.fork())
        return [1.0] * 3
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
    tuner.run(7)
    left = tuner.__dict__["_slipstream_shared"]
    well = (len(tuner.cache), left.timings, left.threads) == (1, {}, {})
    if not forked[0]:
        os._exit(0 if well else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]), well)
    """
        )
        == "0 True"
    )


def test_a_cleared_cache_is_tuned_again(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    calls = []
    def bench(call, quantiles=None):
        calls.append(1)
        return [1.0] * 3
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
    tuner.run(7)
    tuner.cache.clear()
    tuner.run(7)
    print(len(calls))
    """
        )
        == "6"
    )


def test_a_tuner_can_be_copied_and_pickled_state_and_all(fresh):
    assert fresh(
        PRELUDE
        + """
    import copy
    tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=lambda call, quantiles=None: [1.0] * 3)
    tuner.run(7)
    twin = copy.copy(tuner)
    twin.run(8)
    deep = copy.deepcopy({k: v for k, v in tuner.__dict__.items() if k.startswith("_slipstream")})
    print(sorted(deep), twin.nargs)
    """
    ).endswith(" None")


def test_flas_tuner_is_covered_through_its_base(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    import fla.ops.utils.cache as cache
    failures = []
    for _ in range(20):
        tuner = cache.CachedAutotuner(_Kernel(), ["x"], configs, ["x"], None, ["x"],
                                      do_bench=lambda call, quantiles=None: (call(), [1.0] * 3)[1])
        barrier = threading.Barrier(4)
        def work(i):
            x = _Number(i)
            barrier.wait()
            for _ in range(3):
                tuner.run(x)
            assert x.value == i, (x.value, i)
        failures += many(work)
    print(failures)
    """
        )
        == "[]"
    )


def test_a_run_that_was_overwritten_is_found_by_verify(fresh):
    told = fresh("""
        from triton.runtime.autotuner import Autotuner
        from slipstream.compilation import CompilationError, install, verify
        install()
        verify()
        Autotuner.run = Autotuner.run.__wrapped__
        try:
            verify()
            print("not seen")
        except CompilationError as error:
            print("triton-autotuner" in str(error))
    """)
    assert told == "True"


def test_after_a_timing_by_hand_other_keys_are_tuned(fresh):
    told = fresh("""
        import triton
        from triton.runtime.autotuner import Autotuner
        from slipstream.compilation import install
        from slipstream.compilation.autotune import _Kernel
        install()
        configs = [triton.Config({}, num_warps=w) for w in (1, 2)]
        timed = []

        def bench(call, quantiles=None):
            timed.append(1)
            call()
            return [1.0] * 3

        tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)
        tuner.nargs = {"x": 7}
        tuner._bench(7, config=configs[0])
        tuner.run(8)
        tuner.run(9)
        print(len(timed), len(tuner.cache), dict(tuner.__dict__["_slipstream_shared"].threads))
    """)
    assert told == "5 2 {}"
