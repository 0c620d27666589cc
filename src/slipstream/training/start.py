"""From ``slipstream train`` to the ranks that train: here, or in processes that torch elastic starts and watches.

One rank trains in this process. For several this process becomes torch elastic's agent, and each rank is ``python -m
slipstream train`` with the same arguments; that is also what ``torchrun`` starts, on one machine or on many. A rank
finds its place in the topology by the number that torch elastic gave it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from slipstream.errors import ConfigError, SlipstreamError, TrainingError
from slipstream.topology import RankPlan, Topology, resolve_topology
from slipstream.training.checkpoint import latest_checkpoint
from slipstream.training.directory import RunDirectory
from slipstream.training.hardware import resolve_device
from slipstream.training.ranks import PeerError, join, launched
from slipstream.training.trainer import Preflight, train

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from slipstream.config import Recipe


def start(
    recipe: Recipe,
    *,
    arguments: Sequence[str],
    resume: bool = False,
    restarts: int = 0,
    console: Console | None = None,
    preflight: Preflight | None = None,
) -> int:
    """Train with as many ranks as the topology names; return the exit code.

    ``arguments``: of the command line, from the command on; every rank gets them. ``restarts``: how often the ranks are
    started again after a failure, from the newest checkpoint.

    Raises ConfigError for a topology that cannot be, and what ``train`` raises where this process trains.
    """
    machines = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else 1
    topology = _topology(recipe, machines)
    if launched():
        return _run_rank(recipe, topology, arguments, resume, console, preflight)
    if len(topology.ranks) == 1 and restarts == 0:
        train(recipe, argv=sys.argv, resume=resume, console=console, preflight=preflight, place=topology.ranks[0])
        return 0
    if not resume:  # here, because ranks that are started again resume what they find
        RunDirectory(Path(recipe.run.directory)).refuse_existing()
    return _launch(topology, arguments, restarts)


def _topology(recipe: Recipe, machines: int) -> Topology:
    """Return who owns what. Raises ConfigError for what cannot be, and for a target spread over several devices."""
    named = bool(recipe.topology.targets or recipe.topology.drafters or ":" in recipe.run.device)
    topology = resolve_topology(
        recipe.topology,
        accumulation=recipe.training.accumulation,
        device=recipe.run.device,
        # A split that nobody has asked for would be the first run of one: until GPUs have seen it, one device is taken.
        gpus=torch.cuda.device_count() if named else min(torch.cuda.device_count(), 1),
        machines=machines,
    )
    spread = [replica.devices for rank in topology.ranks for replica in rank.replicas if len(replica.devices) > 1]
    if spread:
        raise ConfigError(
            f"topology.targets has {'+'.join(spread[0])}: `plan` knows a target that is spread over devices, `train` "
            "cannot run one yet; give each replica one device"
        )
    return topology


def _run_rank(
    recipe: Recipe,
    topology: Topology,
    arguments: Sequence[str],
    resume: bool,
    console: Console | None,
    preflight: Preflight | None,
) -> int:
    """Be one rank of several. What ends it is written to torch elastic's error file, which the agent reads."""
    try:
        place = _place(topology)
        device = resolve_device(place.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        ranks = join(device)
        ranks.require_equal("the topology", repr(topology))
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
            resume = _again(recipe, resume)
        train(
            recipe,
            argv=[sys.argv[0], *arguments],
            resume=resume,
            console=console,
            preflight=preflight,
            ranks=ranks,
            place=place,
        )
        ranks.on_first(lambda: None)  # nobody leaves while another may still need it
    except BaseException as error:
        _record(error)
        if _agent_is_ours() and not isinstance(error, KeyboardInterrupt):
            # The agent tells the first failure, once; peers that leave because of it have nothing to say.
            _leave(2 if isinstance(error, SlipstreamError) else 1)
        raise
    if ranks.size > 1:
        _leave(0)  # threads of the process group may abort a process that ends in order
    return 0


def _place(topology: Topology) -> RankPlan:
    """Return this rank's place. Raises ConfigError where torchrun was told another number of processes."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    wanted = len(topology.local(0))
    if local != wanted:
        raise ConfigError(
            f"torchrun started {local} processes on this machine and the topology has {wanted} drafters; give it "
            f"--nproc-per-node {wanted}"
        )
    return topology.ranks[int(os.environ["RANK"])]


def _again(recipe: Recipe, resume: bool) -> bool:
    """Return whether a restarted rank resumes. Raises TrainingError where the failed start left nothing to resume."""
    directory = Path(recipe.run.directory)
    if latest_checkpoint(directory / "checkpoints") is not None:
        return True
    if resume or not (directory / "run.json").exists():
        return resume
    raise TrainingError(
        f"the ranks were started again, but {directory} has no checkpoint to go on from; give "
        "training.checkpoint_every, and start with another run.directory"
    )


def _agent_is_ours() -> bool:
    return os.environ.get("SLIPSTREAM_AGENT") == "1"


def _record(error: BaseException) -> None:
    """Write the error to where torch elastic looks for it, if it has named a file."""
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        ErrorHandler().record_exception(error)


def _leave(code: int) -> None:
    """End now: threads may be stuck in a forward, and the process group's destructor in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _launch(topology: Topology, arguments: Sequence[str], restarts: int) -> int:
    """Start one process for each rank of this machine and watch them; return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["SLIPSTREAM_AGENT"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // len(topology.ranks), 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(topology.ranks),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # the machine's own name may not resolve
        run_id="slipstream",
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "slipstream", *arguments)
    except ChildFailedError as error:
        return _tell(error)
    except SignalException as error:
        print(f"slipstream: stopped by {error.sigval.name}", file=sys.stderr)
        return 130
    finally:
        del os.environ["SLIPSTREAM_AGENT"]  # it was for the ranks alone
    return 0


def _tell(error: ChildFailedError) -> int:
    """Print what ended the job: the first rank's failure that no other rank's explains; return the exit code."""
    rank, failure = min(error.failures.items(), key=lambda item: _order(item[1]))
    said = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    if not isinstance(said, dict):
        print(f"slipstream: rank {rank} (process {failure.pid}) ended: {failure.message}", file=sys.stderr)
        return 1
    kind, _, text = str(said["message"]).partition(": ")
    if failure.exitcode == 2:
        print(f"slipstream: {text}", file=sys.stderr)
        return 2
    print(f"rank {rank}:\n{said['extraInfo']['py_callstack']}", file=sys.stderr, end="")
    print(f"slipstream: rank {rank} (process {failure.pid}) failed with {kind}", file=sys.stderr)
    return 1


def _order(failure: ProcessFailure) -> tuple[bool, int, bool]:
    """Sort causes before consequences (a lost peer, the agent's signal), and the earlier before the later.

    Of one second, an error that was told counts before a death without a word, which may be the agent's doing.
    """
    said: Any = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    kind = str(said.get("message", "")) if isinstance(said, dict) else ""
    consequence = kind.startswith((PeerError.__name__, KeyboardInterrupt.__name__))
    return consequence, failure.timestamp, failure.exitcode < 0
