"""Training steps of Llama-3-8B shapes sharded over the GPUs of one host: tokens/s and peak memory a GPU, as JSON lines.

    torchrun --nproc-per-node 2 benchmarks/fsdp.py [--variant shipped|patched|rematerialised] [--tokens 4096 8192 ...]

Random weights, bf16 parameters and AdamW states, FSDP2 with every layer and the root a unit of its own, one sequence a
GPU, sdpa attention. A length that does not fit is reported as such and ends the run.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SHAPES = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip


def build(shape: str, longest: int, device: torch.device, variant: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=longest, rope_theta=5e5, use_cache=False
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    if variant in ("patched", "rematerialised"):
        import liger_kernel

        print(liger_kernel.patch(model, rematerialise=variant == "rematerialised"), flush=True)
    if variant == "upstream":  # another package of this name, patched as its users do
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
    return model.train()


def measure(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor, steps: int
) -> dict:
    module = torch.get_device_module(ids.device)
    times = []
    module.reset_peak_memory_stats()
    for step in range(steps + 2):
        module.synchronize()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        module.synchronize()
        if step >= 2:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    return {
        "ms": round(1e3 * seconds, 1),
        "tokens/s a GPU": round(ids.numel() / seconds),
        "peak GiB": round(module.max_memory_allocated() / 2**30, 2),
        "loss": round(loss.item(), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--variant", choices=("shipped", "patched", "rematerialised", "upstream"), default="patched"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    kind = torch.accelerator.current_accelerator()
    device = torch.device(kind.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    model = build(args.shape, max(args.tokens), device, args.variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for tokens in args.tokens:
        torch.manual_seed(dist.get_rank())
        ids = torch.randint(model.config.vocab_size, (1, tokens), device=device)
        row = {"variant": args.variant, "tokens": tokens, "GPUs": dist.get_world_size()}
        try:
            row |= measure(model, optimizer, ids, args.steps)
        except torch.OutOfMemoryError:
            row["peak GiB"] = "does not fit"
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
        if row["peak GiB"] == "does not fit":
            break
    os._exit(0)  # after running out of memory the group cannot be closed in order


if __name__ == "__main__":
    main()
