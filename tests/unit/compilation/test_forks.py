"""A child that is forked while another thread compiles or traces: it compiles too, and the parent goes on."""

from __future__ import annotations

PRELUDE = """
    import os, threading, time, torch
    from slipstream.compilation import first_call_alone, install, verify
    install()
    # torch 2.11 for CUDA, on a machine without a GPU: the first compilation of a process must be the main thread's.
    torch.compile(lambda x: x - 1, backend="eager")(torch.ones(1))
    inside, leave = threading.Event(), threading.Event()

    def child(body, seconds=60):
        reads, writes = os.pipe()
        number = os.fork()
        if not number:
            try:
                said = repr(body())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writes, said.encode())
            os._exit(0)
        os.close(writes)
        end = time.monotonic() + seconds
        while not os.waitpid(number, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(number, 9)
                os.waitpid(number, 0)
                return "it hangs"
            time.sleep(0.01)
        return os.read(reads, 10_000).decode()

    def in_new_thread(body):
        found = []
        thread = threading.Thread(target=lambda: found.append(body()))
        thread.start()
        thread.join()
        return found[0]

    def beside(body):
        thread = threading.Thread(target=body)
        thread.start()
        assert inside.wait(60)
        return thread

    def slow(graph, _):
        inside.set()
        leave.wait(300)
        return graph.forward
"""


def test_during_a_first_call(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    double = first_call_alone(lambda x: x * 2, backend=slow)
    results = []
    thread = beside(lambda: results.append(double(torch.ones(3)).tolist()))
    def body():
        verify()
        leave.set()  # the child's
        other = torch.compile(lambda x: x + 1, backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist()
        return double(torch.ones(3)).tolist(), other, torch.compiler.is_compiling(), in_new_thread(verify) is not None
    said = child(body)
    before = results[:]
    leave.set()
    thread.join()
    print(said, before, results, double.signatures())
    """
        )
        == "([2.0, 2.0, 2.0], [2.0, 2.0], False, True) [] [[2.0, 2.0, 2.0]] 1"
    )


def test_during_a_trace_modules_are_nobodys_but_the_childs(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    def helper(x):
        return x
    torch.fx.wrap("helper")
    class Slow(torch.nn.Module):
        def forward(self, x):
            inside.set()
            leave.wait(300)
            return helper(x) + 1
    kept = torch.nn.Module.__call__, torch.nn.Module.__getattr__, helper
    def as_before():
        return kept == (torch.nn.Module.__call__, torch.nn.Module.__getattr__, helper)
    graphs = []
    thread = beside(lambda: graphs.append(torch.fx.symbolic_trace(Slow()).graph))
    def body():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        kinds = {type(in_new_thread(lambda: model(torch.ones(1, 2)))).__name__ for _ in range(8)}
        nodes = in_new_thread(lambda: len(torch.fx.symbolic_trace(model).graph.nodes))
        verify()
        return kinds, nodes, torch.fx._symbolic_trace.is_fx_symbolic_tracing(), as_before()
    said, meanwhile = child(body), as_before()
    leave.set()
    thread.join()
    print(said, meanwhile, len(graphs[0].nodes), as_before())
    """
        )
        == "({'Tensor'}, 3, False, True) False 4 True"
    )


def test_what_the_child_traces_is_compiled_and_bears_no_annotation_of_the_parents(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    import torch.fx.traceback as traceback
    from torch.fx.experimental.proxy_tensor import make_fx
    def annotated(x):
        with traceback.annotate({"parents": 1}):
            inside.set()
            leave.wait(300)
            return x + 1
    def body():
        ran = []
        def backend(graph, _):
            ran.append(graph)
            return graph.forward
        traced = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
        torch.compile(traced, backend=backend)(torch.ones(1, 2))
        return len(ran), traceback.current_meta, traceback.should_preserve_node_meta
    said = []
    def trace():
        with traceback.preserve_node_meta():
            make_fx(annotated)(torch.ones(2))
    for work in (lambda: torch.compile(lambda x: x * 2, backend=slow)(torch.ones(3)), trace):
        inside.clear(), leave.clear()
        thread = beside(work)
        said.append(child(body))
        leave.set()
        thread.join()
    print(*said)
    """
        )
        == "(1, {}, False) (1, {}, False)"
    )


def test_by_the_thread_that_compiles_both_go_on(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    def work():
        def forks(graph, _):
            return graph.forward if os.fork() else (born.append(1), graph.forward)[1]
        born = []
        result = first_call_alone(lambda x: x * 2, backend=forks)(torch.ones(2)).tolist()
        if not born:
            return result, os.waitstatus_to_exitcode(os.wait()[1])
        from torch._dynamo.convert_frame import compile_lock
        after = in_new_thread(lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
        os._exit(7 if result == after == [2.0, 2.0] and compile_lock.acquire(timeout=1) else 1)
    print(work())
    """
        )
        == "([2.0, 2.0], 7)"
    )


def test_nothing_is_touched_where_nothing_is_compiled(fresh):
    assert (
        fresh(
            PRELUDE
            + """
    import torch.fx.traceback as traceback
    from torch._dynamo.convert_frame import compile_lock
    mine = traceback.current_meta = {"mine": 1}
    before = repr(compile_lock)
    print(child(lambda: (traceback.current_meta is mine, repr(compile_lock) == before)))
    """
        )
        == "(True, True)"
    )
