"""Whole training steps of Llama shapes with random weights: tokens/s and peak memory a GPU, as JSON lines.

    python benchmarks/steps.py [ROW ...] [--variant shipped|patched|rematerialised ...]
    torchrun --nproc-per-node 2 benchmarks/steps.py 8b/1x4096/adamw 8b/1x8192/adamw --variant patched

A row is MODEL/BATCHxTOKENS/OPTIMIZER with an optional fourth part, `checkpoint` or `lora` (rank 16 on all linear
layers but the head, which is frozen with the rest). bf16 parameters and optimizer states, sdpa attention; under
torchrun FSDP2 with every layer and the root a unit of its own, the batch one GPU's. A row that does not fit says so.
--profile adds where the GPU's milliseconds of a step go.
"""

import argparse
import collections
import gc
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

VARIANTS = ("shipped", "patched", "rematerialised", "upstream")
MODELS = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
ROWS = (
    "1b/4x2048/adamw",
    "1b/1x8192/adamw",
    "8b/1x8192/sgd",
    "8b/1x8192/adamw/lora",
    "1b/1x32768/adamw",
    "8b/1x8192/sgd/checkpoint",
    "8b/1x32768/sgd/checkpoint",
)


def build(model_name: str, longest: int, device: torch.device, variant: str, extra: str):
    config = LlamaConfig(
        **MODELS[model_name], max_position_embeddings=longest, rope_theta=5e5, use_cache=False
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        if extra == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(
                model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
            )
    bare = model.get_base_model() if extra == "lora" else model
    if variant in ("patched", "rematerialised"):
        import liger_kernel

        liger_kernel.patch(model, rematerialise=variant == "rematerialised")
    if variant == "upstream":  # another package of this name, patched as its users do
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=bare)
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for layer in bare.model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device=device)
    with device:
        bare.model.rotary_emb = LlamaRotaryEmbedding(config)
    bare.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
    if extra == "checkpoint":
        bare.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def optimizer_of(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-5, fused=True)
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def measure(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, steps: int
) -> dict:
    module = torch.get_device_module(ids.device)
    times = []
    module.reset_peak_memory_stats()
    for step in range(steps + 2):
        module.synchronize()
        begin = time.perf_counter()
        loss = train_step(model, optimizer, ids)
        module.synchronize()
        if step >= 2:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    return {
        "ms": round(1e3 * seconds, 1),
        "least ms": round(1e3 * min(times), 1),
        "tokens/s a GPU": round(ids.numel() / seconds),
        "peak GiB": round(module.max_memory_allocated() / 2**30, 2),
        "loss": round(loss.item(), 4),
    }


# kind of a kernel -> what its name, after a blank, contains; the first that fits. The rest is "elementwise": additions,
# copies, sums.
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "attention"),
    "optimizer": ("multi_tensor", "fusedadam", "fusedsgd"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "product_kernel", "back_kernel", "splitk"),
    "head rows": ("_rows_kernel", "target_kernel", "finish_kernel", "close_kernel", "cross_entropy"),
    "RoPE": ("rope", "rotary"),
    "gated": ("swiglu", "silu", " _forward_kernel", " _backward_kernel"),
    "norms": ("norm", " forward_kernel", " backward_kernel", " _sum_kernel"),
    "elementwise": ("",),
}  # fmt: skip


def profile(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> dict:
    """Milliseconds of one step's kernels by kind, and the longest ones by name."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        train_step(model, optimizer, ids)
        torch.get_device_module(ids.device).synchronize()
    names = collections.Counter()
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CPU and not event.is_user_annotation:
            names[event.name[:120]] += event.self_device_time_total / 1e3
    kinds = collections.Counter()
    for name, ms in names.items():
        lower = f" {name.lower()}"
        kind = next(k for k, parts in KINDS.items() if any(part in lower for part in parts))
        kinds[kind] += ms
    longest = {name: round(ms, 2) for name, ms in names.most_common(24)}
    return {"kinds": {k: round(ms, 2) for k, ms in kinds.most_common()}, "longest": longest}


def run(row: str, variant: str, device: torch.device, steps: int, profiled: bool) -> dict:
    name, size, optimizer, extra = (*row.split("/"), "")[:4]
    batch, tokens = map(int, size.split("x"))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = {"row": row, "variant": variant, "GPUs": world}
    try:
        model = build(name, tokens, device, variant, extra)
        torch.manual_seed(rank)
        ids = torch.randint(MODELS[name]["vocab_size"], (batch, tokens), device=device)
        stepper = optimizer_of(model, optimizer)
        found |= measure(model, stepper, ids, steps)
        return found | profile(model, stepper, ids) if profiled else found
    except torch.OutOfMemoryError:
        return found | {"peak GiB": "does not fit"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="ROW")
    parser.add_argument("--variant", choices=VARIANTS, nargs="+", default=["patched"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    kind = torch.accelerator.current_accelerator()
    device = torch.device(kind.type, int(os.environ.get("LOCAL_RANK", 0)))
    torch.accelerator.set_device_index(device.index)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(device_id=device)
    for row in args.rows:
        for variant in args.variant:
            found = run(row, variant, device, args.steps, args.profile)
            gc.collect()  # models have cycles
            torch.get_device_module(device).empty_cache()
            if int(os.environ.get("RANK", 0)) == 0:
                print(json.dumps(found), flush=True)
    os._exit(0)  # after running out of memory a group cannot be closed in order


if __name__ == "__main__":
    main()
