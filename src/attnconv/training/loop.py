"""Training loop in plain PyTorch. With torchrun, each process computes its share of every batch.

The order of the images is a function of (seed, epoch), augmentation of (seed, epoch, sample), and dropout of (seed,
epoch, batch, process), so a training state needs no generator state.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from attnconv._util.glibc_malloc import freed_memory_kept
from attnconv._util.processes import rank, world_size
from attnconv.data.augmentation import augment, mix
from attnconv.data.image_set import Batch, Batches, ImageSet, Splits
from attnconv.models.checkpoint import About
from attnconv.models.settings import ResNetSettings
from attnconv.training.evaluation import Metrics, autocast, dtype_of, metrics_of, tally, tally_batches, zero_tally
from attnconv.training.optimisers import make_optimiser, rate_factor
from attnconv.training.settings import RunSettings


@final
class TrainingLoop:
    """Training and evaluation of a model on image sets.

    `epoch` is the number of completed epochs, `step` the number of optimiser steps. The last batch of an epoch is
    dropped if it is incomplete; since images are shuffled, this omits different images in every epoch.
    """

    def __init__(self, settings: RunSettings, model: nn.Module, data: Splits, device: torch.device) -> None:
        train = settings.train
        self.settings, self.device = settings, device
        self.about = About(data.classes, data.mean, data.std)
        self.epoch = self.step = 0
        self.learning_rate = 0.0  # of the last step
        self.steps_per_epoch = len(data.train) // train.batch_size
        self.model = model.to(device=device, dtype=dtype_of(train.precision))
        # With fewer than 8 channels, oneDNN writes out of bounds in the backward pass (see `operators.shift`).
        if isinstance(settings.model, ResNetSettings) and min(settings.model.widths) >= 8:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in the stub
        if train.compile:
            self.model.compile()
        self._parallel = DistributedDataParallel(self.model) if world_size() > 1 else None
        self._optimiser = make_optimiser(self.model, settings.optim)
        self._rates = [group["lr"] for group in self._optimiser.param_groups]
        self._batches = Batches(
            nearby(data.train, device),
            batch_size=train.batch_size // train.accumulate,
            seed=train.seed,
            shuffle=True,
            rank=rank(),
            world=world_size(),
            drop_last=True,
        )
        measured = {"validation": data.validation, **({"test": data.test} if train.test_curve else {})}
        self._measured = {name: nearby(images, device) for name, images in measured.items() if len(images)}
        self.tally = functools.partial(
            tally_batches, self.model, mean=data.mean, std=data.std, precision=train.precision, device=device
        )
        self._epoch_sums = zero_tally(device)

    def train_epoch(self, on_step: Callable[[], None]) -> None:
        """Train for one epoch, and call `on_step` after every optimiser step."""
        self.model.train()
        self._epoch_sums.zero_()
        self._batches.epoch = self.epoch
        batches = iter(self._batches)
        for _ in range(self.steps_per_epoch):
            self.train_step(itertools.islice(batches, self.settings.train.accumulate))
            on_step()
        self.epoch += 1

    def train_step(self, batches: Iterator[Batch]) -> None:
        """Take one optimiser step with the mean gradient of the batches."""
        accumulate, clip = self.settings.train.accumulate, self.settings.optim.clip
        self._optimiser.zero_grad()
        for part, batch in enumerate(batches):
            last = part + 1 == accumulate  # gradients are averaged over the processes once
            with nullcontext() if last or self._parallel is None else self._parallel.no_sync():
                loss = self._loss(batch.to(self.device), self.step % self.steps_per_epoch * accumulate + part)
                (loss / accumulate).backward()
        if clip is not None:
            parameters = [value for group in self._optimiser.param_groups for value in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip)
        schedule, epochs = self.settings.schedule, self.settings.train.epochs
        factor = rate_factor(schedule, self.step, steps_per_epoch=self.steps_per_epoch, epochs=epochs)
        self.learning_rate = self.settings.optim.learning_rate * factor
        for group, rate in zip(self._optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._optimiser.step()
        self.step += 1

    def _loss(self, batch: Batch, index: int) -> Float[Tensor, ""]:
        """Compute the loss of the batch with the given index in the epoch."""
        train, changes = self.settings.train, self.settings.augment
        seed_generators(step_seed(train.seed, self.epoch, index, rank()), self.device)
        with autocast(train.precision, self.device):
            images = augment(batch.images, batch.uniforms, settings=changes, mean=self.about.mean, std=self.about.std)
            images, targets = images.to(dtype_of(train.precision)), batch.labels
            if changes.mixup > 0.0 or changes.cutmix > 0.0:
                classes = self.settings.model.classes
                images, mixed = mix(images, batch.labels, batch.uniforms, settings=changes, classes=classes)
                targets = mixed.to(images.dtype)
            logits = (self._parallel or self.model)(images).to(images.dtype)  # the loss is computed in full precision
            with torch.no_grad():
                self._epoch_sums += tally(logits, batch.labels)
            return F.cross_entropy(logits, targets, label_smoothing=self.settings.optim.label_smoothing)

    def evaluate(self) -> dict[str, Metrics]:
        """Return the training metrics of the last epoch, and evaluate the other sets."""
        world = world_size()
        size = max(1, self.settings.train.eval_batch_size // world) * world
        metrics = {"train": self.train_metrics()}
        for name, images in self._measured.items():
            batches = Batches(images, batch_size=size, rank=rank(), world=world)
            metrics[name] = _metrics_of_all(self.tally(batches))
        return metrics

    def train_metrics(self) -> Metrics:
        """Return the metrics of the current epoch's training images, accumulated during training."""
        return _metrics_of_all(self._epoch_sums)

    def state(self) -> dict[str, Any]:
        """Return the training state after a complete epoch as plain values and tensors."""
        return {"epoch": self.epoch, "model": self.model.state_dict(), "optimizer": self._optimiser.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.step = state["epoch"], state["epoch"] * self.steps_per_epoch
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimizer"])


def _metrics_of_all(sums: Float[Tensor, " 3"]) -> Metrics:
    """Compute metrics over the images of all processes, each of which must call this function."""
    sums = sums.clone()
    if world_size() > 1:
        torch.distributed.all_reduce(sums)
    return metrics_of(sums)


@contextmanager
def numerics(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms on the CPU, and the fastest convolutions on a GPU; flush denormals to zero.

    Peaked attention produces denormal numbers, with which CPUs are up to fourteen times slower. Flushing applies to
    this thread and to threads that it starts, and remains in effect after the block.
    """
    torch.set_flush_denormal(True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its properties are missing in the stub
    filled, tried = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    on_cpu = device.type == "cpu"
    with freed_memory_kept() if on_cpu else nullcontext(), torch.random.fork_rng(devices=[]):
        if on_cpu:
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = False  # no uninitialised memory is read
        else:
            torch.backends.cudnn.benchmark = True  # the batches of a run have few different shapes
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, tried


def nearby(images: ImageSet, device: torch.device) -> ImageSet:
    """Copy a set to the GPU if it needs at most a quarter of the free memory; otherwise return it unchanged."""
    if device.type != "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.images.nbytes + images.labels.nbytes <= free / 4 else images


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the CPU and one device, which is faster than `torch.manual_seed` for all devices."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def step_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """Return the seed of torch's generator for one forward pass, which differs between batches and processes."""
    return int(np.random.SeedSequence((seed, epoch, batch, rank)).generate_state(1, np.uint64)[0]) >> 1  # 63 bits
