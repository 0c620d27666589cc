"""FLA's real tuners: which arguments make them tune anew."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

SHOW = """
    def keys(kernel):
        while not hasattr(kernel, "keys"):
            kernel = kernel.fn
        return list(kernel.keys)
    from fla.modules.norm.l2norm import l2norm_fwd_kernel as norm
    from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel as cumsum
    print(keys(norm), keys(cumsum))
"""
AS_IT_IS = "['D', 'NB'] ['B', 'H', 'BT', 'IS_VARLEN', 'REVERSE']"
SHORTER = "['D'] ['H', 'BT', 'IS_VARLEN', 'REVERSE']"
CALL = """
    from slipstream.compilation.tuning_counts import tune_for_any_count
    tune_for_any_count()
"""


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (SHOW, AS_IT_IS),
        (CALL + SHOW, SHORTER),
        (SHOW + CALL + SHOW, SHORTER),
        (CALL + "    import triton\n" + CALL + SHOW, SHORTER),
        (CALL + "    from slipstream.compilation import install; install()\n" + SHOW, SHORTER),
    ],
    ids=["as it is", "before FLA", "after FLA", "twice", "with install"],
)
def test_the_keys_of_flas_tuners_hold_no_count(fresh, code, shown):
    assert fresh(code) == shown


TUNE = """
    import triton
    from triton.runtime.autotuner import Autotuner
    benches = []
    class Kernel:
        arg_names = ["D", "NB"]
        def __init__(self, home):
            def kernel(D, NB):
                pass
            kernel.__module__ = home
            self.fn = kernel
        def run(self, *args, **kwargs):
            pass
    def bench(call, quantiles=None):
        benches.append(1)
        return [float(len(benches))] * 3
    def tuned(home):
        benches.clear()
        configs = [triton.Config({}, num_warps=w) for w in (1, 2, 4)]
        tuner = Autotuner(Kernel(home), ["D", "NB"], configs, ["D", "NB"], None, None, do_bench=bench)
        for blocks in range(1, 9):
            tuner.run(64, blocks)
        chosen = {c.num_warps for c in tuner.cache.values()}
        tuner.run(128, 1)
        return len(benches), chosen
    print(tuned("fla.made_up"), tuned("other"))
"""


def test_another_count_takes_the_choice_that_was_made(fresh):
    assert fresh(CALL + TUNE) == "(6, {1}) (27, {1})"
    assert fresh(TUNE) == "(27, {1}) (27, {1})"


def test_a_choice_made_before_holds_for_all_counts(fresh):
    later = """
    import sys, types
    configs = [triton.Config({}, num_warps=w) for w in (1, 2, 4)]
    tuner = Autotuner(Kernel("fla.made_up"), ["D", "NB"], configs, ["D", "NB"], None, None, do_bench=bench)
    tuner.run(64, 1), tuner.run(64, 3), tuner.run(64, 2), tuner.run(128, 1)
    tuner.cache[(64, 3)] = configs[2]
    sys.modules["fla.made_up"] = types.SimpleNamespace(kernel=types.SimpleNamespace(fn=tuner))
    benches.clear()
    """
    after = """
    tuner.run(64, 9), tuner.run(128, 9)
    print(len(benches), tuner.keys, tuner.cache[(64,)].num_warps, tuner.cache[(128,)].num_warps)
    """
    assert fresh(TUNE + later + CALL + after) == "0 ['D'] 4 1"


def test_nothing_is_imported(fresh):
    code = CALL + "    import sys\n    print('triton' in sys.modules, 'torch' in sys.modules, 'fla' in sys.modules)\n"
    assert fresh(code) == "False False False"
