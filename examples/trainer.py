"""Fine-tune with Hugging Face's Trainer.     torchrun --nproc-per-node 8 examples/trainer.py MODEL TEXT

`use_liger_kernel=True` is all: the Trainer patches the model before accelerate wraps it with DDP, FSDP or DeepSpeed. It
also counts the labels of all processes and accumulation steps, and the patched loss divides by that count.
"""

import argparse
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


class Blocks(torch.utils.data.Dataset):
    """A text in pieces of `seq` tokens."""

    def __init__(self, model: str, text: str, seq: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        with open(text, encoding="utf-8") as file:
            ids = torch.tensor(tokenizer(file.read(), add_special_tokens=False)["input_ids"])
        self.rows = ids[: len(ids) // seq * seq].view(-1, seq)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def main(argv=None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences a step and process")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument(
        "--deepspeed", help="a DeepSpeed configuration, such as examples/zero3.json"
    )
    parser.add_argument("--out", default="runs/trainer")
    args = parser.parse_args(argv)

    accelerator = torch.accelerator.is_available()
    arguments = TrainingArguments(
        output_dir=args.out,
        use_liger_kernel=True,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        learning_rate=1e-5,
        bf16=accelerator,
        use_cpu=not accelerator,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        deepspeed=args.deepspeed,
        ddp_find_unused_parameters=False if "WORLD_SIZE" in os.environ else None,
    )  # made before the model: under ZeRO-3 it decides how the model is loaded
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    data = Blocks(args.model, args.text, args.seq)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
