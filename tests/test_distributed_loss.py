"""The scale of a loss whose tokens are spread unevenly over ranks and micro-batches: that of one process."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same, full, mean, mine, run
from models import batch, step, tiny
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import liger_kernel
from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

pytest.importorskip("transformers")
pytestmark = pytest.mark.plain

IGNORED = -100


def _ragged(rows, tokens=12):
    """A batch in which every row has another number of labels; the last two have none."""
    whole = batch(rows=rows, tokens=tokens)
    for row in range(rows):
        whole["labels"][row, : 1 + row * tokens // (rows - 2)] = IGNORED
    return whole


def _count(labels):
    return labels[:, 1:].ne(IGNORED).sum()


# Accumulation: `num_items_in_batch` is the count of all ranks and all micro-batches, the engine averages over ranks


def _accumulated(engine):
    world, micro = dist.get_world_size(), 2
    plain = tiny("llama")
    model, whole = copy.deepcopy(plain), _ragged(2 * world * micro)
    expected, wanted = step(plain, **whole)
    liger_kernel.patch(model)
    if engine == "ddp":
        parallel = nn.parallel.DistributedDataParallel(model)
    else:
        parallel = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    total = torch.zeros(())
    parts = [{n: t.chunk(micro)[i] for n, t in mine(whole).items()} for i in range(micro)]
    for i, part in enumerate(parts):
        last = i == micro - 1
        if engine == "fsdp2":
            parallel.set_requires_gradient_sync(last)
        with parallel.no_sync() if engine == "ddp" and not last else contextlib.nullcontext():
            outputs = parallel(**part, num_items_in_batch=_count(whole["labels"]))
            assert outputs.logits is None
            (world * outputs.loss).backward()
        total += world * outputs.loss.detach()
    found = {n.removeprefix("module."): full(p.grad) for n, p in parallel.named_parameters()}
    torch.testing.assert_close(mean(total), expected.loss.detach())
    assert_same(found, wanted)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_unequal_counts_and_accumulation(engine):
    """Rank 1's last micro-batch has no label at all: it adds zero, and nobody waits."""
    run(_accumulated, 2, engine)


# The Trainer counts itself


class _Data(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = _ragged(16)

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {name: tensor[i] for name, tensor in self.rows.items()}


def _train(folder, per_device, patched):
    from transformers import Trainer, TrainingArguments

    model = tiny("llama")
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=3,
        dataloader_pin_memory=False,
        use_liger_kernel=patched,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=_Data())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_trainer_averages_tokens_across_devices(tmp_path):
    """Two processes with half the batch each, patched, log the losses of one process as shipped and end up the same."""
    wanted, weights = _train(tmp_path, 4, patched=False)
    for losses, found in run(_train, 2, tmp_path, 2, True):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert_same(found, weights, 1e-4)


# Sequence and context parallel: labels are shifted before the tokens are split, so no label is lost at a border


def _tokens_of(rank, world, tensor):
    return tensor.chunk(world, dim=1)[rank].contiguous()


def _keys_of_all(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention of a split sequence: this rank's tokens look at those of every rank before them."""
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    key, value = (
        all_gather_tensor_autograd(t.contiguous(), 2, dist.group.WORLD) for t in (key, value)
    )
    tokens = query.shape[2]
    seen = torch.ones(tokens, key.shape[2]).tril(dist.get_rank() * tokens).bool()
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _split_sequence():
    from transformers import AttentionInterface

    rank, world = dist.get_rank(), dist.get_world_size()
    plain, whole = tiny("llama"), _ragged(4)
    expected, wanted = step(plain, **whole)
    model = copy.deepcopy(plain)
    AttentionInterface.register("keys_of_all", _keys_of_all)
    model.set_attn_implementation("keys_of_all")
    liger_kernel.patch(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    shifted = nn.functional.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
    inputs = {
        "input_ids": whole["input_ids"], "position_ids": torch.arange(12).expand(4, 12), "shift_labels": shifted,
    }  # fmt: skip
    local = {n: _tokens_of(rank, world, t) for n, t in inputs.items()}
    count = _count(whole["labels"]) / world  # the engine averages
    for labels in ({}, {"labels": local["shift_labels"]}):
        outputs, found = step(parallel, **local, **labels, num_items_in_batch=count)
        assert outputs.logits is None
        torch.testing.assert_close(mean(outputs.loss), expected.loss.detach())
        assert_same({n.removeprefix("module."): g for n, g in found.items()}, wanted)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_sequence(ranks):
    """Labels are shifted before the split; attention crosses the borders, and the last tokens have no label."""
    run(_split_sequence, ranks)


def _split_loss():
    """The loss function on its own, on hidden states that do know their neighbours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, whole = tiny("llama"), _ragged(4)
    expected, wanted = step(model, **whole)
    hidden = model.model(input_ids=whole["input_ids"]).last_hidden_state.detach()
    shifted = nn.functional.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
    weight = model.lm_head.weight.detach().requires_grad_()
    loss = LigerForCausalLMLoss(
        _tokens_of(rank, world, hidden), weight, None, hidden.shape[-1],
        num_items_in_batch=_count(whole["labels"]), shift_labels=_tokens_of(rank, world, shifted),
    )  # fmt: skip
    loss.backward()
    torch.testing.assert_close(world * mean(loss), expected.loss.detach())
    torch.testing.assert_close(world * mean(weight.grad), wanted["lm_head.weight"])


def test_loss_of_a_split_sequence():
    run(_split_loss, 3)
