"""Several scalings on the same data, seeds and stream, side by side; what `scalelong compare` runs.

Every run is a run folder of its own, so that an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from scalelong.config import RunConfig, with_overrides
from scalelong.data.images import cores
from scalelong.data.store import open_store

if TYPE_CHECKING:
    from scalelong.experiment import Beginning

SCALINGS = ("none", "1/sqrt2", "cs:0.7", "ls")
SEEDS = (0, 1)
HELD_OUT_NUM = 2_000
# Sized for two CPU cores: eight runs of the digits within five minutes.
DIGITS_SETTINGS = (
    "train.steps=600",
    "train.batch_size=32",
    "train.lr=3e-3",
    "train.warmup_steps=50",
    "train.sample_every=150",
    "train.checkpoint_every=300",
    "train.keep_checkpoints=1",
    "model.changes.hidden_size=48",
    "model.changes.identity_final_conv=true",  # or the last convolution's slow start is most of so short a training
    "train.ema_rates=0.99",
)


def shared_config(preset: str, settings: Sequence[str], init: str | None = None) -> RunConfig:
    """What all runs of a comparison have in common: a recipe, that of the digits for two cores, with settings."""
    from scalelong.presets import run_preset

    small = list(DIGITS_SETTINGS) if preset == "digits" else []
    if init is not None:  # which decides the network
        small = [setting for setting in small if not setting.startswith("model.")]
    return with_overrides(run_preset(preset), [*small, *settings])


@dataclass(frozen=True)
class Judging:
    """How runs are judged as they train.

    Samples on which features ("none" for no samples), how many, drawn in how many steps (None: as the run says).
    """

    features: str = "pixels"
    num: int = 256
    steps: int | None = 20
    every: int | None = None  # by default whenever pictures are drawn
    held_out: Path | None = None  # prepared images that are not trained on, for their loss


@dataclass(frozen=True)
class Member:
    """One run of a comparison."""

    scaling: str
    seed: int
    folder: Path
    config: RunConfig
    judging: Judging | None = Judging()
    init: str | None = None  # whose weights it begins with; by default they are drawn by the seed


def members(
    base: RunConfig,
    scalings: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    judging: Judging = Judging(),  # noqa: B008 - frozen
    init: str | None = None,
) -> list[Member]:
    """Every scaling with every seed; a scaling's runs differ from another's in nothing else."""
    result = []
    for seed in seeds:
        for scaling in scalings:
            name = scaling.replace("/", "-").replace(":", "-")
            folder = out / f"{name}-seed{seed}"
            fitted = base if init is None else _fitted_to(init, folder, base)
            config = with_overrides(fitted, [f"model.scaling={scaling}", f"train.seed={seed}"])
            result.append(Member(config.model.scaling, seed, folder, config, judging, init))
    wanted = [(member.scaling, member.seed) for member in result]
    if len(set(wanted)) < len(wanted):
        scaling, seed = next(pair for pair in wanted if wanted.count(pair) > 1)
        raise ValueError(f"a comparison has each scaling and seed once, got {scaling} with seed {seed} twice.")
    return result


def _fitted_to(init: str, folder: Path, base: RunConfig) -> RunConfig:
    """With the arguments of the network whose weights a run begins with, or began with."""
    from scalelong.experiment import Weights, beginning_in

    unscaled = with_overrides(base, ["model.scaling=none"])
    fitted = beginning_in(folder, Weights(init)).fitted(unscaled)
    if fitted.model.scaling != "none":
        raise ValueError(
            f"a comparison varies the scaling, and {init} was trained with its own, {fitted.model.scaling!r}; give "
            "weights that have none (scalelong export --fold)."
        )
    return fitted


def beginning_of(member: Member) -> Beginning:
    """Where its first weights come from."""
    from scalelong.experiment import Beginning, Weights

    return Beginning() if member.init is None else Weights(member.init)


def run_one(member: Member, data: Path) -> bool:
    """Train one member; its samples are judged as it goes."""
    from scalelong import experiment
    from scalelong.judging import judge_held_out, judge_quality
    from scalelong.metrics.features import features_named

    forget_compiled()
    store, how, begin = open_store(data), member.judging, beginning_of(member)
    if how is None:
        return experiment.train(member.config, store, member.folder, begin=begin)
    device, judges = experiment.default_device(), []
    if how.features != "none":
        features = features_named(how.features, None, device)
        judges.append(judge_quality(member.config, store, features, num=how.num, steps=how.steps, every=how.every))
    if how.held_out is not None:
        unseen = open_store(how.held_out)
        judges.append(judge_held_out(member.config, store, unseen, device, num=HELD_OUT_NUM, every=how.every))
    return experiment.train(member.config, store, member.folder, judges=judges, begin=begin)


def train_or_record(member: Member, data: Path) -> bool:
    """Train one run; that it diverged, which its log says, is a result like others."""
    from scalelong.training.guard import NonFiniteError

    if diverged(member.folder):
        return True
    try:
        return run_one(member, data)
    except NonFiniteError:
        return True


def run_all(
    group: Sequence[Member],
    data: Path,
    *,
    workers: int,
    watch: Callable[[list[bool]], None],
    run: Callable[[Member, Path], bool] = train_or_record,
) -> list[bool]:
    """Train all, `workers` at a time, each in a process of one thread. `watch` is called twice a second.

    `run` is what a process does with a member: a function of a module, as it is sent there.
    """
    context = multiprocessing.get_context("spawn")
    left, futures = iter(group), list[Future[bool]]()
    with (
        ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool,
        _ended_like_ctrl_c(),
    ):
        interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                under_way = [future for future in futures if not future.done()]
                # One more when one is done: what waits in the pool's own queue cannot be called back.
                begun = [pool.submit(run, member, data) for member in islice(left, workers - len(under_way))]
                futures += begun
                if not under_way and not begun:
                    break
                watch([future.done() for future in futures] + [False] * (len(group) - len(futures)))
                wait(under_way + begun, timeout=0.5, return_when=FIRST_COMPLETED)
            interrupted = False
        if interrupted:
            for child in multiprocessing.active_children():  # told by a terminal too, they save once all the same
                child.terminate()
        done = [_result(future, interrupted) for future in futures]
    return done + [False] * (len(group) - len(done))


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM, which schedulers send, is taken for Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _result(future: Future[bool], interrupted: bool) -> bool:
    """A process that Ctrl-C met as it was starting has gone, or says so, and its run was not done."""
    try:
        return future.result()
    except KeyboardInterrupt:
        return False
    except BrokenProcessPool:
        if interrupted:
            return False
        raise


def diverged(folder: Path) -> bool:
    """Whether a run ended on a step that was not finite."""
    from scalelong.training.log import divergence

    return divergence(folder) is not None


def forget_compiled() -> None:
    """Where one process trains net after net: beyond eight forms of one function torch compiles no more."""
    import torch

    torch.compiler.reset()


def default_workers(device: str) -> int:
    """One run at a time on a GPU; on the CPU as many as there are cores."""
    return 1 if device != "cpu" else cores()


def _begin_worker() -> None:
    """One thread, and no life of its own: a killed comparison is given again, and its runs have one writer each."""
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # at once, as if killed: what is half written is left to the resumption
