"""``install`` makes safe, whatever the order of imports; ``verify`` sees each hazard where it is not held."""

from __future__ import annotations

import pytest

HAZARDS = (
    "fx-flag",
    "fx-modules",
    "is-compiling",
    "annotations",
    "lazy-backward",
    "thread-config",
    "triton-autotuner",
    "inductor-autotuner",
    "fla-tensor-cache",
    "dense-flex",
)
IMPORTS = """
    import torch, triton, torch._inductor.runtime.triton_heuristics, torch.nn.attention.flex_attention, fla.utils
    import fla.ops.utils.index
"""
INSTALL = """
    from slipstream.compilation import install, report, verify
    install()
"""


@pytest.mark.parametrize(
    "order", [INSTALL + IMPORTS, IMPORTS + INSTALL, IMPORTS + INSTALL + INSTALL, "import torch\n" + INSTALL + IMPORTS]
)
def test_before_or_after_everything_is_imported_and_twice(order, fresh):
    order = "\n".join(line.strip() for line in order.splitlines())
    states = fresh(order + "\nverify(); print({s.name: s.status for s in report().states})")
    found = eval(states)
    assert tuple(found) == HAZARDS
    assert set(found.values()) <= {"handled", "safe upstream"}
    # What is this installation's must be ours, or else nothing would have been made safe at all.
    assert found["triton-autotuner"] == found["inductor-autotuner"] == found["dense-flex"] == "handled"


def test_every_hazard_is_seen_on_a_stock_installation(fresh):
    """The checks can fail: without ``install`` each one that this installation needs sees its hazard."""
    seen = fresh("""
        import torch, triton, torch._inductor.runtime.triton_heuristics, torch.nn.attention.flex_attention
        import torch._functorch.config, fla.utils, fla.ops.utils.index
        from slipstream.compilation.safety import HAZARDS
        needed = [h for h in HAZARDS if h.needed()]
        found = {h.name: h.check() for h in needed}
        for _ in range(20):  # a second thread must come by within a millisecond, and a busy machine may not let it
            found = {h.name: found[h.name] or h.check() for h in needed}
        print(found)
    """)
    found = eval(seen)
    assert {
        "fx-modules",
        "annotations",
        "lazy-backward",
        "triton-autotuner",
        "inductor-autotuner",
        "dense-flex",
    } <= set(found)
    # thread-config is seen only where a setting has been assigned
    assert {name for name, what in found.items() if not what} <= {"thread-config"}


def test_verify_without_install_is_an_error(fresh):
    assert "install() has not been called" in fresh("""
        from slipstream.compilation import verify
        try:
            verify()
        except Exception as error:
            print(type(error).__name__, error)
    """)


# By hazard: what overwrites the fix of it, and what an installation must have for there to be one.
OVERWRITING = {
    "fx-flag": (
        "torch.fx._symbolic_trace._is_fx_tracing_flag = True",
        "not hasattr(torch.fx._symbolic_trace, '_is_fx_tracing_tls')",
    ),
    "fx-modules": ("torch.fx.Tracer.trace = inspect.unwrap(torch.fx.Tracer.trace)", "True"),
    "is-compiling": ("importlib.reload(torch.compiler)", "hasattr(torch.compiler, '_compile_session_context')"),
    "annotations": ("importlib.reload(torch.fx.traceback)", "hasattr(torch.fx.traceback, 'annotate')"),
    "lazy-backward": ("torch._functorch.config.force_non_lazy_backward_lowering = False", "True"),
    "thread-config": (
        "torch._dynamo.config.recompile_limit = 77",
        "isinstance(getattr(torch._dynamo.config._config['recompile_limit'], 'user_override', 0), ContextVar)",
    ),
    "triton-autotuner": ("Autotuner.run = Autotuner.run.__wrapped__; del Autotuner.nargs", "True"),
    "inductor-autotuner": ("heuristics.CachingAutotuner.run = heuristics.CachingAutotuner.run.__wrapped__", "True"),
    "fla-tensor-cache": ("sys.modules[fla.utils.tensor_cache.__module__].deque = collections.deque", "True"),
    "dense-flex": ("flex.setup_compilation_env = torch._higher_order_ops.utils.setup_compilation_env", "True"),
}


