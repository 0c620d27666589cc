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


@pytest.mark.parametrize(
    ("overwrite", "name"),
    [
        ("torch.fx.Tracer.trace = __import__('inspect').unwrap(torch.fx.Tracer.trace)", "fx-modules"),
        ("triton.runtime.autotuner.Autotuner.run = triton.runtime.autotuner.Autotuner.run.__wrapped__; "
         "del triton.runtime.autotuner.Autotuner.nargs", "triton-autotuner"),
        ("heuristics.CachingAutotuner.run = heuristics.CachingAutotuner.run.__wrapped__", "inductor-autotuner"),
        ("torch._functorch.config.force_non_lazy_backward_lowering = False", "lazy-backward"),
        ("flex.setup_compilation_env = __import__('torch._higher_order_ops.utils', fromlist=['x'])."
         "setup_compilation_env", "dense-flex"),
        ("fx = torch.fx._symbolic_trace; fx._is_fx_tracing_flag = True", "fx-flag"),
    ],
)  # fmt: skip
def test_what_a_later_import_overwrites_is_found_and_named(overwrite, name, fresh):
    text = fresh(f"""
        import torch, triton
        import torch._inductor.runtime.triton_heuristics as heuristics
        import torch.nn.attention.flex_attention as flex
        from slipstream.compilation import install, verify
        install()
        verify()
        if {name!r} == "fx-flag" and hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_tls"):
            print("fx-flag: safe upstream")
        else:
            {overwrite}
            try:
                verify()
            except Exception as error:
                print(type(error).__name__, error)
    """)
    assert f"{name}:" in text
    assert "CompilationError" in text or "safe upstream" in text


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


def test_what_is_imported_later_and_not_known_is_refused_by_verify(fresh):
    assert "fla.utils has no tensor_cache" in fresh("""
        from slipstream.compilation import install, verify
        install()
        import fla.utils
        from slipstream.compilation import safety
        from slipstream.compilation.hazards import State
        safety._states["fla-tensor-cache"] = State("fla-tensor-cache", "unknown", "fla.utils has no tensor_cache")
        try:
            verify()
        except Exception as error:
            print(error)
    """)


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
        import threading
        from slipstream.compilation import install, verify
        failures = []
        def look():
            try:
                verify()
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        first = threading.Thread(target=install)
        first.start()
        threads = [threading.Thread(target=look) for _ in range(4)]
        [t.start() for t in threads], [t.join() for t in threads], first.join()
        print({f for f in failures if "has not been called" not in f})
    """)
        == "set()"
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
