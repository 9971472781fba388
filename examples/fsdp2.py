"""Fine-tune a causal language model with FSDP2.     torchrun --nproc-per-node 8 examples/fsdp2.py MODEL TEXT

The one line is `liger_kernel.patch(model)`; before or after `fully_shard` makes no difference. Head and loss run inside
the head module's own forward, where FSDP has gathered its weight, so the head may also be a unit of its own.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

import liger_kernel


def main(argv=None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences a step and process")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(argv)

    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.device(
            torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"])
        )
        torch.accelerator.set_device_index(device.index)
    if not dist.is_initialized():
        dist.init_process_group(device_id=None if device.type == "cpu" else device)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).train()
    report = liger_kernel.patch(model)
    if rank == 0:
        print(report)
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    losses = []
    for ids in batches(args, rank, ranks):
        loss = model(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
        if rank == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    return losses


def batches(args, rank: int, ranks: int):
    """This process's `[batch, seq]` of every step; as many valid tokens on each, so the mean of means is the mean."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with open(args.text, encoding="utf-8") as file:
        ids = torch.tensor(tokenizer(file.read(), add_special_tokens=False)["input_ids"])
    rows = ids[: len(ids) // args.seq * args.seq].view(-1, args.seq)
    for step in range(args.steps):
        first = (step * ranks + rank) * args.batch
        yield rows[torch.arange(first, first + args.batch) % len(rows)]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