def test_what_a_later_import_overwrites_is_found_and_named(fresh):
    """Each in a child of its own: they are changed for a whole process, and to import everything anew takes long."""
    assert tuple(OVERWRITING) == HAZARDS
    told = fresh(f"""
        import collections, importlib, inspect, os, sys, torch, fla.utils
        import torch._higher_order_ops.utils
        import torch._inductor.runtime.triton_heuristics as heuristics
        import torch.nn.attention.flex_attention as flex
        from contextvars import ContextVar
        from triton.runtime.autotuner import Autotuner
        from slipstream.compilation import CompilationError, install, verify
        found = install()
        verify()

        def told_in_a_child(overwrite):
            read, write = os.pipe()
            if not (child := os.fork()):
                try:
                    exec(overwrite, globals())
                    for _ in range(20):  # a busy machine may not let a second thread come by within a millisecond
                        verify()
                    said = "nothing"
                except CompilationError as error:
                    said = str(error)
                except BaseException as error:  # the child must not run on into what is the parent's
                    said = repr(error)
                os.write(write, said.encode())
                os._exit(0)
            os.close(write)
            with open(read) as pipe:
                said = pipe.read()
            os.waitpid(child, 0)
            return said

        print({{
            name: told_in_a_child(overwrite) if eval(there) else found[name].status
            for name, (overwrite, there) in {OVERWRITING!r}.items()
        }})
    """)
    for name, said in eval(told).items():
        assert f"is not safe: {name}: " in said or f"; {name}: " in said or said == "safe upstream", (name, said)


def test_a_version_that_is_not_known_is_refused_unless_told_otherwise(fresh):
    text = fresh("""
        import torch.nn.attention.flex_attention as flex
        del flex.setup_compilation_env
        from slipstream.compilation import install, verify
        try:
            install()
        except Exception as error:
            print(type(error).__name__, error)
        print(install(allow_unknown=True)["dense-flex"].status, verify()["dense-flex"].detail)
    """)
    assert text == "unknown torch.nn.attention.flex_attention has no setup_compilation_env"


def test_each_thread_can_verify_while_others_do(fresh):
    assert (
        fresh("""
        import threading, triton, torch.nn.attention.flex_attention, torch._inductor.runtime.triton_heuristics
        from slipstream.compilation import install, verify
        install()
        failures = []
        def work():
            try:
                for _ in range(10):
                    verify()
            except Exception as error:
                failures.append(error)
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        print(failures)
    """)
        == "[]"
    )


