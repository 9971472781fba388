"""A patched model on several ranks, each with a part of the batch: loss and gradients of one process with all of it."""

import copy
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import RankFailed, assert_same, full, mean, mine, run
from models import batch, step, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

import liger_kernel

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain


# The harness itself


def _sum():
    ones = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(ones)
    return ones.tolist()


def _one_rank(does):
    if dist.get_rank() == 1:
        does()
    dist.barrier()


def _raise():
    raise ValueError("a reason")


def _die():
    os._exit(7)


def _sleep():
    time.sleep(60)


def test_a_run_returns_what_its_ranks_return():
    assert run(_sum, 3) == [[3.0, 3.0]] * 3


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (_raise, r"rank 1 of 2: (?s:.)*ValueError: a reason"),
        (_die, r"rank 1 of 2: died with exit code 7"),
        (_sleep, r"rank 1 of 2: still ran after 3 s(?s:.)*in _sleep"),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_is_named(does, told):
    began = time.monotonic()
    with pytest.raises(RankFailed, match=told):
        run(_one_rank, 2, does, timeout=3)
    assert time.monotonic() - began < 20


def _worlds(folder):
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=1), 2 + rank, rank)


def test_ranks_that_disagree_about_their_number(tmp_path):
    """Rank 1 waits for a third one: an error that names it, not a hang."""
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2: (?s:.)*_worlds"):
        run(_worlds, 2, tmp_path, timeout=10)
    assert time.monotonic() - began < 20


# Data parallel: parameters replicated or sharded


def _ddp(model):
    return nn.parallel.DistributedDataParallel(model)


def _ddp_static(model):
    return nn.parallel.DistributedDataParallel(
        model, static_graph=True, gradient_as_bucket_view=True
    )


def _fsdp1(own_head, strategy):
    def wrap(model):
        options = {
            "device_id": torch.device("cpu"), "use_orig_params": True, "sharding_strategy": strategy,
        }  # fmt: skip
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = FullyShardedDataParallel(layer, **options)
        if own_head:
            model.lm_head = FullyShardedDataParallel(model.lm_head, **options)
        return FullyShardedDataParallel(model, **options)

    return wrap


def _fsdp2(own_head, reshard, mesh_shape=None):
    def wrap(model):
        shape = mesh_shape or (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        options = {
            "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
            "reshard_after_forward": reshard,
        }
        for layer in model.model.layers:
            fully_shard(layer, **options)
        if own_head:
            fully_shard(model.lm_head, **options)
        return fully_shard(model, **options)

    return wrap


_ENGINES = {
    "ddp": _ddp,
    "ddp, static graph": _ddp_static,
    "fsdp1": _fsdp1(False, ShardingStrategy.FULL_SHARD),
    "fsdp1, own head": _fsdp1(True, ShardingStrategy.FULL_SHARD),
    "fsdp1, gradients sharded": _fsdp1(False, ShardingStrategy.SHARD_GRAD_OP),
    "fsdp2": _fsdp2(False, True),
    "fsdp2, kept": _fsdp2(False, False),
    "fsdp2, own head": _fsdp2(True, True),
    "fsdp2, own head, kept": _fsdp2(True, False),
    "hsdp": _fsdp2(False, True, (2, 2)),
    "hsdp, own head": _fsdp2(True, True, (2, 2)),
}


def _gradients(model):
    """name -> whole gradient, names as in the unwrapped model; a collective call under FSDP."""
    if not isinstance(model, FullyShardedDataParallel):
        named = {n: full(p.grad) for n, p in model.named_parameters()}
    else:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            named = {n: p.grad.clone() for n, p in model.named_parameters()}
    wrappers = ("module.", "_fsdp_wrapped_module.")
    for wrapper in wrappers:
        named = {name.replace(wrapper, ""): grad for name, grad in named.items()}
    return named


def _same_as_one_process(name, heads):
    for tied in heads:
        for patched_first in (True, False):
            _steps(name, tied, patched_first)


def _steps(name, tied, patched_first):
    plain = tiny("llama", tie_word_embeddings=tied)
    model = copy.deepcopy(plain)
    whole = batch(rows=2 * dist.get_world_size())
    expected, wanted = step(plain, **whole)
    if patched_first:
        liger_kernel.patch(model)
    parallel = _ENGINES[name](model)
    if not patched_first:
        assert liger_kernel.patch(parallel).count("head") == 1
    for _ in range(2):  # the second step finds the units as the first one left them
        parallel.zero_grad()
        outputs = parallel(**mine(whole))
        assert outputs.logits is None
        outputs.loss.backward()
        torch.testing.assert_close(mean(outputs.loss), expected.loss.detach())
        assert_same(_gradients(parallel), wanted)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", _ENGINES)
def test_engine(name):
    """Patched before and after wrapping; a tied head where it is no unit of its own."""
    heads = [False] if "head" in name else [False, True]
    run(_same_as_one_process, 4 if "hsdp" in name else 2, name, heads)


def _mixed_precision():
    """16-bit parameters around fp32 ones: no farther from the fp32 step than the model as shipped."""
    exact, whole = tiny("llama"), batch(rows=4)
    expected, wanted = step(exact, **whole)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
    for patched in (False, True):
        model = copy.deepcopy(exact)
        model.zero_grad()
        for unit in (*model.model.layers, model.lm_head, model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        if patched:
            liger_kernel.patch(model)
        outputs = model(**mine(whole))
        assert (outputs.logits is None) == patched
        outputs.loss.backward()
        found = _gradients(model)
        errors.append([float((found[n] - g).norm() / g.norm()) for n, g in wanted.items()])
        torch.testing.assert_close(
            mean(outputs.loss), expected.loss.detach(), rtol=2e-2, atol=0.0, check_dtype=False
        )
    for shipped, ours in zip(*errors, strict=True):
        assert ours <= 2 * shipped + 1e-3


def test_mixed_precision():
    run(_mixed_precision, 2)


def _checkpointed():
    plain = tiny("llama")
    model, whole = copy.deepcopy(plain), batch(rows=4)
    expected, wanted = step(plain, **whole)
    liger_kernel.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    parallel = _fsdp2(True, True)(model)
    outputs = parallel(**mine(whole), use_cache=False)
    outputs.loss.backward()
    torch.testing.assert_close(mean(outputs.loss), expected.loss.detach())
    assert_same(_gradients(parallel), wanted)


def test_gradient_checkpointing_under_fsdp2():
    run(_checkpointed, 2)