def test_a_child_that_was_forked_while_locks_were_held_goes_on(fresh):
    assert (
        fresh("""
        import os, threading, triton
        from slipstream.compilation import install, verify
        from slipstream.compilation.locks import first_call_lock, tuning_lock
        install()
        verify()
        held, done = threading.Event(), threading.Event()
        def hold():
            with first_call_lock(), tuning_lock(-1):
                held.set()
                done.wait()
        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        if not child:
            locks = first_call_lock(), tuning_lock(-1)
            ok = all(lock.acquire(timeout=2) for lock in locks)
            [lock.release() for lock in locks]
            verify()
            os._exit(0 if ok else 1)
        done.set()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
        == "0"
    )


def test_settings_that_were_assigned_hold_in_threads_and_a_later_one_is_told(fresh):
    text = fresh("""
        import threading, torch._inductor.config as inductor, torch._dynamo.config as dynamo
        inductor.max_autotune = True
        from slipstream.compilation import install, verify
        install()
        verify()
        seen = []
        t = threading.Thread(target=lambda: seen.append(inductor.max_autotune)); t.start(); t.join()
        assert seen == [True], seen
        dynamo.recompile_limit = 77
        t = threading.Thread(target=lambda: seen.append(dynamo.recompile_limit)); t.start(); t.join()
        if seen[1] == 77:
            print("settings are the process's")
        else:
            try:
                verify()
            except Exception as error:
                print(error)
            install()
            verify()
    """)
    assert "settings are the process's" in text or "recompile_limit is 77 in this thread" in text


def test_nested_compilation_in_one_thread_is_reported_as_ever(fresh):
    text = fresh("""
        import torch
        from slipstream.compilation import install
        install()
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        compiled(torch.ones(2))
        try:
            torch.fx.symbolic_trace(lambda x: compiled(x))
        except RuntimeError as error:
            print(error)
        assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    """)
    assert "using FX to symbolically trace a dynamo-optimized function" in text


def test_two_traces_at_once_leave_module_as_it_was(fresh):
    assert (
        fresh("""
        import threading, torch
        from slipstream.compilation import install
        install()
        before = torch.nn.Module.__call__, torch.nn.Module.__getattr__
        failures = []
        def work(i):
            try:
                model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
                for _ in range(30):
                    if i % 2:
                        assert len(torch.fx.symbolic_trace(model).graph.nodes) == 4
                    else:
                        assert isinstance(model(torch.ones(2, 4)), torch.Tensor)
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        [t.start() for t in threads], [t.join() for t in threads]
        print(failures, before == (torch.nn.Module.__call__, torch.nn.Module.__getattr__))
    """)
        == "[] True"
    )


def test_dense_flex_is_allowed_where_it_is_asked_for_by_name(fresh):
    assert (
        fresh("""
        import threading, torch
        from torch.nn.attention.flex_attention import flex_attention
        from slipstream.compilation import dense_flex_allowed, install
        from slipstream.errors import CompilationError
        install()
        x = torch.randn(1, 2, 16, 16)
        told = []
        def elsewhere():
            try:
                flex_attention(x, x, x)
            except CompilationError as error:
                told.append(str(error))
        with dense_flex_allowed():
            out = flex_attention(x, x, x)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        elsewhere()
        print(tuple(out.shape), len(told), "(1, 2, 16, 16)" in told[0])
    """)
        == "(1, 2, 16, 16) 2 True"
    )


def test_a_thread_that_traces_still_annotates_its_own_graph(fresh):
    assert (
        fresh("""
        import torch, torch.fx.traceback as traceback
        from torch.fx.experimental.proxy_tensor import make_fx
        from slipstream.compilation import install
        install()
        def f(x):
            with traceback.annotate({"mine": 1}):
                return x + 1
        with traceback.preserve_node_meta():
            graph = make_fx(f)(torch.ones(2)).graph
        made = [n.meta.get("custom") for n in graph.nodes if n.op == "call_function"]
        seen = []
        def backend(g, _):
            seen.extend(n.meta.get("custom") for n in g.graph.nodes if n.op == "call_function")
            return g.forward
        torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2))
        print(made, seen)
    """)
        == "[{'mine': 1}] [{'mine': 1}]"
    )


def test_what_is_imported_later_and_not_known_is_refused_by_verify_unless_it_is_allowed(fresh, tmp_path):
    """An FLA that keeps its results in some other way comes when ``install`` has long been called."""
    package = tmp_path / "other" / "fla"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "utils.py").write_text("def cached(fn):\n    return fn\n")
    assert (
        fresh(f"""
        import sys
        sys.path.insert(0, {str(package.parent)!r})
        from slipstream.compilation import CompilationError, install, report, verify
        seen = [install()["fla-tensor-cache"].status]
        verify()
        import fla.utils
        assert fla.utils.cached, fla.utils.__file__
        for refuse in (verify, install):
            try:
                refuse()
            except CompilationError as error:
                seen.append("fla-tensor-cache: fla.utils has no tensor_cache" in str(error))
        for allow in (lambda: install(allow_unknown=True), verify, install):
            seen.append(allow()["fla-tensor-cache"].status)
        print(seen)
    """)
        == "['not imported yet', True, True, 'unknown', 'unknown', 'unknown']"
    )


def test_installing_while_another_thread_imports_what_is_waited_for(fresh, tmp_path):
    """FLA imports Triton: its hook runs inside an import that install() may be waiting for."""
    package = tmp_path / "fla"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "utils.py").write_text(
        "import time; time.sleep(0.3); import triton; time.sleep(0.1)\nfrom collections import deque\n"
        "def tensor_cache(fn):\n    kept = deque()\n    return fn\n"
    )
    assert (
        fresh(f"""
        import sys, threading, time, faulthandler
        faulthandler.dump_traceback_later(60, exit=True)
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        from slipstream.compilation import install, report
        importing = threading.Thread(target=lambda: __import__("fla.utils"))
        importing.start()
        time.sleep(0.05)
        install()
        importing.join()
        print(report()["triton-autotuner"].status)
    """)
        == "handled"
    )


def test_verify_waits_for_an_install_in_another_thread(fresh):
    assert (
        fresh("""
        import threading, time
        from slipstream.compilation import install, safety, verify
        failures, started = [], threading.Semaphore(0)
        def look():
            started.release()
            try:
                verify()
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        threads = [threading.Thread(target=look) for _ in range(4)]
        with safety._installing:  # as held by install(), which enters it once more below: it has just begun
            [t.start() for t in threads]
            [started.acquire() for _ in threads]
            # Who does not wait fails within microseconds, long before torch, which install() imports, is there.
            end = time.monotonic() + 0.3
            [t.join(max(end - time.monotonic(), 0)) for t in threads]
            waiting = sum(t.is_alive() for t in threads)
            install()
        [t.join() for t in threads]
        print(waiting, failures)
    """)
        == "4 []"
    )


def test_verify_does_not_wait_for_kernels_that_are_being_tuned(fresh):
    assert (
        fresh("""
        import threading, time, triton, torch._inductor.runtime.triton_heuristics
        from slipstream.compilation import install, verify
        from slipstream.compilation.locks import tuning_lock
        install()
        held, done = threading.Event(), threading.Event()
        def tune():
            with tuning_lock(-1):
                held.set()
                done.wait(60)
        thread = threading.Thread(target=tune)
        thread.start()
        held.wait()
        began = time.monotonic()
        verify()
        done.set()
        print(time.monotonic() - began < 5)
    """)
        == "True"
    )


def test_install_beside_a_thread_that_compiles_leaves_it_its_flags(fresh):
    told = fresh("""
        import threading, torch
        from slipstream.compilation import install, verify
        inside, leave, seen = threading.Event(), threading.Event(), []

        def backend(graph, _):
            seen.append(torch.compiler.is_compiling())
            inside.set()
            leave.wait(60)
            seen.append(torch.compiler.is_compiling())
            return graph.forward

        def work():
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

        other = threading.Thread(target=work)
        other.start()
        assert inside.wait(60)
        threading.Timer(0.5, leave.set).start()
        install()
        other.join()
        verify()
        print(seen)
    """)
    assert told in ("[True, True]", "[False, False]")


def test_install_beside_a_thread_that_tunes_leaves_it_its_arguments(fresh):
    told = fresh("""
        import threading, triton
        from triton.runtime.autotuner import Autotuner
        from slipstream.compilation.autotune import _Kernel
        inside, leave, ended = threading.Event(), threading.Event(), []

        def bench(call, quantiles=None):
            inside.set()
            leave.wait(30)
            call()
            return [1.0] * 3

        configs = [triton.Config({}, num_warps=w) for w in (1, 2, 4)]
        tuner = Autotuner(_Kernel(), ["x"], configs, ["x"], None, None, do_bench=bench)

        def work():
            try:
                tuner.run(7)
                ended.append("well")
            except BaseException as error:
                ended.append(repr(error))

        other = threading.Thread(target=work)
        other.start()
        assert inside.wait(30)
        from slipstream.compilation import install
        install()
        leave.set()
        other.join()
        print(*ended)
    """)
    assert told == "well"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triton.runtime.autotuner", "Autotuner"),
        ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner"),
        ("torch.fx._symbolic_trace", "Tracer"),
        ("torch.nn.attention.flex_attention", "flex_attention"),
    ],
)
def test_a_module_without_what_is_looked_for_is_unknown_and_not_a_traceback(fresh, module, name):
    told = fresh(f"""
        import importlib
        import torch, torch._dynamo, torch._inductor.compile_fx, torch.nn.attention.flex_attention, triton
        module = importlib.import_module("{module}")
        kept = module.{name}
        del module.{name}
        from slipstream.compilation import CompilationError, install
        try:
            install()
        except CompilationError as error:
            assert "{name}" in str(error), error
            print(sorted(s.status for s in install(allow_unknown=True).states).count("unknown") >= 1)
    """)
    assert told == "True"


def test_two_traces_at_once_are_found_by_verify(fresh):
    told = fresh("""
        import contextlib, torch
        from slipstream.compilation import CompilationError, fx_trace, install, verify
        install()
        verify()

        class Open:
            def acquire(self, blocking=True):
                return True
            def release(self):
                pass
            __enter__ = acquire
            def __exit__(self, *_):
                pass

        fx_trace.trace_lock = Open
        try:
            verify()
            print("not seen")
        except CompilationError as error:
            print("two threads can trace at once" in str(error))
    """)
    assert told == "True"
